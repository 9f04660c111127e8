"""Master weights: storage of the weight bits that 16 bits would lose. Reference definition.

A bfloat16 weight has 8 significant bits: rounding to nearest loses an update below 1/512 of the
weight.

    name             kept beside the weight           bytes  precision of the update
    fp32             the weight in float32            6      exactly float32
    bf16-remainder   the low 16 bits of the float32   4      exactly float32, same bits
    fp16-scaled      float16 and a power-of-two       4      11 bits, rounded stochastically
                     scale per tile
    stochastic       nothing                          2      8 bits, rounded stochastically;
                                                             11 for a float16 weight

The bytes include a bfloat16 weight.

fp32 and bf16-remainder are bit-identical in master and weight. Both round the weight to nearest
with ties away from zero, not to even.

fp16-scaled is the master of FP8-LM (arXiv 2310.18313), which uses one scale per tensor and rounds
to nearest. Stochastic rounding keeps small updates on average, as `stochastic` does ("Revisiting
BFloat16 Training", arXiv 2010.06192). A float16 weight under `stochastic` has the bits of FP8-LM's
master, without a scale and without a second weight. Below 2^-14 its gaps are 2^-24 = 6e-8, and
above 65,504 it is infinite. A float32 weight is its own master.

Tensors of one axis keep a float32 master instead of a scaled one, because almost any shard would
cut its tiles.

If a weight was loaded, clipped or swapped since the last step, it no longer equals the rounded
master. The step then starts from the weight. (bf16-remainder adds its 16 bits, less than a unit of
the weight.)
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from narrowgauge.optim import moments, noise

Master = Literal["fp32", "fp16-scaled", "bf16-remainder", "stochastic"] | None
KINDS: dict[str | None, int] = {
    None: 0,
    "fp32": 1,
    "fp16-scaled": 2,
    "bf16-remainder": 3,
    "stochastic": 4,
}


def round_to_bfloat16(x: Tensor, bits: Tensor) -> Tensor:
    """Round x float32 stochastically to bfloat16: E[result] = x.

    bits  int32 of x's shape, uniform in [0, 65536). The 16 dropped mantissa bits plus `bits`
          carry into the kept bits with probability equal to the dropped fraction. Values that
          bfloat16 represents, NaN and infinity do not change.
    """
    carried = ((x.view(torch.int32) + bits) & -65536).view(torch.float32)
    return torch.where(x.isfinite(), carried, x).to(torch.bfloat16)


def round_to_float16(x: Tensor, bits: Tensor) -> Tensor:
    """Round x float32 stochastically to float16: E[result] = x up to 65,504.

        bits  int32 of x's shape, uniform in [0, 65536). A normal number drops 13 mantissa bits, so
              13 random bits are used

    Larger and non-finite values convert as `x.half()`.
    """
    size = x.abs()
    normal = ((size.view(torch.int32) + (bits >> 3)) & -8192).view(torch.float32)
    # Subnormal numbers have equal gaps of 2^-24, so a carry into the mantissa would have the wrong
    # odds.
    part = size * 2.0**24
    whole = part.floor()
    subnormal = torch.where(noise.uniform(bits) < part - whole, whole + 1.0, whole) * 2.0**-24
    rounded = torch.copysign(torch.where(size < 2.0**-14, subnormal, normal), x)
    return torch.where(x.isfinite(), rounded, x).to(torch.float16)


def encode_scaled(x: Tensor, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """x [r, t, tile] float32 -> (float16 codes, same shape; scale [r, t] bfloat16).

    x ~= codes / 2^15 * scale. |x - x'| < 2^-10 |x| above 2^-29 of the scale, and < 2^-39 of the
    scale below. E[x'] = x. A tile with a non-finite number gets scale NaN and codes of zero, as for
    moments.
    """
    scale, inverse, x = moments.scaled(x, moments.POW2_DROPS)
    y = (x.abs() * inverse).clamp(max=1.0) * 2.0**15
    gap = moments.FP16.power_below(y) * 2.0**-10
    part = y / gap
    whole = part.floor()
    y = torch.where(uniform < part - whole, whole + 1.0, whole) * gap
    return torch.copysign(y, x).to(torch.float16), scale


def decode_scaled(codes: Tensor, scale: Tensor) -> Tensor:
    """Inverse of `encode_scaled`: float32, exact."""
    return codes.to(torch.float32) * 2.0**-15 * scale.to(torch.float32)[..., None]


def decode_vector(codes: Tensor, scale: Tensor) -> Tensor:
    """Decode a scaled master of one axis from form 2 or earlier.

    codes [n], scale [1, tiles of 256] -> float32 [n].
    """
    tiles = scale.shape[1]
    padded = torch.nn.functional.pad(codes, (0, tiles * 256 - codes.numel()))
    return (
        decode_scaled(padded.view(1, tiles, 256), scale)
        .flatten()[: codes.numel()]
        .view(codes.shape)
    )


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round a float32 master to the weight's dtype. NaN stays NaN.

    float16 rounds ties to even, bfloat16 ties away from zero.
    """
    if dtype != torch.bfloat16:
        return x.to(dtype)
    # With ties away from zero, the low 16 bits alone restore the float32 number (bf16-remainder).
    # Ties to even would need a 17th bit.
    carried = ((x.view(torch.int32) + 0x8000) & -65536).view(torch.float32)
    return torch.where(x.isnan(), x, carried).to(torch.bfloat16)


def load(kind: Master, weight: Tensor, kept: Tensor | None, scale: Tensor | None) -> Tensor:
    """Return the float32 weight to update.

    Tensors are [r, t, tile], scale is [r, t].
    """
    wide = weight.to(torch.float32)
    if kept is None:
        return wide
    if kind == "bf16-remainder":
        return (wide.view(torch.int32) + kept.to(torch.int32)).view(torch.float32)
    master = kept if scale is None else decode_scaled(kept, scale)
    # A difference means that someone wrote the weight since the last step, so the weight wins.
    return torch.where(rounded(master, weight.dtype) == weight, master, wide)


def store(
    kind: Master, x: Tensor, dtype: torch.dtype, key: int, index: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """x [r, t, tile] float32 -> (weight of dtype, master or remainder, scale of the master).

    key, index: noise key and element indices for stochastic kinds.
    """
    if kind is None or dtype == torch.float32:
        # A 16-bit weight without a master never gets here: `param_groups.refuse` rejects it.
        return x, None, None
    if kind == "stochastic":
        round_to = round_to_bfloat16 if dtype == torch.bfloat16 else round_to_float16
        return round_to(x, noise.bits(key, index)), None, None
    if kind == "fp16-scaled":
        codes, scale = encode_scaled(x, noise.uniform(noise.bits(key, index)))
        return rounded(decode_scaled(codes, scale), dtype), codes, scale
    weight = rounded(x, dtype)
    if kind == "fp32":
        return weight, x, None
    remainder = x.view(torch.int32) - weight.to(torch.float32).view(torch.int32)
    return weight, remainder.to(torch.int16), None
