"""Dropout whose noise is computed where it is read: on the CPU, from a key and the number of the element (`ops.random`).

    y[i] = round(x[i] * s)     where uniform[i] >= p, else 0;      s = 1 / (1 - p) in float32; uniform in steps of 2^-24
    dx[i] = round(dy[i] * s)   where uniform[i] >= p, else 0

torch draws one number after the other from one generator, on one thread, and keeps a mask in x's type for backward. Here a draw takes two
numbers of torch's generator however large x is, all threads compute, and backward computes the noise again: nothing is kept. So what
repeats a forward pass from the generator's state (checkpointing, a run that is resumed) repeats it to the bit.

Elsewhere (on a GPU, under torch.compile, without a C++ compiler, for types other than float32 and bfloat16) it is torch's.
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

BLOCK = 4096
DTYPES = {torch.float32: 0, torch.bfloat16: 1}
_SIGNATURES = {
    "dropout": (
        ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64, *(ctypes.c_uint32,) * 3, ctypes.c_float, ctypes.c_void_p,
    )
}  # fmt: skip
LIBRARY = Library(("dropout.cpp",), "dropout", _SIGNATURES)


class CountedDropout(nn.Dropout):
    """nn.Dropout with noise by the number of the element. p and inplace as there; in place it is torch's."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or self.p == 0 or self.inplace or _refuse(input):
            return super().forward(input)
        return dropout(input, self.p)


def dropout(x: Tensor, p: float) -> Tensor:
    """x of any shape, float32 or bfloat16 on the CPU, with a share p of its elements zero and the others divided by 1 - p."""
    key = random.draw((), torch.device("cpu"))
    assert isinstance(key, random.Key) and isinstance(key.words, tuple)
    y: Tensor = _Dropout.apply(x, p, key.words)
    return y


def use_counted_dropout(model: nn.Module) -> int:
    """Gives torch's dropouts of a model this forward, in place; how many."""
    found = [module for module in model.modules() if type(module) is nn.Dropout and module.p > 0 and not module.inplace]
    for module in found:
        module.__class__ = CountedDropout
    return len(found)


def reference(x: Tensor, p: float, words: tuple[int, int]) -> Tensor:
    """The definition in plain torch."""
    kept = random.reference(*words, tuple(x.shape)) * 2.0**24 >= math.ceil(p * 2**24)
    return torch.where(kept, x.to(torch.float32) * _scale(p), 0.0).to(x.dtype)


def _scale(p: float) -> float:
    return 1.0 / (1.0 - p) if p < 1.0 else 0.0


def _refuse(x: Tensor) -> str:
    """Why torch computes it, or ''."""
    if torch.compiler.is_compiling() or transforms.is_active(x) or (dry_run_on() is None and wrapper(x)):
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
        "dropout", blocks, x.numel(), x, DTYPES[x.dtype], x.numel(), *words, math.ceil(p * 2**24), _scale(p), y
    )
    return y
