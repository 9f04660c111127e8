"""Random bits of stochastic rounding, as a function of (seed, parameter, step, element) instead of a generator's history.

    bits(key, i) = half h of mix(key + 8 b + l)      element i = 16 b + 8 h + l of the parameter, counted by whole tiles
    uniform      = (bits + 1/2) / 2^16               key = mix over (seed, step, number of the parameter)

The number is that of the parameter's name, where names are known, else its place in the groups; and elements are counted in the
whole parameter, whichever part of it a rank holds. So however a model is wrapped and sharded, it draws the numbers of one process.

So a resumed run, another chunking, another number of threads and a compiled kernel all draw the same numbers, and the state to
save is the seed and the step count. One mixing serves two elements eight apart, the lower half the first: a vector of eight
serves sixteen. 16 bits are enough where half of the last one is added: what is rounded is then without bias to 2^-17 of a gap,
and symmetric about it. `mix` is the 32-bit finalizer with the constants of Chris Wellons' hash-prospector ("lowbias32"): two
multiplications, bias 0.17 of 2^-10 by its author's measure.
"""

from __future__ import annotations

from functools import cache
from hashlib import blake2b

import torch
from torch import Tensor

MASK = 0xFFFFFFFF
BLOCK = 16  # elements whose numbers come from eight mixings
WRAPPERS = frozenset(
    ("module", "_fsdp_wrapped_module", "_orig_mod", "_checkpoint_wrapped_module")
)  # parts of names that they add
WEIGHTS = 0x5BD1E995  # what tells the numbers of a weight from those of its states


def mix(x: int) -> int:
    """32 bits to 32 bits, one to one."""
    x &= MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return x ^ (x >> 16)


def step_key(seed: int, step: int) -> int:
    """32 bits for a step of all parameters."""
    found = mix((seed & MASK) + 0x9E3779B9)
    for part in (seed >> 32, step):
        found = mix(found ^ mix(part + 0x9E3779B9))
    return found


def key(step_key: int, parameter: int) -> int:
    """32 bits for an update of a parameter."""
    return mix(step_key ^ of_parameter(parameter))


@cache
def of_parameter(number: int) -> int:
    """What a parameter's number adds to the key of its step."""
    return mix(number + 0x9E3779B9)


@cache
def of_name(name: str) -> int:
    """The number of a parameter's name: 32 bits, the same however the model is wrapped (by DDP, FSDP, checkpointing, compile)."""
    bare = ".".join(part for part in name.split(".") if part not in WRAPPERS)
    return int.from_bytes(blake2b(bare.encode(), digest_size=4).digest(), "little")


def bits(key: int, index: Tensor) -> Tensor:
    """index int64 >= 0, any shape -> int32 in [0, 2^16) of the same shape."""
    x = (key + (index >> 4) * 8 + (index & 7)) & MASK
    x = ((x ^ (x >> 16)) * 0x7FEB352D) & MASK
    x = ((x ^ (x >> 15)) * 0x846CA68B) & MASK
    return (((x ^ (x >> 16)) >> ((index & 8) * 2)) & 0xFFFF).to(torch.int32)


def uniform(bits: Tensor) -> Tensor:
    """bits [...] -> float32 in (0, 1), odd multiples of 2^-17."""
    return (bits.to(torch.float32) + 0.5) * 2.0**-16
