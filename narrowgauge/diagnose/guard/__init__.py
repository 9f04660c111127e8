"""The guard: judges a run on narrow numbers against short BF16 stretches from its own state. Nothing is imported here."""
