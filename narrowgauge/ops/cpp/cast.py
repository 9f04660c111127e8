"""The compiled kernel that rounds to the values of a format in one pass (cast.cpp). It is the plain torch of `formats`, to the bit."""

from __future__ import annotations

from ctypes import c_float, c_int32, c_int64, c_void_p
from functools import cache

import torch
from torch import Tensor

from narrowgauge.formats import FLOAT32_MANTISSA, FloatFormat, Format, IntFormat
from narrowgauge.ops.cpp.build import Library

DTYPES = {torch.float32: 0, torch.bfloat16: 1}  # of x
_KINDS = {**DTYPES, torch.int8: 2}

_P, _L, _I, _F = c_void_p, c_int64, c_int32, c_float
_SIGNATURES = {"round_nearest": (_P, _I, _P, _I, _L, _L, _P, _L, _L, _I, _I, _F, _F, _F)}
LIBRARY = Library(("cast.cpp",), "the kernel that casts", _SIGNATURES)


def rounds(format: Format) -> bool:
    """Whether the kernel knows the format: whole numbers, and floats with a mantissa."""
    return isinstance(format, IntFormat) or (isinstance(format, FloatFormat) and format.mantissa > 0)


def round_nearest(x: Tensor, scale: Tensor, tile: tuple[int, int], format: Format, dtype: torch.dtype) -> Tensor:
    """The values of x / scale in `dtype`, x's order in memory. dtype: float32, bfloat16, or int8 for whole numbers.

    x      [outer, inner] float32 or bfloat16, not empty
    scale  float32, in the shape of the scales of `tile`, whose sizes are numbers of elements
    """
    if x.stride(0) < x.stride(1):
        return round_nearest(x.T, scale.T, (tile[1], tile[0]), format, dtype).T
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
