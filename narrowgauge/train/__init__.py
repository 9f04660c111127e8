"""Training runs: configuration, loop, checkpoints, metrics and run folder.

Importing this package imports nothing else.
"""
