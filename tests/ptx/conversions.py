"""cvt: conversions between integers, floats and packed floats, as functions of raw bits.

    cvt.rn.satfinite.e4m3x2.f32 d, a, b     a into the upper byte, b into the lower one
    cvt.rni.s32.f32                         to the nearest integer, ties to even; NaN gives 0
    cvt.s8.s32                              the low bits; a signed result is extended by its sign

Integers from floats saturate (PTX ISA 9.7.9.22). Conversions that this file does not have are
refused by a KeyError.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptx.numerics import (
    FLOATS,
    FP8,
    SIGNED,
    UNSIGNED,
    Bits,
    bf16_bits,
    bits32,
    f16_bits,
    f32,
    flushed,
    fp8_bits,
    fp8_decoded,
)

Conversion = tuple[tuple[int, ...], tuple[int, ...], Callable[..., Any]]
_INTEGRAL = {"rni": np.rint, "rzi": np.trunc, "rmi": np.floor, "rpi": np.ceil}
_PACKED = {"bf16x2": bf16_bits, "f16x2": f16_bits}


def conversion(words: list[str]) -> Conversion:
    """Widths of the results and sources, and the function. words: those behind cvt."""
    *how, to, of = words
    if to.removesuffix("x2") in FP8 and of == "f32":
        if "satfinite" not in how:
            raise KeyError("without satfinite")
        return _to_fp8(to.removesuffix("x2"))
    if of.removesuffix("x2") in FP8 and to == "f16x2":
        return _from_fp8(of.removesuffix("x2"))
    if to in _PACKED and of == "f32":
        return (32,), (32, 32), lambda a, b: _joined(_PACKED[to](f32(b)), _PACKED[to](f32(a)))
    if to in FLOATS and of in FLOATS:
        return _between_floats(how, to, of)
    if to in FLOATS:
        return _from_integer(to, of)
    if of in FLOATS:
        return _to_integer(how, to, of)
    return _between_integers(how, to, of)


def _joined(low: Bits, high: Bits) -> Bits:
    return low.astype(np.uint32) | (high.astype(np.uint32) << np.uint32(16))


def _to_fp8(kind: str) -> Conversion:
    def packed(a: Bits, b: Bits) -> Bits:
        high, low = (fp8_bits(f32(x), *FP8[kind]) for x in (a, b))
        return low.astype(np.uint16) | (high.astype(np.uint16) << np.uint16(8))

    return (16,), (32, 32), packed


def _from_fp8(kind: str) -> Conversion:
    def unpacked(a: Bits) -> Bits:
        bytes_of = ((a >> np.uint16(shift)).astype(np.uint8) for shift in (0, 8))
        low, high = (f16_bits(fp8_decoded(kind, each)) for each in bytes_of)
        return _joined(low, high)

    return (32,), (16,), unpacked


def _rounding(how: list[str]) -> str:
    """Raises KeyError for a modifier that this file does not have."""
    rounding = [each for each in how if each != "ftz"]
    if len(rounding) > 1 or set(rounding) - {"rn", *_INTEGRAL}:
        raise KeyError(".".join(how))
    return rounding[0] if rounding else ""


def _between_floats(how: list[str], to: str, of: str) -> Conversion:
    source, result, mode, flushes = FLOATS[of], FLOATS[to], _rounding(how), "ftz" in how

    def converted(a: Bits) -> Bits:
        x = source.decode(flushed(a) if flushes and of == "f32" else a)
        if mode in _INTEGRAL:
            return bits32(_INTEGRAL[mode](x))
        return result.encode(x.astype(np.float64))

    if mode in _INTEGRAL and (to, of) != ("f32", "f32"):
        raise KeyError(mode)
    return (result.bits,), (source.bits,), converted


def _from_integer(to: str, of: str) -> Conversion:
    bits = int(of[1:])
    dtype = (SIGNED if of[0] == "s" else UNSIGNED)[bits]
    if bits == 64:  # float64 would round first
        raise KeyError(of)
    return (
        (FLOATS[to].bits,),
        (bits,),
        lambda a: FLOATS[to].encode(a.view(dtype).astype(np.float64)),
    )


def _to_integer(how: list[str], to: str, of: str) -> Conversion:
    bits, mode = int(to[1:]), _rounding(how)
    dtype: Any = (SIGNED if to[0] == "s" else UNSIGNED)[bits]
    limits = np.iinfo(dtype)
    if bits == 64:  # its limits are no float64
        raise KeyError(to)

    def converted(a: Bits) -> Bits:
        x = _INTEGRAL[mode](FLOATS[of].decode(a).astype(np.float64))
        return np.clip(np.nan_to_num(x, nan=0.0), limits.min, limits.max).astype(dtype)

    return (bits,), (FLOATS[of].bits,), converted


def _between_integers(how: list[str], to: str, of: str) -> Conversion:
    if how:
        raise KeyError(".".join(how))
    source: Any = (SIGNED if of[0] == "s" else UNSIGNED)[int(of[1:])]
    result: Any = (SIGNED if to[0] == "s" else UNSIGNED)[int(to[1:])]
    return (int(to[1:]),), (int(of[1:]),), lambda a: a.view(source).astype(result)
