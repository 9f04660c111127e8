"""Compile-time constants of a kernel: a Cast as numbers that the device functions read."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from narrowgauge.formats import E4M3, E5M2, INT4X2, INT8, FloatFormat, IntFormat
from narrowgauge.ops.registry import Refusal
from narrowgauge.ops.triton import LEAST_CAPABILITY, has_conversions
from narrowgauge.scaling import (
    E4M3_TWO_LEVEL,
    E4M3_TWO_LEVEL_CEIL,
    E8M0_FLOOR,
    FP32,
    WHOLE,
    ceil_carry,
    smallest_scale,
)

if TYPE_CHECKING:
    from narrowgauge.recipe import Cast

TWO_LEVEL = (E4M3_TWO_LEVEL, E4M3_TWO_LEVEL_CEIL)
# Formats that GPUs convert to and from by an instruction, with the same largest value and NaN. Other
# formats of 8 bits, such as e3m4, are rounded in integer arithmetic on every GPU.
CONVERTED = (E4M3, E5M2)
# Formats for which `amax_and_cast` was compiled without spilling from its 64 registers on every GPU,
# for scales of rows too. E2M1 spills 56 bytes on 10.0; a format that is not listed takes two launches.
IN_64_REGISTERS = (E4M3, E5M2, INT8, INT4X2)


@dataclass(frozen=True)
class CastConstants:
    """Compile-time constant of a kernel that describes a cast.

    It is frozen and has only plain values, because Triton includes it in the cache key of a binary.
    """

    exponent: int  # exponent bits of a float format, with mantissa and bias; 0 for integers
    mantissa: int
    bias: int
    bits: int  # bits of a code
    largest: float  # largest magnitude of the format
    nan_code: int  # code of NaN without its sign; 0 if the format has no NaN
    decoded: bool  # True: store decoded values in a float dtype instead of codes
    # True: round up with the probability of the fraction; else to nearest, ties to even.
    stochastic: bool
    # True: use the GPU's own conversions, where Triton compiles to them (`CONVERTED`).
    hardware: bool
    in_64_registers: bool  # True if `amax_and_cast` does not spill (`IN_64_REGISTERS`)
    # True for Triton's interpreter. Its fma rounds the product, and its bfloat16 products are wrong
    # (3.9).
    interpreted: bool
    power: bool  # True if scales are powers of two
    carry: int  # added to the bits of amax before its exponent is read
    log2: int  # floor(log2 largest)
    # log2 of the smallest scale; under two-level rules, of the smallest scale of a tensor.
    lowest_exponent: int
    headroom: float  # factor of the scale before its reciprocal is taken
    two_level: bool  # True if scales are e4m3 numbers beside a float32 scale of the tensor
    largest_tile: float  # number of the tile with the largest amax under two-level rules
    ceils: bool  # True if the e4m3 scales are rounded up

    @property
    def largest_scaled(self) -> float:
        """Largest amax under a scale of one, of a tile, or of a tensor under two-level rules."""
        # Here and not in a kernel: Triton 3.7 cannot multiply two fields of a constant.
        return self.largest_tile * self.largest if self.two_level else self.largest

    @property
    def packed(self) -> bool:
        """True if two codes share a byte."""
        return self.bits == 4 and not self.decoded


def refuse(cast: Cast) -> Refusal | None:
    """Return the reason why the device functions do not support this cast, or None."""
    if cast.rounding == "eden":
        return Refusal("rounding", "corrects no scales, which 'eden' does after it has rounded")
    if not isinstance(cast.format, FloatFormat | IntFormat):
        return Refusal("format", f"computes floats and integers, not the levels of {cast.format}")
    if cast.scale.two_level and WHOLE in cast.tile:
        return Refusal("tile", f"scales blocks by {cast.scale}, not tiles of {cast.tile}")
    if cast.scale != FP32 and not cast.scale.power_of_two and cast.scale not in TWO_LEVEL:
        return Refusal(
            "scale",
            f"scales by {FP32}, powers of two and {' and '.join(map(str, TWO_LEVEL))}, not {cast.scale}",
        )
    # Kernels omit the limit of 2^126, which only formats with a smaller largest value can reach.
    if cast.format.max < 4:
        return Refusal("format", f"does not end scales at 2^126, where {cast.format} saturates")
    return None


@cache
def constants_of(cast: Cast, capability: tuple[int, int], decoded: bool = False) -> CastConstants:
    """Return the constants for a GPU's compute capability; (0, 0) stands for the interpreter."""
    format = cast.format
    return CastConstants(
        exponent=format.exponent if isinstance(format, FloatFormat) else 0,
        mantissa=format.mantissa if isinstance(format, FloatFormat) else 0,
        bias=format.bias if isinstance(format, FloatFormat) else 0,
        bits=format.bits,
        largest=float(format.max),
        nan_code=format.nan_code or 0,
        decoded=decoded,
        stochastic=cast.rounding == "stochastic",
        hardware=format in CONVERTED and has_conversions(capability),
        in_64_registers=format in IN_64_REGISTERS,
        interpreted=capability < LEAST_CAPABILITY,
        power=cast.scale.power_of_two,
        carry=0 if cast.scale in (FP32, E8M0_FLOOR) else ceil_carry(format),
        log2=math.frexp(format.max)[1] - 1,
        lowest_exponent=math.frexp(
            smallest_scale(format) / (E4M3.smallest if cast.scale.two_level else 1)
        )[1]
        - 1,
        headroom=float(cast.headroom),
        two_level=cast.scale.two_level,
        largest_tile=cast.scale.largest_tile,
        ceils=cast.scale == E4M3_TWO_LEVEL_CEIL,
    )
