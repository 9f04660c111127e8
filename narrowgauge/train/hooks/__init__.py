"""What a run watches and does beside its steps."""
