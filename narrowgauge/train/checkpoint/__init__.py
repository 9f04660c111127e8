"""Checkpoints of a run: their contents (`state`) and their files (`store`, `sharded`)."""
