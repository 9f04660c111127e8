"""The compiled kernel that casts to nearest (cast.cpp). It is the plain torch of `formats` and `scaling`, to the bit."""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from narrowgauge.addresses import address
from narrowgauge.errors import BackendError
from narrowgauge.formats import FLOAT32_MANTISSA, FloatFormat, Format, IntFormat
from narrowgauge.ops.cpp import build
from narrowgauge.ops.cpp.build import in_rows, library, parts
from narrowgauge.recipe import Cast, ClippedRms, LearnedStep
from narrowgauge.scaling import E8M0_CEIL, E8M0_FLOOR, FP32, POW2, scale_shape, smallest_scale, tile_sizes

DTYPES = {torch.float32: 0, torch.bfloat16: 1}  # of x
_KINDS = {**DTYPES, torch.int8: 2}
_RULES = {FP32: 1, POW2: 2, E8M0_CEIL: 2, E8M0_FLOOR: 3}  # as `Rule` in cast.cpp

_P, _L, _I, _F = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
_SIGNATURE = (_P, _P, _P, _P, _L, _L, _L, _L, _L, _L)


class Constants(ctypes.Structure):
    """`Format` in cast.cpp."""

    _fields_ = (
        *((name, _I) for name in ("x_narrow", "out_kind", "whole", "has_nan")),
        *((name, _F) for name in ("max", "smallest_normal", "gaps")),
        ("rule", _I),
        ("smallest_scale", _F),
    )


@cache
def unavailable() -> str:
    """Why there is no library here, or ''."""
    try:
        _library()
    except BackendError as error:
        return str(error)
    return ""


def rounds(format: Format) -> bool:
    """Whether the kernel knows the format: whole numbers, and floats with a mantissa."""
    return isinstance(format, IntFormat) or (isinstance(format, FloatFormat) and format.mantissa > 0)


def makes_scales(x: Tensor, cast: Cast) -> bool:
    """Whether `cast_nearest` makes the scales as well: from largest magnitudes, and where each thread has whole tiles to itself."""
    if cast.scale not in _RULES or cast.headroom != 1 or isinstance(cast.calibrate, ClippedRms | LearnedStep):
        return False
    if x.numel() < 2 * build.ELEMENTS_PER_THREAD:  # one thread
        return True
    return scale_shape((x.shape[0], x.shape[1]), cast.tile)[x.stride(0) < x.stride(1)] >= parts(x.numel())


def cast_nearest(x: Tensor, cast: Cast, dtype: torch.dtype, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(the values of x / scale in `dtype`, in x's order in memory; the scales). dtype: float32, bfloat16, or int8 for whole numbers.

    x      [outer, inner] float32 or bfloat16, not empty
    scale  float32, in the shape of the scales of `cast.tile`; None: made here, see `makes_scales`
    """
    constants = _constants(cast, scale is None, x.dtype, dtype)
    if x.stride(0) < x.stride(1):
        out, scale = _cast(x.T, None if scale is None else scale.T, cast.tile[::-1], constants, dtype)
        return out.T, scale.T
    return _cast(x, scale, cast.tile, constants, dtype)


def _cast(
    x: Tensor, scale: Tensor | None, tile: tuple[int, ...], constants: Constants, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape
    a, b = tile_sizes((rows, columns), (tile[0], tile[1]))
    x = x if x.stride(1) == 1 or columns == 1 else x.contiguous()
    step = 1 if scale is not None else a  # threads share rows, or rows of tiles
    scale = (
        torch.empty((-(-rows // a), -(-columns // b)), dtype=torch.float32, device="cpu")
        if scale is None
        else scale.contiguous()
    )
    out = torch.empty((rows, columns), dtype=dtype, device="cpu")
    call, places, stride = _library().narrowgauge_cast, (address(x), address(out), address(scale)), x.stride(0)

    def share(first: int, last: int) -> None:
        call(ctypes.byref(constants), *places, first * step, min(last * step, rows), stride, columns, a, b)

    in_rows(-(-rows // step), rows * columns, share)
    return out, scale


@cache
def _constants(cast: Cast, makes_scales: bool, x_dtype: torch.dtype, dtype: torch.dtype) -> Constants:
    format = cast.format
    mantissa, smallest_normal, has_nan = 0, 0.0, False
    if isinstance(format, FloatFormat):
        mantissa, smallest_normal, has_nan = format.mantissa, format.smallest_normal, format.has_nan
    return Constants(
        x_narrow=DTYPES[x_dtype],
        out_kind=_KINDS[dtype],
        whole=isinstance(format, IntFormat),
        has_nan=has_nan,
        max=format.max,
        smallest_normal=smallest_normal,
        gaps=1.5 * 2.0 ** (FLOAT32_MANTISSA - mantissa),
        rule=_RULES[cast.scale] if makes_scales else 0,
        smallest_scale=smallest_scale(format),
    )


@cache
def _library() -> ctypes.CDLL:
    found = library("narrowgauge.ops.cpp", ("cast.cpp",), "the kernel that casts", "use the reference, which is slower")
    found.narrowgauge_cast.argtypes, found.narrowgauge_cast.restype = _SIGNATURE, None
    return found
