"""Dropout on the CPU whose noise all threads compute, forward and backward; see `ops.dropout`.

    y[i]  = round(x[i] * s)    where element i stays, else 0     s = 1 / (1 - p) in float32
    dx[i] = round(dy[i] * s)   where element i stays, else 0

torch draws the mask element by element from one generator on one thread, and saves it for backward
in x's dtype.

torch's own dropout runs on a GPU, under torch.compile, without a C++ compiler, and for dtypes other
than float32 and bfloat16.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.addresses import dry_run_on, in_memory, wrapper
from narrowgauge.nn import transforms
from narrowgauge.nn.autograd_rules import no_double_backward
from narrowgauge.ops.cpp import Library
from narrowgauge.ops.dropout import Dropout
from narrowgauge.ops.registry import Device, Refusal, device_facts

# Elements of one unit of work in dropout.cpp.
BLOCK = 4096
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_SIGNATURES = {
    "dropout": (
        ctypes.c_int64, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, *(ctypes.c_uint32,) * 3, ctypes.c_float, ctypes.c_void_p,
    )
}  # fmt: skip
LIBRARY = Library(("dropout.cpp",), "dropout", _SIGNATURES)


class CountedDropout(nn.Dropout):
    """nn.Dropout with counter-based noise. inplace=True uses torch's dropout."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0 or self.inplace or _runs_in_torch(input):
            return super().forward(input)
        return dropout(input, self.p)


def dropout(x: Tensor, p: float) -> Tensor:
    """Set a share p of the elements of x to zero and divide the others by 1 - p.

    x  any shape, float32 or bfloat16, on the CPU
    """
    drawn = Dropout.drawn(p)
    y: Tensor = x if drawn is None else _Dropout.apply(x, drawn)
    return y


def use_counted_dropout(model: nn.Module) -> int:
    """Replace the class of the model's nn.Dropout modules in place; return how many changed."""
    found = [
        module
        for module in model.modules()
        if type(module) is nn.Dropout and module.p > 0 and not module.inplace
    ]
    for module in found:
        module.__class__ = CountedDropout
    return len(found)


def reference(x: Tensor, dropout: Dropout) -> Tensor:
    """The definition in plain torch."""
    kept = dropout.kept(x.shape, x.device)
    return torch.where(kept, x.to(torch.float32) * dropout.scale, 0.0).to(x.dtype)


def refuse(dtype: torch.dtype, device: Device) -> Refusal | None:
    """Return the reason why torch's dropout runs for tensors of this dtype instead, or None."""
    if dtype not in DTYPES or device.type != "cpu":
        return Refusal("dtype", "written for float32 and bfloat16 on the CPU")
    return LIBRARY.refuse(device.type)


def _runs_in_torch(x: Tensor) -> bool:
    """Return True if the memory of x is not at hand, or if the kernel refuses x."""
    return (
        torch.compiler.is_compiling()
        or transforms.is_active(x)
        or bool(dry_run_on() is None and wrapper(x))
        or refuse(x.dtype, device_facts(x.device.type, x.device.index)) is not None
    )


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, drawn: Dropout) -> Tensor:
        ctx.drawn = drawn
        return _computed(x, drawn)

    @staticmethod
    @no_double_backward("counted dropout", "Use torch.nn.functional.dropout for them.")
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        return _computed(gy, ctx.drawn), None


def _computed(x: Tensor, drawn: Dropout) -> Tensor:
    x = in_memory(x).contiguous()
    y = torch.empty_like(x)
    blocks = -(-x.numel() // BLOCK)
    LIBRARY.call(
        "dropout",
        blocks,
        x.numel(),
        BLOCK,
        x,
        DTYPES[x.dtype],
        x.numel(),
        *drawn.words,
        drawn.threshold,
        drawn.scale,
        y,
    )
    return y
