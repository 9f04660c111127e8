"""Blame: which product of which layer is inaccurate, and whether that hurts."""
