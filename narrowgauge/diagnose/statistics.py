"""Compare the values of a tensor with the range of a number format.

With code = |x| * (1 / scale), and a float format with largest value `format_max` and smallest
positive value `smallest_subnormal`:

    underflow   code <= smallest_subnormal / 2     nearest-even rounds it to zero (also at a tie:
                                                   zero is the even code)
    saturated   code > format_max * (1 + 2**-22)   clipped to format_max
    histogram   floor(log2 |x|), read from the exponent bits: exact at powers of two and for
                subnormals

Computed in float32 (float64 for float64 input), as in `quantize`. Stochastic rounding is not
covered, since underflow is random there.
"""

from __future__ import annotations

from typing import TypedDict

import torch
from torch import Tensor

from narrowgauge.errors import ConfigError, ShapeError

# Three roundings: with scale = amax / format_max, amax * (1 / scale) is not exactly format_max.
# Without this allowance a tensor that fits exactly shows one saturated element in about one case of
# twelve.
ROUNDING = 2.0**-22


class Histogram(TypedDict):
    """counts[i] elements have floor(log2 |x|) = lowest_exponent + i.

    First and last count are not zero.
    """

    lowest_exponent: int
    counts: list[int]


class TensorStatistics(TypedDict):
    """Values of a `tensor` event of metrics.jsonl, ready for JSON."""

    amax: float  # largest finite magnitude, 0.0 if there is none
    zeros: int
    nan: int
    inf: int
    # Share of the finite non-zero elements, as is `saturated`; 0.0 if there are none.
    underflow: float
    saturated: float
    histogram: Histogram  # over the finite non-zero elements


def tensor_statistics(
    x: Tensor, format_max: float, smallest_subnormal: float, scale: Tensor | float
) -> TensorStatistics:
    """Counts and shares of one tensor; the module docstring defines them.

    x       any shape, any real float dtype
    scale   one number, or a tensor that broadcasts to x (expand the scales of tiles first)

    NaN and infinity count only in `nan` and `inf`. Costs about fifteen elementwise passes, about 30
    temporary bytes per element and several host synchronisations: use it on a few tensors every
    hundred steps or so. Raises ShapeError if scale does not broadcast to x, ConfigError if x is not
    float.
    """
    if not x.is_floating_point():
        raise ConfigError(
            f"tensor_statistics: x is {x.dtype}. Pass a float tensor; decode codes first.",
            code="statistics.dtype",
        )
    wide = x.detach().to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    scale = torch.as_tensor(scale, dtype=wide.dtype, device=wide.device)
    try:
        scale = scale.expand_as(wide)
    except RuntimeError:
        raise ShapeError(
            f"tensor_statistics: scale {list(scale.shape)} does not broadcast to x {list(x.shape)}. "
            "Expand the scales of tiles to the shape of x first.",
            code="statistics.scale",
        ) from None
    magnitude = wide.abs()
    finite = magnitude.isfinite()
    # On the bits: a comparison with 0.0 treats flushed subnormals as zero.
    present = finite & (magnitude.view(LAYOUT[wide.dtype][0]) != 0)
    code = magnitude.mul(1 / scale)[present]
    exponents = floor_log2(magnitude[present])
    lowest = int(exponents.min()) if exponents.numel() else 0
    return TensorStatistics(
        amax=float(torch.where(finite, magnitude, 0.0).amax()) if x.numel() else 0.0,
        zeros=int((finite & ~present).sum()),
        nan=int(wide.isnan().sum()),
        inf=int(wide.isinf().sum()),
        underflow=int((code <= smallest_subnormal / 2).sum()) / max(code.numel(), 1),
        saturated=int((code > format_max * (1 + ROUNDING)).sum()) / max(code.numel(), 1),
        histogram=Histogram(
            lowest_exponent=lowest, counts=torch.bincount(exponents - lowest).tolist()
        ),
    )


# dtype -> (integer of the same width, mantissa bits, exponent bias)
LAYOUT = {torch.float32: (torch.int32, 23, 127), torch.float64: (torch.int64, 52, 1023)}


def floor_log2(magnitude: Tensor) -> Tensor:
    """floor(log2 magnitude) as int64, exact for positive finite float32 or float64.

    Also exact where subnormals are flushed, because it reads the exponent bits.
    """
    integer, mantissa, bias = LAYOUT[magnitude.dtype]
    bits = magnitude.view(integer)
    subnormal = bits < (1 << mantissa)
    # A subnormal is an integer times the smallest one. That integer is exact as a normal float, so
    # its exponent bits can be read in the same way.
    as_normal = torch.where(subnormal, bits, 1).to(magnitude.dtype).view(integer)
    offset = torch.where(subnormal, 2 * bias + mantissa - 1, bias)
    return (torch.where(subnormal, as_normal, bits) >> mantissa).long() - offset
