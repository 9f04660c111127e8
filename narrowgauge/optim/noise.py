"""Random bits of stochastic rounding, a pure function of (seed, parameter, step, element).

    key          = mix over (seed, step, number of the parameter)
    bits(key, i) = half h of mix(key + 8 b + l)    element i = 16 b + 8 h + l, in whole tiles
    uniform      = (bits + 1/2) / 2^16

The number of a parameter is a hash of its name, or its position in the groups if names are unknown.
Elements are counted in the whole parameter, also on a rank that stores a part. So a wrapped or
sharded model draws the random numbers of one process. A resumed run, other chunk sizes or thread
counts, and compiled kernels draw them too. The state to save is the seed and the step count.

One mixing serves two elements eight apart, with the lower half for the first, so a vector of eight
mixings serves sixteen elements. Adding half of the last bit makes 16 bits sufficient: rounding is
unbiased to 2^-17 of a gap, and symmetric. `mix` is the 32-bit finalizer of Chris Wellons'
hash-prospector ("lowbias32"): two multiplications, with a bias of 0.17 of 2^-10 by its author's
measure.
"""

from __future__ import annotations

from functools import cache
from hashlib import blake2b

import torch
from torch import Tensor

from narrowgauge.structure import plain_name

# Python integers do not wrap, so each product is reduced to 32 bits.
MASK = 0xFFFFFFFF
# Elements that share eight mixings.
BLOCK = 16
# Separates the random numbers of a weight from the random numbers of its states.
WEIGHTS = 0x5BD1E995


def mix(x: int) -> int:
    """32-bit finalizer, one to one."""
    x &= MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def step_key(seed: int, step: int) -> int:
    """32-bit key of one step of all parameters."""
    found = mix((seed & MASK) + 0x9E3779B9)
    for part in (seed >> 32, step):
        found = mix(found ^ mix(part + 0x9E3779B9))
    return found


def key(step_key: int, parameter: int) -> int:
    """32-bit key of one parameter in one step."""
    return mix(step_key ^ of_parameter(parameter))


@cache
def of_parameter(number: int) -> int:
    """Contribution of a parameter's number to the key."""
    return mix(number + 0x9E3779B9)


@cache
def of_name(name: str) -> int:
    """Number of a parameter's name: 32 bits, independent of wrappers.

    Prefixes of DDP, FSDP, activation checkpointing and torch.compile are removed.
    """
    return int.from_bytes(blake2b(plain_name(name).encode(), digest_size=4).digest(), "little")


def bits(key: int, index: Tensor) -> Tensor:
    """index int64 >= 0 -> int32 in [0, 2^16), of the same shape."""
    # int64 on purpose: the low 32 bits of a product survive overflow, and right shifts see no sign
    # bit.
    x = (key + (index >> 4) * 8 + (index & 7)) & MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    # Tried and lost: noise that walks by the golden ratio in time. v was closer (5.8 % off instead
    # of 7.1 %), walks were no better, and each kernel needed another key.
    return (((x ^ (x >> 16)) >> ((index & 8) * 2)) & 0xFFFF).to(torch.int32)


def uniform(bits: Tensor) -> Tensor:
    """bits [...] -> float32 in (0, 1), odd multiples of 2^-17."""
    return (bits.to(torch.float32) + 0.5) * 2.0**-16
