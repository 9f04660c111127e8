"""Diagnosis of a run: tensor statistics, the comparison of two runs, the first non-finite number, GPU idle time, this machine.

Nothing is imported here: `runs` and `compare` need Python alone, the other modules need torch.
"""
