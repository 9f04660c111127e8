"""A training run: its configuration, loop, checkpoints, metrics and run folder. Importing it imports nothing else."""
