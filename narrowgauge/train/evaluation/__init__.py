"""Scores of what a run has saved: its validation data, or tasks of lm-eval, by narrow and by 16-bit products, at several checkpoints."""
