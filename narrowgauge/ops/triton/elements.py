"""Rounding to an element of a format inside a kernel, bit-identical to `formats`.

C: see `CastConstants`.

With C.hardware the format is e4m3 or e5m2 and the GPU converts; its conversions saturate and keep
NaN as ours do. Otherwise the code is computed in integer arithmetic, with shift = 23 - mantissa and
|y| at most the format's largest value:

    normal     (bits + 2^(shift-1) - 1 + lowest kept bit) >> shift, minus the difference of the
               biases: ties to even
    subnormal  the low bits of |y| + 2^(24 - bias - mantissa), whose unit is the format's smallest:
               float32 rounds
"""

import triton
import triton.language as tl


@triton.jit
def magnitude_bits(x):
    """Return the bits of |x| as int32, ordered like the magnitudes, with NaN last.

    x  float32, bfloat16 or float16
    """
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def negated(x):
    """Return -x of floats."""
    # Before Triton 3.9 the operator is 0 - x, which loses the sign of zero.
    return x * -1.0


@triton.jit
def encode(y, noise, C: tl.constexpr):
    """Encode y float32 as codes uint8 of the same shape, or as their values float32 if C.decoded.

    noise  float32 in [0, 1) if C.stochastic, else unused
    """
    if C.stochastic and C.exponent > 0:
        y = round_stochastically(y, noise, C)
    if C.exponent == 0:
        codes = _encode_integer(y, noise, C)
    elif C.hardware:
        codes = y.to(tl.float8e4nv if C.mantissa == 3 else tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        codes = _encode_float(y, C)
    return decode(codes, C) if C.decoded else codes


@triton.jit
def decode(codes, C: tl.constexpr):
    """Decode codes uint8, one per byte, to float32."""
    if C.exponent == 0:
        value = codes.to(tl.int8, bitcast=True).to(tl.float32)
    elif C.hardware:
        value = codes.to(tl.float8e4nv if C.mantissa == 3 else tl.float8e5, bitcast=True).to(
            tl.float32
        )
    else:
        wide = codes.to(tl.int32)
        magnitude = wide & ((1 << (C.bits - 1)) - 1)
        normal = ((magnitude + ((127 - C.bias) << C.mantissa)) << (23 - C.mantissa)).to(
            tl.float32, bitcast=True
        )
        subnormal = magnitude.to(tl.float32) * 2.0 ** (1 - C.bias - C.mantissa)
        value = tl.where(magnitude < (1 << C.mantissa), subnormal, normal)
        if C.nan_code != 0:
            value = tl.where(magnitude == C.nan_code, float("nan"), value)
        value = tl.where((wide >> (C.bits - 1)) == 1, negated(value), value)
    return value


@triton.jit
def _encode_integer(y, noise, C: tl.constexpr):
    clipped = tl.minimum(tl.maximum(y, -C.largest), C.largest)
    if C.stochastic:
        below = tl.floor(clipped)
        clipped = below + (noise < clipped - below).to(tl.float32)
    # The low bits of 1.5 * 2^23 + y are y rounded to nearest, ties to even.
    whole = (clipped + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000
    # NaN has no code; the scale of the tile carries it.
    return tl.where(y == y, whole, 0).to(tl.uint8)


@triton.jit
def _encode_float(y, C: tl.constexpr):
    SHIFT: tl.constexpr = 23 - C.mantissa
    UNIT: tl.constexpr = 24 - C.bias - C.mantissa
    magnitude = tl.minimum(tl.abs(y), C.largest)
    # Integer arithmetic is exact on GPUs and in Triton's interpreter, whose casts to 8-bit floats
    # are not (3.9).
    bits = magnitude.to(tl.int32, bitcast=True)
    normal = ((bits + (2 ** (SHIFT - 1) - 1) + ((bits >> SHIFT) & 1)) >> SHIFT) - (
        (127 - C.bias) << C.mantissa
    )
    subnormal = (magnitude + 2.0**UNIT).to(tl.int32, bitcast=True) - ((UNIT + 127) << 23)
    codes = tl.where(bits < ((128 - C.bias) << 23), subnormal, normal)
    codes = tl.where(y == y, codes, C.nan_code)
    sign = (y.to(tl.int32, bitcast=True) >> 31) & 1
    if C.nan_code == 0:
        sign = tl.where(y == y, sign, 0)  # otherwise the sign of a NaN would depend on the device
    return (codes | (sign << (C.bits - 1))).to(tl.uint8)


@triton.jit
def round_stochastically(y, noise, C: tl.constexpr):
    """Round up with the probability of the distance from the neighbour below.

    NaN and the sign of zero are kept.
    """
    clipped = tl.minimum(tl.maximum(y, -C.largest), C.largest)
    power = tl.maximum(clipped.to(tl.int32, bitcast=True) & 0x7F800000, (128 - C.bias) << 23)
    gap_bits = power - (C.mantissa << 23)
    # Multiplies by 1 / gap, a power of two: exact.
    gaps = clipped * ((254 << 23) - gap_bits).to(tl.float32, bitcast=True)
    below = tl.floor(gaps)
    chosen = (below + (noise < gaps - below).to(tl.float32)) * gap_bits.to(tl.float32, bitcast=True)
    sign = y.to(tl.int32, bitcast=True) & -0x80000000
    signed = (chosen.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return tl.where(y == y, signed, y)


@triton.jit
def pack(codes, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Pack 4-bit codes uint8 [ROWS, COLUMNS] -> [ROWS, COLUMNS / 2], first in the low nibble."""
    first, second = tl.split(tl.reshape(codes & 0xF, (ROWS, COLUMNS // 2, 2)))
    return first | (second << 4)
