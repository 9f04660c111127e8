"""Norm and clipping of gradients on the CPU, in two passes over memory: norm.cpp.

    square()      sum of squares in float64, over the sums of blocks of 4,096 elements; one read
    multiply(c)   x = round(x c), as torch's product; one read and one write of blocks with nonzero
                  elements

An embedding's gradient is nearly all zeros: rows of words that the batch does not contain. torch
needs a call for each tensor and each piece of a tensor, and copies pieces to float64. That takes 6
ms for the 22.7 million parameters of MiniLM on two threads, and one read takes 1 ms.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from narrowgauge.addresses import address, dry_run_on, wrapper
from narrowgauge.ops.cpp import Library

BLOCK = 4096
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_SHARED = (*(ctypes.c_void_p,) * 4, ctypes.c_int64, ctypes.c_void_p)
LIBRARY = Library(
    ("norm.cpp",), "the norm of gradients", {"squares": _SHARED, "multiply": (*_SHARED, ctypes.c_float)},
    package="narrowgauge.optim.cpp", instead="leave it to torch",
)  # fmt: skip


class GradientBlocks:
    """Gradients as blocks of 4,096 elements.

    `of` returns None for tensors that the kernel does not accept.
    """

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        counts = [-(-each.numel() // BLOCK) for each in tensors]
        self.count, self.elements = sum(counts), sum(each.numel() for each in tensors)
        starts = [0, *accumulate(counts[:-1])]
        columns = (
            starts,
            [each.numel() for each in tensors],
            map(address, tensors),
            [DTYPES[each.dtype] for each in tensors],
        )
        self._given = [
            torch.tensor(list(each), dtype=torch.int64, device="cpu") for each in columns
        ]
        self._sums = torch.zeros(self.count, dtype=torch.float64, device="cpu")
        # Keeps the memory alive whose addresses the kernel gets.
        self._tensors = tensors

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> GradientBlocks | None:
        """Build blocks from dense float32 and bfloat16 CPU tensors. Empty tensors are skipped."""
        tensors = [each for each in tensors if each.numel()]
        if (
            not tensors
            or dry_run_on() is not None
            or wrapper(*tensors)
            or torch.compiler.is_compiling()
            or LIBRARY.missing
        ):
            return None
        fit = all(
            each.device.type == "cpu" and each.dtype in DTYPES and each.is_contiguous()
            for each in tensors
        )
        # Zero tensors of autograd report a shape and dtype but have no memory.
        return cls(tensors) if fit and not any(map(torch._is_zerotensor, tensors)) else None

    def square(self) -> Tensor:
        """Sum of squares: 0-d float64."""
        return self.squares().sum()

    def squares(self) -> Tensor:
        """Sums of squares: float64 [blocks], in the order of the tensors."""
        self._call("squares")
        return self._sums

    def multiply(self, factor: float) -> None:
        """Multiply the tensors by `factor`, in place; call `square` first."""
        # The kernel skips blocks whose sum of squares, from `square`, is zero.
        self._call("multiply", factor)

    def _call(self, name: str, *more: float) -> None:
        LIBRARY.call(
            name, self.count, self.elements, *self._given, len(self._tensors), self._sums, *more
        )
