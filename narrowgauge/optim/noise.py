"""Random bits of stochastic rounding, as a function of (seed, parameter, step, element) instead of a generator's history.

    bits(key, i) = mix(key + i)                      key = mix over (seed, number of the parameter, step)
    uniform      = (bits >> 8) / 2^24, in [0, 1)

So a resumed run, another chunking, another number of threads and a compiled kernel all draw the same numbers, and the state to
save is the seed and the step count. `mix` is the 32-bit finalizer with the constants of Chris Wellons' hash-prospector
("lowbias32"): two multiplications, bias 0.17 of 2^-10 by its author's measure.
"""

from __future__ import annotations

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
WEIGHTS = 0x5BD1E995  # what tells the numbers of a weight from those of its states


def mix(x: int) -> int:
    """32 bits to 32 bits, one to one."""
    x &= MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def key(seed: int, parameter: int, step: int) -> int:
    """32 bits for an update of a parameter."""
    found = mix((seed & MASK) + 0x9E3779B9)
    for part in (seed >> 32, parameter, step):
        found = mix(found ^ mix(part + 0x9E3779B9))
    return found


def bits(key: int, index: Tensor) -> Tensor:
    """index int64 >= 0, any shape -> int64 in [0, 2^32) of the same shape."""
    x = (index + key) & MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def uniform(key: int, index: Tensor) -> Tensor:
    """index int64 >= 0 -> float32 in [0, 1), multiples of 2^-24."""
    return (bits(key, index) >> 8).to(torch.float32) * 2.0**-24
