"""Studies: one training run repeated over recipes and seeds, with a verdict on each recipe."""
