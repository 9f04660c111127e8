"""Optimizer step in Triton for GPUs."""
