"""Scores of a run's saved weights, in the run's recipe and in 16 bits, at several checkpoints.

Scores come from the run's validation data or from tasks of lm-eval.
"""
