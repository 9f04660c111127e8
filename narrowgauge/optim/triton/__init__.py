"""The optimizer step in Triton for GPUs."""
