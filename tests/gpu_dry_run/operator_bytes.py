"""Bytes that torch's own operators move in eager mode, which the log cannot know: a launch of theirs has no sizes.

    with OperatorBytes() as operators:
        model(x).sum().backward()
    operators.moved_bytes, operators.by_name["aten.mul.Tensor"]     # [calls, bytes]

Each tensor that an operator takes counts once as a read, each that it gives or changes once as a write, whole; views and empty tensors
count nothing. An operator of several kernels (a reduction in two passes, an attention's backward) moves more than that. Products of
matrices are left out. Triton kernels are not operators: those are in the log.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

PRODUCTS = (
    "aten.mm",
    "aten.addmm",
    "aten.bmm",
    "aten.baddbmm",
    "aten._scaled_mm",
    "aten._int_mm",
    "aten._grouped_mm",
    "aten._scaled_grouped_mm",
)
NOTHING = (
    "aten.empty", "aten.new_empty", "aten.set_", "aten.detach", "aten.lift_fresh", "aten._unsafe_view", "aten.record_stream",
)  # fmt: skip


class OperatorBytes(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.by_name: dict[str, list[int]] = {}

    @property
    def moved_bytes(self) -> int:
        return sum(
            size for name, (_, size) in self.by_name.items() if not name.startswith(PRODUCTS)
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = str(func)
        if not func.is_view and not name.startswith(NOTHING):
            count = self.by_name.setdefault(name, [0, 0])
            count[0] += 1
            count[1] += _bytes_of((args, kwargs)) + _bytes_of(out)
        return out


def _bytes_of(tree: Any) -> int:
    """Of tensors on the GPU, broadcast ones by what lies in memory."""
    return sum(_stored(x) for x in tree_leaves(tree) if isinstance(x, torch.Tensor) and x.is_cuda)


def _stored(x: torch.Tensor) -> int:
    count = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        count *= size if stride else 1
    return count * x.element_size() if x.numel() else 0
