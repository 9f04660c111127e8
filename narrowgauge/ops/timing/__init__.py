"""Predicted duration of operations on a GPU, for `narrowgauge plan` and `recipe="auto"`.

cards  GPUs and their peak rates
work   FLOPs and bytes of an operation
rates  seconds of an operation on a card
"""
