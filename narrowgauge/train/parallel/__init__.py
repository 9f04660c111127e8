"""Training on several ranks of torchrun.

Modules: process group and agreement (`ranks`), distributed model (`spread`), tensor, sequence and
pipeline parallelism, checkpoints, and drift detection (`digest`).
"""
