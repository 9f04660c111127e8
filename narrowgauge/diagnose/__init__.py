"""Diagnosis of runs: comparisons, verdicts, tensor statistics, non-finite numbers, GPU idle time.

Only the table of former places is imported here: `runs` and `compare` need Python alone, the other
modules need torch.
"""

from narrowgauge.diagnose import moved

moved.serve()
