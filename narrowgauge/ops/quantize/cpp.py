"""Casts in one pass of C++, bit-identical to the reference.

stochastic rounding  integers with one scale per tensor or row; the pass generates its noise
                     (ops/cpp/int4.cpp)
rounding to nearest  integers, and floats to decoded values for GEMMs in a float dtype; tiles of any
                     size (ops/cpp/cast.cpp)
"""

from __future__ import annotations

from ctypes import Structure, c_float, c_int32, c_int64, c_void_p, pointer
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge.formats import FLOAT32_MANTISSA, FloatFormat, Format, IntFormat
from narrowgauge.ops import cpp
from narrowgauge.ops.quantize import definition
from narrowgauge.ops.registry import Refusal
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast, ClippedRms, LearnedStep
from narrowgauge.scaling import (
    E8M0_CEIL,
    E8M0_FLOOR,
    FP32,
    POW2,
    WHOLE,
    scale_shape,
    smallest_scale,
)

if TYPE_CHECKING:
    from narrowgauge.ops.quantize.spec import Spec
    from narrowgauge.ops.random import Key

DTYPES = {torch.float32: 0, torch.bfloat16: 1}  # dtypes of x
_KINDS = {**DTYPES, torch.int8: 2}
# Must match `Rule` in cast.cpp; 0: the scales are passed in.
_RULES = {FP32: 1, POW2: 2, E8M0_CEIL: 2, E8M0_FLOOR: 3}
_P, _L, _I, _F = c_void_p, c_int64, c_int32, c_float
LIBRARY = cpp.Library(
    ("cast.cpp",), "the kernel that casts", {"cast": (_P, _P, _P, _P, _L, _L, _L, _L, _L)}
)


class FormatConstants(Structure):
    """Must match `Format` in cast.cpp."""

    _fields_ = (
        *((name, _I) for name in ("x_narrow", "out_kind", "whole", "has_nan")),
        *((name, _F) for name in ("max", "smallest_normal", "gaps")),
        ("rule", _I),
        ("smallest_scale", _F),
    )


def refuse(spec: Spec) -> Refusal | None:
    """Return the reason why this kernel does not quantize such a tensor, or None."""
    cast, integers = spec.cast, isinstance(spec.cast.format, IntFormat)
    if 0 in spec.shape:
        return Refusal("shape", "there is nothing to round")
    if spec.noise is not None:
        if spec.noise != "key" or not integers:
            return Refusal(
                "rounding", "rounds integers stochastically with the noise of a key, nothing else"
            )
        if cast.tile not in ((WHOLE, WHOLE), (1, WHOLE)) or cast.has_global_scale or spec.amax:
            return Refusal("tile", "takes one scale per tensor or row, from the tensor")
        from narrowgauge.ops.cpp import int4

        return int4.refuse(spec.device.type)
    if not rounds(cast.format) or cast.scale.two_level:
        return Refusal(
            "format", "rounds integers and floats with a mantissa to nearest, by one scale per tile"
        )
    if spec.expand is None and not integers:
        return Refusal("expanded", "makes decoded values of floats, not their codes")
    if spec.dtype not in DTYPES:
        return Refusal(
            "dtype", f"reads float32 and bfloat16, not {str(spec.dtype).removeprefix('torch.')}"
        )
    return LIBRARY.refuse(spec.device.type)


def rounds(format: Format) -> bool:
    """Return True if cast.cpp supports the format: integers, and floats with a mantissa."""
    return isinstance(format, IntFormat) or (
        isinstance(format, FloatFormat) and format.mantissa > 0
    )


def run(
    x: Tensor, cast: Cast, amax: Tensor | None, noise: Key | None, expand: torch.dtype | None
) -> QTensor:
    """See `ops.quantize`."""
    shape, dtype, shared = (x.shape[0], x.shape[1]), expand or torch.int8, None
    if amax is None and noise is None and makes_scales(x, cast):
        data, scale = _cast_nearest(x, cast, dtype)
    else:
        if amax is None:
            # The reference sums squares and magnitudes in float32. For the largest magnitude the
            # dtype does not matter.
            sums = noise is None and isinstance(cast.calibrate, ClippedRms | LearnedStep)
            amax = definition.calibrated_amax(x.to(torch.float32) if sums else x, cast)
        else:
            amax = amax.to(torch.float32)
            if cast.tile != (WHOLE, WHOLE):
                amax = amax.expand(scale_shape(shape, cast.tile))
        scale, shared = definition.scales(amax, cast)
        if noise is None:
            # With headroom the definition multiplies by 1 / (scale * shared), so both factors are
            # combined first.
            data, _ = _cast_nearest(x, cast, dtype, scale if shared is None else scale * shared)
        else:
            from narrowgauge.ops.cpp import int4

            assert isinstance(noise.words, tuple)
            data = int4.round_stochastically(x, scale, cast.format.max, noise.words).to(dtype)
    if expand is None and cast.format.codes_per_byte > 1:
        data = cast.format.pack(data)
    return QTensor(
        data=data, scale=scale, cast=cast, inner=shape[1], global_scale=shared, checked=True
    )


def makes_scales(x: Tensor, cast: Cast) -> bool:
    """Return True if the pass also computes the scales.

    It must scale by the largest magnitude, and each thread must have whole tiles.
    """
    if (
        cast.scale not in _RULES
        or cast.headroom != 1
        or isinstance(cast.calibrate, ClippedRms | LearnedStep)
    ):
        return False
    if x.numel() < 2 * cpp.ELEMENTS_PER_THREAD:  # a single thread
        return True
    return scale_shape((x.shape[0], x.shape[1]), cast.tile)[x.stride(0) < x.stride(1)] >= cpp.parts(
        x.numel()
    )


def _cast_nearest(
    x: Tensor, cast: Cast, dtype: torch.dtype, scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return (values of x / scale in `dtype`, scales), bit-identical to the definition.

    The values have x's memory order.

    dtype  float32, bfloat16, or int8 for integers
    scale  float32, in the shape of the scales of `cast.tile`; None: computed here, see
           `makes_scales`
    """
    constants = _constants(cast, scale is None, x.dtype, dtype)
    # Cast the transpose, whose rows are contiguous: codes are written in x's memory order, without
    # a copy.
    if x.stride(0) < x.stride(1):
        out, scale = _cast(
            x.T, None if scale is None else scale.T, cast.tile[::-1], constants, dtype
        )
        return out.T, scale.T
    return _cast(x, scale, cast.tile, constants, dtype)


def _cast(
    x: Tensor, scale: Tensor | None, tile: tuple[int, ...], constants: Any, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    rows, columns = x.shape  # neither is 0, see `refuse`
    a, b = rows if tile[0] == WHOLE else tile[0], columns if tile[1] == WHOLE else tile[1]
    x = x if x.stride(1) == 1 or columns == 1 else x.contiguous()
    out = torch.empty((rows, columns), dtype=dtype, device="cpu")
    if scale is None:
        scale, shares = (
            torch.empty((-(-rows // a), -(-columns // b)), dtype=torch.float32, device="cpu"),
            -(-rows // a),
        )
    else:
        scale, shares = scale.contiguous(), rows
    LIBRARY.call(
        "cast", shares, rows * columns, constants, x, out, scale, x.stride(0), rows, columns, a, b
    )
    return out, scale


@cache
def _constants(cast: Cast, makes_scales: bool, x_dtype: torch.dtype, dtype: torch.dtype) -> Any:
    """Return a pointer to `FormatConstants`."""
    format = cast.format
    mantissa, smallest_normal, has_nan = 0, 0.0, False
    if isinstance(format, FloatFormat):
        mantissa, smallest_normal, has_nan = format.mantissa, format.smallest_normal, format.has_nan
    found = FormatConstants(
        x_narrow=DTYPES[x_dtype],
        out_kind=_KINDS[dtype],
        whole=isinstance(format, IntFormat),
        has_nan=has_nan,
        max=format.max,
        smallest_normal=smallest_normal,
        # The shift constant of `rounded` in cast.cpp.
        gaps=1.5 * 2.0 ** (FLOAT32_MANTISSA - mantissa),
        rule=_RULES[cast.scale] if makes_scales else 0,
        smallest_scale=smallest_scale(format),
    )
    return pointer(found)
