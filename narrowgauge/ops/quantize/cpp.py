"""Casts in one pass of C++, the reference's bits. Two kinds:

stochastically   integers with one scale per tensor or row; the pass makes its noise itself (ops/cpp/int4.cpp)
to nearest       integers, and floats to decoded values for products that are computed in float; tiles of any size (ops/cpp/cast.cpp)
"""

from __future__ import annotations

from ctypes import c_float, c_int32, c_int64, c_void_p
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowgauge.formats import FLOAT32_MANTISSA, FloatFormat, Format, IntFormat
from narrowgauge.ops.cpp import Library
from narrowgauge.ops.quantize import definition
from narrowgauge.ops.quantize.spec import Spec
from narrowgauge.ops.registry import Refusal
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast, ClippedRms, LearnedStep
from narrowgauge.scaling import WHOLE, scale_shape, tile_sizes

if TYPE_CHECKING:
    from narrowgauge.ops.random import Key

DTYPES = {torch.float32: 0, torch.bfloat16: 1}  # of x
_KINDS = {**DTYPES, torch.int8: 2}
_P, _L, _I, _F = c_void_p, c_int64, c_int32, c_float
_SIGNATURES = {"round_nearest": (_P, _I, _P, _I, _L, _L, _P, _L, _L, _I, _I, _F, _F, _F)}
LIBRARY = Library(("cast.cpp",), "the kernel that casts", _SIGNATURES)


def refuse(spec: Spec) -> Refusal | None:
    """Why this kernel does not quantize such a tensor, or None."""
    cast, integers = spec.cast, isinstance(spec.cast.format, IntFormat)
    if 0 in spec.shape:
        return Refusal("shape", "there is nothing to round")
    if spec.noise is not None:
        if spec.noise != "key" or not integers:
            return Refusal("rounding", "rounds integers stochastically with the noise of a key, nothing else")
        if cast.tile not in ((WHOLE, WHOLE), (1, WHOLE)) or cast.has_global_scale or spec.amax:
            return Refusal("tile", "takes one scale per tensor or row, from the tensor")
        from narrowgauge.ops.cpp import int4

        return int4.refuse(spec.device.type)
    if not rounds(cast.format) or cast.scale.two_level:
        return Refusal("format", "rounds integers and floats with a mantissa to nearest, by one scale per tile")
    if spec.expand is None and not integers:
        return Refusal("expanded", "makes decoded values of floats, not their codes")
    if spec.dtype not in DTYPES:
        return Refusal("dtype", f"reads float32 and bfloat16, not {str(spec.dtype).removeprefix('torch.')}")
    return LIBRARY.refuse(spec.device.type)


def rounds(format: Format) -> bool:
    """Whether cast.cpp knows the format: whole numbers, and floats with a mantissa."""
    return isinstance(format, IntFormat) or (isinstance(format, FloatFormat) and format.mantissa > 0)


def run(x: Tensor, cast: Cast, amax: Tensor | None, noise: Key | None, expand: torch.dtype | None) -> QTensor:
    """See `ops.quantize`."""
    shape = (x.shape[0], x.shape[1])
    if noise is not None and x.stride(1) != 1 and x.shape[1] != 1:
        # x.T, as grad_weight may give it, has the noise of its own order: made contiguous, it is read in that.
        x = x.contiguous()
    if amax is None:
        # The reference sums squares and magnitudes in float32; of the largest magnitude the type does not matter.
        sums = noise is None and isinstance(cast.calibrate, ClippedRms | LearnedStep)
        amax = definition.calibrated_amax(x.to(torch.float32) if sums else x, cast)
    else:
        amax = amax.to(torch.float32).expand(scale_shape(shape, cast.tile))
    scale, shared = definition.scales(amax, cast)
    if noise is None:
        divisor = scale if shared is None else scale * shared
        data = _round_nearest(x, divisor, tile_sizes(shape, cast.tile), cast.format, expand or torch.int8)
    else:
        from narrowgauge.ops.cpp import int4

        assert isinstance(noise.words, tuple)
        data = int4.round_stochastically(x, scale, cast.format.max, noise.words)
        data = data if expand is None else data.to(expand)
    if expand is None and cast.format.codes_per_byte > 1:
        data = cast.format.pack(data)
    return QTensor(data=data, scale=scale, cast=cast, inner=shape[1], global_scale=shared, checked=True)


def _round_nearest(x: Tensor, scale: Tensor, tile: tuple[int, int], format: Format, dtype: torch.dtype) -> Tensor:
    """The values of x / scale in `dtype`, x's order in memory; the plain torch of `formats`, to the bit.

    dtype  float32, bfloat16, or int8 for whole numbers; tile: numbers of elements
    """
    if x.stride(0) < x.stride(1):
        return _round_nearest(x.T, scale.T, (tile[1], tile[0]), format, dtype).T
    x = x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=dtype, device="cpu")
    given = (x, DTYPES[x.dtype], out, _KINDS[dtype], x.stride(0), x.shape[1], scale.contiguous(), *tile)
    LIBRARY.call("round_nearest", x.shape[0], x.numel(), *given, *_arguments(format))
    return out


@cache
def _arguments(format: Format) -> tuple[float, ...]:
    """(whole numbers, has a NaN, max, smallest normal, gaps) as in cast.cpp."""
    if isinstance(format, FloatFormat):
        gaps = 1.5 * 2.0 ** (FLOAT32_MANTISSA - format.mantissa)
        return False, format.has_nan, format.max, format.smallest_normal, gaps
    return True, False, format.max, 0.0, 1.5 * 2.0**FLOAT32_MANTISSA
