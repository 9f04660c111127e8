"""Workaround for torch.compile, which may draw a random number a second time in backward."""

from __future__ import annotations

import torch
from torch import Tensor


def tied(x: Tensor, to: Tensor) -> Tensor:
    """Return x; under torch.compile, x plus a zero that is computed from `to`.

    For a draw of forward, x is a tensor that forward's result needs and `to` is the draw. For a
    draw of backward, x is the draw and `to` is the gradient.
    """
    if not torch.compiler.is_compiling():
        return x
    # The min-cut partitioner (torch 2.13) protects a random op from recomputation only if forward's
    # result needs it. A draw that backward alone reads was computed partly in forward and partly in
    # backward, from two draws: sampled rows with the numbers of other rows, and two operands of one
    # GEMM with different signs (SQNR of mxfp4's weight gradients: -9 to -5 dB instead of 9 to 12).
    return x + to.reshape(-1)[:1].isnan().sum() * 0.0
