"""narrowgauge: train Transformers on narrow numbers."""
