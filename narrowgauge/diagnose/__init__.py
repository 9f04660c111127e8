"""Diagnosis of runs: comparisons, verdicts, tensor statistics, non-finite numbers, GPU idle time.

Nothing is imported here: `runs` and `compare` need Python alone, the other modules need torch.
"""
