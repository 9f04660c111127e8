"""Memory and time of a `narrowgauge train` run, estimated from its settings alone.

steps     traces a training step under fake tensors, built by the trainer's own code
shapes    shape of the largest micro-batch that the settings allow
depth     the same settings with fewer layers, for models with identical layers

No data and no weights are read, and no run folder is touched.
"""
