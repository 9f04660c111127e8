"""What narrowgauge gains on one GPU, in under nine minutes: `make bench-gpu`, or python -m benchmarks.gpu.

First the card's own rates (floor.py): copying, BF16 and FP8 products. Every result is also a share of the one that bounds it. Then the
questions, a file each, within a budget of seconds; what a budget leaves out is named. `--dry-run` runs all of it at toy sizes, on a CPU
too, and records nothing: so that no minute of a GPU is lost on a typo.
"""
