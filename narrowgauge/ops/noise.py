"""noise: the random numbers of stochastic rounding, as a function of (key, element) with a key from torch's generator.

    uniform[i] = (mix(mix(i + low) ^ high) >> 8) / 2^24, in [0, 1);    low, high 32 bits each, i modulo 2^32

A draw costs two numbers of the generator however large the tensor is, so repeating a forward pass repeats it, and a checkpoint
that holds the generator's state holds it. A kernel computes the number where it rounds instead of reading it from memory. mix
is the 32-bit finalizer with the constants of Chris Wellons' hash-prospector ("lowbias32"); two of them, one per half of the key,
so that two draws are not each other's stretches.

On the CPU in eager mode. Elsewhere, and under torch.compile, `draw` is torch.rand, which is fast or fused there.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.cpp import kernels as cpp

MASK = 0xFFFFFFFF


@dataclass(frozen=True)
class Key:
    """Noise that is not in memory yet: the numbers of (low, high) for the elements of a tensor, row by row."""

    low: int
    high: int

    def uniform(self, shape: tuple[int, ...]) -> Tensor:
        """float32 in [0, 1) of `shape`, multiples of 2^-24."""
        if cpp.refuse("cpu") is None:
            return cpp.uniform(tuple(shape), (self.low, self.high))
        return reference(self.low, self.high, tuple(shape))


def reference(low: int, high: int, shape: tuple[int, ...]) -> Tensor:
    """The definition in plain torch."""
    index = torch.arange(torch.Size(shape).numel(), dtype=torch.int64)
    bits = _mix(_mix((index + low) & MASK) ^ high)
    return ((bits >> 8).to(torch.float32) * 2.0**-24).reshape(shape)


def draw(shape: tuple[int, ...], device: torch.device) -> Key | Tensor:
    """Noise for a tensor of `shape` on `device`, from torch's generator."""
    if device.type != "cpu" or torch.compiler.is_compiling():
        return torch.rand(shape, dtype=torch.float32, device=device)
    low, high = torch.randint(0, 2**32, (2,), dtype=torch.int64).tolist()
    return Key(low, high)


def _mix(x: Tensor) -> Tensor:
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)
