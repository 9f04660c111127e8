"""How a tensor's values meet a number format: how large they are, and what the format loses of them.

With code = |x| / scale, a float format of largest value `format_max` and smallest positive value `smallest_subnormal`:

    underflow   code <= smallest_subnormal / 2     nearest-even rounds it to zero (the tie goes to zero, the even code)
    saturated   code > format_max * (1 + 2**-22)   clipped to format_max
    histogram   floor(log2 |x|), read from the exponent bits, so exact at powers of two and among subnormals

The division is done in fp32 (fp64 for fp64 input), as `quantize` does it. The factor 1 + 2**-22 allows for the rounding
of that division and of the scale: with scale = amax / format_max, amax / scale is format_max only up to two roundings.
Without it a tensor that fits exactly shows one saturated element in about one case of twelve.

Leaves out: stochastic rounding, where underflow is a chance and not a line.
"""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor

from narrowgauge.errors import ConfigError, ShapeError

DIVISION_ROUNDING = 2.0**-22


class Histogram(TypedDict):
    """counts[i] elements have floor(log2 |x|) = lowest_exponent + i; first and last count are not zero."""

    lowest_exponent: int
    counts: list[int]


class TensorStatistics(TypedDict):
    """What a `tensor` event of metrics.jsonl says of the values; plain numbers, ready for JSON."""

    amax: float  # largest finite magnitude, 0.0 if there is none
    zeros: int
    nan: int
    inf: int
    underflow: float  # shares of the finite non-zero elements; 0.0 if there are none
    saturated: float
    histogram: Histogram  # of the finite non-zero elements


def tensor_statistics(
    x: Tensor, format_max: float, smallest_subnormal: float, scale: Tensor | float
) -> TensorStatistics:
    """Counts and shares for one tensor; the rules are at the top of this file.

    x       any shape, any real float dtype
    scale   one number, or a tensor that broadcasts to x (tiles: spread them over x first)
    NaN and infinity are counted in `nan` and `inf` and enter nothing else.

    Costs about fifteen elementwise passes, temporaries of some 30 bytes per element and a handful of host
    synchronisations: meant for a few tensors at every hundredth step or so, not for all at every step.
    Raises ShapeError if scale does not broadcast to x, ConfigError if x is not of a real float dtype.
    """
    if not x.is_floating_point():
        raise ConfigError(f"tensor_statistics: x is {x.dtype}. Pass a float tensor; decode codes first.")
    wide = x.detach().to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    magnitude = wide.abs()
    finite = magnitude.isfinite()
    present = finite & ~is_zero(magnitude)
    code = magnitude.div(broadcast_scale(scale, wide))[present]
    exponents = floor_log2(magnitude[present])
    lowest = MINIMUM_EXPONENT[wide.dtype]
    return TensorStatistics(
        amax=float(torch.where(finite, magnitude, 0.0).amax()) if x.numel() else 0.0,
        zeros=int((finite & ~present).sum()),
        nan=int(wide.isnan().sum()),
        inf=int(wide.isinf().sum()),
        underflow=share(code <= smallest_subnormal / 2),
        saturated=share(code > format_max * (1 + DIVISION_ROUNDING)),
        histogram=trimmed(lowest, torch.bincount(exponents - lowest).tolist()),
    )


def share(mask: Tensor) -> float:
    """The share of True, 0.0 for an empty mask."""
    return int(mask.sum()) / mask.numel() if mask.numel() else 0.0


# dtype: (integer of the same width, mantissa bits, exponent bias)
LAYOUT = {torch.float32: (torch.int32, 23, 127), torch.float64: (torch.int64, 52, 1023)}
# the exponent of the smallest subnormal: -149 and -1074
MINIMUM_EXPONENT = {dtype: 1 - bias - mantissa for dtype, (_, mantissa, bias) in LAYOUT.items()}


def is_zero(magnitude: Tensor) -> Tensor:
    """True where all bits are zero. `== 0.0` would call subnormals zero under `torch.set_flush_denormal`."""
    return magnitude.view(LAYOUT[magnitude.dtype][0]) == 0


def floor_log2(magnitude: Tensor) -> Tensor:
    """floor(log2 magnitude) as int64, exact, for positive finite fp32 or fp64.

    A normal number's answer is in its exponent bits. A subnormal is an integer times 2**MINIMUM_EXPONENT:
    that integer has few enough bits to be exact as a float, whose exponent bits then hold the answer.
    """
    integer, mantissa, bias = LAYOUT[magnitude.dtype]
    bits = magnitude.view(integer)
    subnormal = bits < (1 << mantissa)
    as_normal = torch.where(subnormal, bits, 1).to(magnitude.dtype).view(integer)
    offset = torch.where(subnormal, bias - MINIMUM_EXPONENT[magnitude.dtype], bias)
    return (torch.where(subnormal, as_normal, bits) >> mantissa).long() - offset


def broadcast_scale(scale: Tensor | float, x: Tensor) -> Tensor:
    """`scale` in x's dtype and on its device, checked to broadcast to x without enlarging it."""
    scale = torch.as_tensor(scale, dtype=x.dtype, device=x.device)
    aligned = zip(reversed(scale.shape), reversed(x.shape), strict=False)
    if scale.dim() > x.dim() or any(mine not in (1, wanted) for mine, wanted in aligned):
        raise ShapeError(
            f"tensor_statistics: scale {list(scale.shape)} does not broadcast to x {list(x.shape)}. "
            "Spread the tiles' scales over x first."
        )
    return scale


def trimmed(lowest: int, counts: list[int]) -> Histogram:
    """The histogram without empty bins at its ends; {0, []} if it is empty."""
    filled = [i for i, count in enumerate(counts) if count]
    if not filled:
        return Histogram(lowest_exponent=0, counts=[])
    return Histogram(lowest_exponent=lowest + filled[0], counts=counts[filled[0] : filled[-1] + 1])
