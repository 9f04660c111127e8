"""Random numbers that torch.compile may not draw a second time."""

from __future__ import annotations

import torch
from torch import Tensor


def tied(x: Tensor, to: Tensor) -> Tensor:
    """x itself; while torch.compile traces, x plus a zero that is computed from `to`, so that the result depends on both.

    The partitioner of torch.compile (torch 2.13) keeps a random number from being drawn again in backward only where forward's
    result needs it. What backward alone reads it computes in parts on both sides, from two draws: a sample's rows and their numbers
    were of different rows, and the two operands of a rotated product rotated by different signs, without a word. So a draw of
    forward is needed by its result, and one of backward needs the gradient.
    """
    if not torch.compiler.is_compiling():
        return x
    return x + to.reshape(-1)[:1].isnan().sum() * 0.0
