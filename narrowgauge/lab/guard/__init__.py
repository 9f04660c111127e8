"""The guard: compares a low-precision run with short BF16 probes from its own state.

Nothing is imported here.
"""
