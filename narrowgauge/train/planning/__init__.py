"""What a run of `narrowgauge train` needs, from its settings alone: no data are read, no weights, and no run folder is touched.

steps     a step of these settings under fake tensors, built by the trainer's own code
shapes    the largest micro-batch that the settings allow
depth     the same settings with fewer layers, where all layers are alike
"""
