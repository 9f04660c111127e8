"""Constants of a cast as the C++ kernels read them (ops/cpp/rounding.h), computed once for each cast."""

from __future__ import annotations

from ctypes import Structure, c_float, c_int32
from typing import TYPE_CHECKING, Any

from narrowgauge.formats import E4M3, FLOAT32_MANTISSA, FloatFormat, Format, IntFormat
from narrowgauge.scaling import smallest_scale

if TYPE_CHECKING:
    from narrowgauge.recipe import Cast


class FormatConstants(Structure):
    """Must match `Format` in rounding.h."""

    _fields_ = (
        *((name, c_int32) for name in ("whole", "has_nan")),
        *((name, c_float) for name in ("max", "smallest_normal", "gap", "shift")),
    )

    @classmethod
    def of(cls, format: Format) -> FormatConstants:
        mantissa, smallest_normal, has_nan = 0, 0.0, False
        if isinstance(format, FloatFormat):
            mantissa, has_nan = format.mantissa, format.has_nan
            smallest_normal = format.smallest_normal
        gap = 2.0**-mantissa
        return cls(
            whole=isinstance(format, IntFormat),
            has_nan=has_nan,
            max=format.max,
            smallest_normal=smallest_normal,
            gap=gap,
            shift=1.5 * 2.0**FLOAT32_MANTISSA * gap,
        )


class CppCast(Structure):
    """Must match `Cast` in rounding.h."""

    _fields_ = (
        *((name, FormatConstants) for name in ("format", "of_scales")),
        *(
            (name, c_int32)
            for name in (
                "x_narrow",
                "out_kind",
                "stochastic",
                "makes_scales",
                "two_level",
                "folds",
                "rule",
            )
        ),
        *(
            (name, c_float)
            for name in ("smallest_scale", "smallest_whole", "headroom", "largest_tile")
        ),
        ("tries", c_int32),
        ("factors", c_float * 2),
    )


def constants_of(
    cast: Cast, makes_scales: bool, rule: int, x_narrow: int, out_kind: int, folds: bool = False
) -> Any:
    """Return `CppCast`; `Cast` in rounding.h explains the numbers."""
    smallest = smallest_scale(cast.format)
    return CppCast(
        format=FormatConstants.of(cast.format),
        of_scales=FormatConstants.of(E4M3),
        x_narrow=x_narrow,
        out_kind=out_kind,
        stochastic=cast.rounding == "stochastic",
        makes_scales=makes_scales,
        two_level=cast.scale.two_level,
        folds=folds,
        rule=rule,
        smallest_scale=smallest,
        smallest_whole=smallest / E4M3.smallest,
        headroom=cast.headroom,
        largest_tile=cast.scale.largest_tile,
        tries=len(cast.scale.tries),
        factors=(c_float * 2)(*cast.scale.tries),
    )
