"""GEMMs of another library, seen from below: each call of aten.mm and aten.addmm inside a block.

    with GemmCalls() as calls: y = module(x)
    calls.found[0].lhs        [M, K], .rhs [K, N], .bias or None, .result [M, N]

A dispatch mode sees a tensor subclass before the subclass decodes itself, so lhs and rhs are the
codes that a kernel reads, or that are emulated. GEMMs inside such a subclass are not seen again.
A mode that is open when backward begins is open in its threads as well.

Kernels called in other ways (extensions in C++, Triton) are not seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class GemmCall:
    """result [M, N] = lhs [M, K] @ rhs [K, N] + bias."""

    def __init__(self, lhs: Tensor, rhs: Tensor, bias: Tensor | None, result: Tensor) -> None:
        self.lhs, self.rhs, self.bias, self.result = lhs, rhs, bias, result.detach()

    @property
    def shape(self) -> tuple[int, int, int]:
        """[M, N, K]."""
        return self.lhs.shape[0], self.rhs.shape[1], self.lhs.shape[1]

    def oriented(self, shape: tuple[int, int, int]) -> GemmCall | None:
        """The call as a GEMM of shape [M, N, K], if need be transposed; None if it has another.

        Some libraries compute the transposed gradient of a weight, x.T @ grad_output.
        """
        if self.shape == shape:
            return self
        rows, columns, contracted = self.shape
        if (columns, rows, contracted) == shape:
            return GemmCall(self.rhs.t(), self.lhs.t(), self.bias, self.result.t())
        return None


class GemmCalls(TorchDispatchMode):
    """Collects the GEMMs inside a `with` block in `found`, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[GemmCall] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            self.found.append(GemmCall(args[0], args[1], None, result))
        elif func is torch.ops.aten.addmm.default and not kwargs:
            self.found.append(GemmCall(args[1], args[2], args[0], result))
        return result


def assigned(
    calls: Sequence[GemmCall], shapes: Sequence[tuple[int, int, int]]
) -> list[GemmCall | None]:
    """The first call of each shape [M, N, K] that no earlier shape has taken; None without one.

    Libraries compute the gradient of the input before that of the weight, which decides between
    GEMMs of equal shapes.
    """
    left = list(calls)
    found: list[GemmCall | None] = []
    for shape in shapes:
        place = next((at for at, each in enumerate(left) if each.oriented(shape) is not None), None)
        found.append(None if place is None else left.pop(place).oriented(shape))
    return found
