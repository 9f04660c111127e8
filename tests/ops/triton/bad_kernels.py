"""Kernels that the checks of compiled code must object to."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from narrowgauge.ops.triton.launch import launch


@triton.jit
def hoard(x, out, BLOCK: tl.constexpr):
    """Sorts 8,192 numbers in one warp: 256 of them per thread, more than it has registers."""
    tl.store(out + tl.arange(0, BLOCK), tl.cumsum(tl.load(x + tl.arange(0, BLOCK)), reverse=True))


@triton.jit
def largest(x, out, BLOCK: tl.constexpr):
    """The maximum of one program, NaN if there is one."""
    values = tl.load(x + tl.arange(0, BLOCK))
    tl.store(out, tl.max(tl.maximum(values, 1.0, propagate_nan=tl.PropagateNan.ALL)))


def run() -> None:
    x = torch.empty(8192)
    launch(hoard, 1, x, x, BLOCK=8192, warps=1)
    launch(largest, 1, x, x, BLOCK=256, warps=4)
