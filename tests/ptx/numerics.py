"""Floats of a GPU as bits: decoding, exact sums and products, and one rounding.

Arrays of raw bits are unsigned. Arithmetic goes through float64, in which a product of two floats
of at most 24 bits is exact. A sum is rounded to odd there: its last bit is set if anything was cut
off, so that the later rounding to fewer bits decides as the exact sum would (Boldo and Melquiond,
"Emulation of FMA and correctly rounded sums", 2008).

NaN results are the canonical ones of PTX: 0x7fffffff in float32, 0x7fff in 16 bits, 0x7f in FP8. PTX
leaves those of float64 open; here they are 0x7fffffffffffffff. float64 is numpy's, which rounds once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Bits = NDArray[np.unsignedinteger]
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]

UNSIGNED = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
NAN64 = np.uint64(0x7FFFFFFFFFFFFFFF)
NAN32, NAN16, NAN8 = np.uint32(0x7FFFFFFF), np.uint16(0x7FFF), 0x7F


def f32(bits: Bits) -> F32:
    return np.ascontiguousarray(bits, np.uint32).view(np.float32)


def bits32(x: F32) -> Bits:
    """Bits of float32, with the canonical NaN."""
    return np.where(np.isnan(x), NAN32, np.ascontiguousarray(x, np.float32).view(np.uint32))


def f64(bits: Bits) -> F64:
    return np.ascontiguousarray(bits, np.uint64).view(np.float64)


def bits64(x: F64) -> Bits:
    """Bits of float64, with the NaN of this file."""
    return np.where(np.isnan(x), NAN64, np.ascontiguousarray(x, np.float64).view(np.uint64))


def flushed(bits: Bits) -> Bits:
    """float32 with subnormals replaced by zeros of their sign (.ftz)."""
    return np.where(bits & np.uint32(0x7F800000), bits, bits & np.uint32(0x80000000))


def odd_sum(a: F64, b: F64) -> F64:
    """a + b in float64, rounded to odd."""
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)  # exact: Knuth's TwoSum
    inexact = np.isfinite(total) & np.isfinite(error) & (error != 0)
    toward_zero = inexact & ((error > 0) != (total > 0))
    cut = np.where(toward_zero, np.nextafter(total, 0.0), total)
    return (cut.view(np.uint64) | inexact.astype(np.uint64)).view(np.float64)


def odd32(x: F64) -> F32:
    """float64 -> float32, rounded to odd. Beyond the range: the largest float32, which is odd."""
    with np.errstate(over="ignore"):
        near = x.astype(np.float32)
    wide = near.astype(np.float64)
    inexact = (wide != x) & ~np.isnan(x)
    cut = np.where(inexact & (np.abs(wide) > np.abs(x)), np.nextafter(near, np.float32(0)), near)
    bits = np.ascontiguousarray(cut).view(np.uint32) | inexact.astype(np.uint32)
    return bits.view(np.float32)


def bf16_bits(x: F32) -> Bits:
    """Nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    up = np.uint64(0x7FFF) + ((bits >> np.uint64(16)) & np.uint64(1))
    return np.where(np.isnan(x), NAN16, ((bits + up) >> np.uint64(16)).astype(np.uint16))


def f16_bits(x: F32) -> Bits:
    with np.errstate(over="ignore"):
        near = np.asarray(x, np.float32).astype(np.float16).view(np.uint16)
    return np.where(np.isnan(x), NAN16, near)


def fp8_bits(x: F32, mantissa: int, bias: int, largest: float) -> Bits:
    """Nearest FP8 number, ties to even, saturating (.satfinite)."""
    size = np.minimum(np.abs(np.nan_to_num(x.astype(np.float64), nan=0.0, posinf=largest)), largest)
    # frexp of zero is no exponent of the format.
    exponent = np.where(size > 0, np.maximum(np.frexp(size)[1] - 1, 1 - bias), 1 - bias)
    units = np.rint(np.ldexp(size, mantissa - exponent)).astype(np.int64)
    # A carry into the next exponent has the code that follows, so no case is needed for it.
    code = units + ((exponent + bias - 1) << mantissa)
    code = np.where(np.isnan(x), NAN8, code | (np.signbit(x).astype(np.int64) << 7))
    return code.astype(np.uint8)


def fp8_values(codes: Bits, mantissa: int, bias: int, has_infinity: bool) -> F32:
    """Values of FP8 codes: e4m3 without infinity and one NaN, e5m2 as IEEE 754."""
    code = codes.astype(np.int64) & 0x7F
    exponent, fraction = code >> mantissa, code & ((1 << mantissa) - 1)
    units = np.where(exponent > 0, fraction + (1 << mantissa), fraction)
    size = np.ldexp(units.astype(np.float64), np.maximum(exponent, 1) - bias - mantissa)
    if has_infinity:
        top = code >> mantissa == (1 << (7 - mantissa)) - 1
        size = np.where(top, np.where(fraction > 0, np.nan, np.inf), size)
    else:
        size = np.where(code == 0x7F, np.nan, size)
    return np.where(codes & np.uint8(0x80), -size, size).astype(np.float32)


@dataclass(frozen=True)
class Float:
    """A float type of PTX. encode takes float64 that is exact or rounded to odd."""

    bits: int
    decode: Callable[[Bits], F32 | F64]
    encode: Callable[[F64], Bits]


FLOATS = {
    "f64": Float(64, f64, bits64),
    "f32": Float(32, f32, lambda x: bits32(x.astype(np.float32))),
    "bf16": Float(
        16, lambda bits: f32(bits.astype(np.uint32) << np.uint32(16)), lambda x: bf16_bits(odd32(x))
    ),
    "f16": Float(
        16,
        lambda bits: np.ascontiguousarray(bits, np.uint16).view(np.float16).astype(np.float32),
        lambda x: f16_bits(odd32(x)),
    ),
}
FP8 = {  # mantissa, bias, largest
    "e4m3": (3, 7, 448.0),
    "e5m2": (2, 15, 57344.0),
}


def fp8_decoded(kind: str, codes: Bits) -> F32:
    mantissa, bias, _ = FP8[kind]
    return fp8_values(codes, mantissa, bias, has_infinity=kind == "e5m2")


def ordered(bits: Bits, width: int) -> NDArray[np.signedinteger]:
    """Integers in the order of the floats with these bits; -0 comes before +0."""
    signed = bits.view(SIGNED[width])
    return np.where(
        signed < 0, signed ^ SIGNED[width](-1 << (width - 1)) ^ SIGNED[width](-1), signed
    )
