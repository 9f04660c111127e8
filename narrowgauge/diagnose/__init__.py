"""Diagnosis of a run: tensor statistics, the comparison of two runs, blame for non-finite numbers, GPU idle time, this machine.

Nothing is imported here: `runs` and `compare` need Python alone, the other modules need torch.
"""
