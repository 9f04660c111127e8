"""Dropout on the CPU with noise that is a function of (key, element index), see `ops.random`.

    y[i]  = round(x[i] * s)    if uniform[i] >= p, else 0     s = 1 / (1 - p) in float32
    dx[i] = round(dy[i] * s)   if uniform[i] >= p, else 0     uniform in steps of 2^-24

torch draws the mask element by element from one generator on one thread, and saves
it for backward in x's dtype. Here a call draws two numbers from torch's generator,
independent of the size of x. All threads compute, and backward recomputes the
noise, so no mask is saved. Code that restores the generator and repeats a forward
pass (activation checkpointing, a resumed run) repeats it bit for bit.

torch's own dropout runs on a GPU, under torch.compile, without a C++
compiler, and for dtypes other than float32 and bfloat16.
"""

from __future__ import annotations

import ctypes
import math
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.addresses import dry_run_on, in_memory, wrapper
from narrowgauge.nn import transforms
from narrowgauge.nn.autograd_rules import no_double_backward
from narrowgauge.ops import random
from narrowgauge.ops.cpp import Library
from narrowgauge.ops.registry import device_facts

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
        if not self.training or self.p == 0 or self.inplace or _refuse(input):
            return super().forward(input)
        return dropout(input, self.p)


def dropout(x: Tensor, p: float) -> Tensor:
    """Set a share p of the elements of x to zero and divide the others by 1 - p.

    x  any shape, float32 or bfloat16, on the CPU
    """
    key = random.draw((), torch.device("cpu"))
    assert isinstance(key, random.Key) and isinstance(key.words, tuple)
    y: Tensor = _Dropout.apply(x, p, key.words)
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


def reference(x: Tensor, p: float, words: tuple[int, int]) -> Tensor:
    """The definition in plain torch."""
    # Compare whole numbers below 2^24, as the C++ does: p itself has no exact float32 value.
    kept = random.reference(*words, tuple(x.shape)) * 2.0**24 >= math.ceil(p * 2**24)
    return torch.where(kept, x.to(torch.float32) * _scale(p), 0.0).to(x.dtype)


def _scale(p: float) -> float:
    return 1.0 / (1.0 - p) if p < 1.0 else 0.0


def _refuse(x: Tensor) -> str:
    """Return the reason why torch's dropout runs instead, or ''."""
    if (
        torch.compiler.is_compiling()
        or transforms.is_active(x)
        or (dry_run_on() is None and wrapper(x))
    ):
        return "its memory is not at hand"
    if x.dtype not in DTYPES or device_facts(x.device.type, x.device.index).type != "cpu":
        return "written for float32 and bfloat16 on the CPU"
    return LIBRARY.missing


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, words: tuple[int, int]) -> Tensor:
        ctx.given = p, words
        return _computed(x, p, words)

    @staticmethod
    @no_double_backward("counted dropout", "Use torch.nn.functional.dropout for them.")
    def backward(ctx: Any, gy: Tensor) -> tuple[Tensor | None, ...]:
        return _computed(gy, *ctx.given), None, None


def _computed(x: Tensor, p: float, words: tuple[int, int]) -> Tensor:
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
        *words,
        math.ceil(p * 2**24),
        _scale(p),
        y,
    )
    return y
