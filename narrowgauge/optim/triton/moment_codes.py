"""Decode and encode optimizer states inside a Triton kernel, bit-identical to `moments`.

    decode_moment   codes [T, TILE] and scales [T] -> float32
    encode_moment   the inverse, with the scales of T tiles
    decode_master   float16 codes of a scaled master -> float32
    encode_master   the inverse, rounded stochastically

T whole tiles of TILE elements are in registers; padding of a short last tile is zero. M: a
`moments.Moment`.

Scales are bfloat16 and handled as int16. The kernel needs only their bits, and Triton's interpreter
does not compute with bfloat16 (3.9). All other values are float32 and integers.
"""

import triton
import triton.language as tl

from narrowgauge.ops.triton.elements import negated
from narrowgauge.ops.triton.noise import mix
from narrowgauge.optim import moments
from narrowgauge.optim.moments import (
    DYNAMIC_BOUNDARIES,
    DYNAMIC_LEVELS,
    E5M2_BELOW,
    TAPER,
    TAPER_SHIFT,
    TAPER_TOP,
)

EXPONENT = tl.constexpr(moments.EXPONENT)
NAN = tl.constexpr(0x7FC00000)
POW2_DROPS = tl.constexpr(moments.POW2_DROPS)
BF16_DROPS = tl.constexpr(moments.BF16_DROPS)
LEAST_SCALE = tl.constexpr(moments.LEAST_SCALE)
MOST_AMAX = tl.constexpr(moments.MOST_AMAX)
OCTAVES = tl.constexpr(moments.OCTAVES)

BELOW = tl.constexpr(E5M2_BELOW)
SHIFT = tl.constexpr(TAPER_SHIFT)
TOP_CODE = tl.constexpr(TAPER_TOP)
DISTANCE = tl.constexpr((127 << 23) + TAPER)
LEVELS = tl.constexpr(DYNAMIC_LEVELS[1:])
BOUNDARIES = tl.constexpr(DYNAMIC_BOUNDARIES)

NONE = tl.constexpr(moments.NONE.kind)
WIDE = tl.constexpr(moments.WIDE.kind)
E5M2 = tl.constexpr(moments.E5M2.kind)
TAPERED8 = tl.constexpr(moments.TAPERED8.kind)
E4M3 = tl.constexpr(moments.E4M3.kind)
FP16 = tl.constexpr(moments.FP16.kind)
DYNAMIC4 = tl.constexpr(moments.DYNAMIC4.kind)
LINEAR4 = tl.constexpr(moments.LINEAR4.kind)


@triton.jit
def bits_of(x):
    return x.to(tl.int32, bitcast=True)


@triton.jit
def number_of(bits):
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def noise_bits(key, first, column):
    """`noise.bits` of element 2 first + column: int32 in [0, 2^16).

    key     uint32
    first   uint32 [T], a multiple of 8
    column  int32 [TILE]
    """
    place = first[:, None] + ((column >> 4) * 8 + (column & 7)).to(tl.uint32)[None, :]
    mixed = mix(place + key)
    return ((mixed >> ((column & 8) * 2).to(tl.uint32)[None, :]) & 0xFFFF).to(tl.int32)


@triton.jit
def uniform(noise):
    """float32 in (0, 1) from int32 in [0, 2^16)."""
    return (noise.to(tl.float32) + 0.5) * 1.52587890625e-05  # 2^-16


@triton.jit
def _scales(amax, DROPS: tl.constexpr):
    """Bits of amax [T] -> (scales int16 [T] as stored, 1 / scale [T, 1]; 0 for NaN)."""
    bits = tl.maximum((amax + DROPS) & ~DROPS, LEAST_SCALE)
    bits = tl.where(amax > MOST_AMAX, NAN, bits)
    if DROPS == POW2_DROPS:
        # Exact reciprocal of a power of two, by its exponent.
        inverse = number_of((254 << 23) - bits)
    else:
        scale = number_of(bits)
        inverse = tl.div_rn(tl.zeros_like(scale) + 1.0, scale)
    return (bits >> 16).to(tl.int16), tl.where(bits == NAN, 0.0, inverse)[:, None]


@triton.jit
def _read_scale(scale):
    """int16 [T], bits of bfloat16 -> float32 [T, 1]."""
    return number_of(scale.to(tl.int32) << 16)[:, None]


@triton.jit
def _value(
    magnitude,
    log_k,
    tables,
    M: tl.constexpr,
    MANTISSA: tl.constexpr,
    BIAS: tl.constexpr,
    TOP: tl.constexpr,
):
    """Decode magnitudes to x / scale.

    log_k int32 [T]; tables: `moments.expansion_tables`, flattened.
    """
    if M.expands:
        row = (log_k + 2)[:, None] * 8
        fraction = magnitude & 7
        # In units of a quarter octave.
        octaves = ((magnitude >> 3) - 15) << (2 - log_k)[:, None]
        # Tables instead of roots: y^(1/k) is the product of two constants and a power of two.
        power = number_of(((octaves >> 2) + 127) << 23)
        normal = tl.load(tables + row + fraction) * tl.load(tables + 80 + (octaves & 3)) * power
        value = tl.where(magnitude < 8, tl.load(tables + 40 + row + fraction), normal)
    else:
        normal = number_of((magnitude << (23 - MANTISSA)) + ((127 - BIAS) << 23))
        subnormal = magnitude.to(tl.float32) * 2.0 ** (1 - BIAS - MANTISSA)
        value = tl.where(magnitude < (1 << MANTISSA), subnormal, normal) * (1.0 / TOP)
    return value


@triton.jit
def decode_moment(codes, scale, log_k, tables, M: tl.constexpr):
    """codes [T, TILE], scale int16 [T], log_k int32 [T] -> float32 [T, TILE].

    Arguments that a format does not use may have any value.
    """
    if M.kind == DYNAMIC4:
        signed = codes.to(tl.int32) - 8
        level = tl.zeros(codes.shape, tl.float32)
        for each in tl.static_range(7):
            level = tl.where(tl.abs(signed) == each + 1, LEVELS[each], level)
        x = tl.where(signed < 0, -level, level) * _read_scale(scale)
    elif M.kind == E5M2:
        integer = codes.to(tl.int32)
        size = integer & 0x7F
        x = tl.where(size > 0, number_of((size + BELOW) << 21), 0.0) * _read_scale(scale)
        x = tl.where((integer & 0x80) > 0, negated(x), x)
    elif M.kind == TAPERED8:
        integer = codes.to(tl.int32)
        # A constexpr on the left of a tensor stays a constexpr in Triton's interpreter, which has no `to`.
        distance = number_of((0 - integer + TOP_CODE) << SHIFT).to(tl.int32)
        x = tl.where(integer > 0, number_of(0 - distance + DISTANCE), 0.0) * _read_scale(scale)
    elif M.kind == LINEAR4:
        wide = _read_scale(scale)
        x = (codes.to(tl.float32) + 1.0) * (wide * 0.0625)
        # linear4 has no code for zero: the smallest scale marks a tile of zeros.
        x = tl.where(wide == 2.0**-94, 0.0, x)
    else:
        integer = codes.to(tl.int32)
        magnitude = integer & ((1 << (M.bits - 1)) - 1)
        x = _value(magnitude, log_k, tables, M, M.mantissa, M.bias, M.top) * _read_scale(scale)
        x = tl.where(((integer >> (M.bits - 1)) & 1) > 0, negated(x), x)
    return x


@triton.jit
def encode_moment(x, noise, decays, tables, M: tl.constexpr, DRAWS: tl.constexpr):
    """x float32 [T, TILE], noise int32, decays bool -> (codes, scale, log_k).

        codes  int32 [T, TILE]
        scale  int16 [T], bits of bfloat16
        log_k  int8 [T]

    DRAWS: round a first moment stochastically too.
    """
    DROPS: tl.constexpr = BF16_DROPS if M.bits == 4 else POW2_DROPS
    sizes = bits_of(x) & 0x7FFFFFFF
    amax = tl.max(sizes, axis=1)
    log_k = _expansion(sizes, amax, M)
    # Below, the stored scale tells if a tile is finite. A mask kept up to the codes spilled
    # registers.
    scale, inverse = _scales(amax, DROPS)
    x = tl.where((scale == NAN >> 16)[:, None], 0.0, x)
    if M.kind == DYNAMIC4:
        share = tl.abs(x) * inverse
        size = tl.zeros(x.shape, tl.int32)
        low = tl.zeros(x.shape, tl.float32)
        high = tl.zeros(x.shape, tl.float32) + LEVELS[0]
        # The scale of a tile that decays as a whole follows, so its codes may stay.
        decays = decays & (tl.min(decays.to(tl.int32), axis=1) == 0)[:, None]
        for each in tl.static_range(7):
            if DRAWS:
                reached = share >= LEVELS[each]
                low = tl.where(reached, LEVELS[each], low)
                high = tl.where(reached, LEVELS[each + 1 if each < 6 else 6], high)
            else:
                reached = tl.where(decays, share >= LEVELS[each], share > BOUNDARIES[each])
            size = tl.where(reached, each + 1, size)
        if DRAWS:
            size += (low + uniform(noise) * (high - low) < share).to(tl.int32)
        codes = tl.where(x < 0, -size, size) + 8
    elif M.kind == E5M2:
        size = bits_of(tl.abs(x) * inverse)
        if DRAWS:
            size += noise * 32 + 16
        else:
            # Five random bits suffice, because the correction of the weight takes back their bias.
            size += (noise & 31) << 16
        codes = tl.maximum((size >> 21) - BELOW, 0) | (((bits_of(x) >> 31) & 1) << 7)
    elif M.kind == TAPERED8:
        distance = (0 - bits_of(x * inverse) + DISTANCE).to(tl.float32)
        codes = 0 - ((bits_of(distance) + ((0xFFFF - noise) * 2 + 1)) >> SHIFT) + TOP_CODE
        # No v > 0 becomes 0: a zero under the square root would make a huge step.
        codes = tl.maximum(codes, (x > 0).to(tl.int32))
    elif M.kind == LINEAR4:
        codes = (x * (inverse * 16.0) + uniform(noise)).to(tl.int32)
        codes = tl.minimum(tl.maximum(codes, 1), 16) - 1
    else:
        codes = _encode_float(x, inverse, log_k, noise, decays, tables, M, DRAWS)
    return codes, scale, log_k.to(tl.int8)


@triton.jit
def _expansion(sizes, amax, M: tl.constexpr):
    """log2 k of each tile, int32 [T]: the largest k with which the tile's octaves fit."""
    if M.expands:
        least = tl.min(tl.where(sizes > 0, sizes, EXPONENT), axis=1)
        octaves = ((amax - least) >> 23).to(tl.float32) + 2.0
        log_k = tl.zeros_like(amax) + M.lowest
        for each in tl.static_range(M.lowest + 1, M.highest + 1):
            log_k = tl.where(octaves * (2.0**each) <= OCTAVES, each, log_k)
        log_k = tl.where((amax == 0) | (amax >= EXPONENT), 0, log_k)
    else:
        log_k = tl.zeros_like(amax)
    return log_k


@triton.jit
def _encode_float(x, inverse, log_k, noise, decays, tables, M: tl.constexpr, DRAWS: tl.constexpr):
    """Encode to E4M3 or float16 as int32, with the sign in the highest of M.bits."""
    share = tl.abs(x) * inverse
    y = share
    # t^(2^log_k) by repeated squares or correctly rounded square roots, as in the definition.
    if M.expands:
        wide = log_k[:, None]
        for times in tl.static_range(1, 3):
            narrow = tl.sqrt_rn(y) if M.lowest <= -times else y
            y = tl.where(wide >= times, y * y, tl.where(wide <= -times, narrow, y))
    y = y * M.top
    if M.signed and not DRAWS:
        shift = _power_below(y, M.bias) * (1.5 * 2 ** (23 - M.mantissa))
        codes = _code_below(tl.where(decays, y, (y + shift) - shift), M.mantissa, M.bias)
    else:
        if M.bits == 8:
            low = _code_below(y, M.mantissa, M.bias)
            below = _value(low, log_k, tables, M, M.mantissa, M.bias, M.top)
            above = _value(low + 1, log_k, tables, M, M.mantissa, M.bias, M.top)
            codes = low + (below + uniform(noise) * (above - below) < share).to(tl.int32)
            if M.expands and not M.signed:
                normal = ((bits_of(y) + (noise << 4)) >> 20) - ((127 - M.bias) << M.mantissa)
                subnormal = (y * 2.0 ** (M.bias + M.mantissa - 1) + uniform(noise)).to(tl.int32)
                drawn = tl.where(y < 2.0 ** (1 - M.bias), subnormal, normal)
                codes = tl.where(log_k[:, None] < 0, drawn, codes)
        else:
            # float16 drops 13 mantissa bits, so 13 random bits are added.
            normal = bits_of(y) + (noise >> (M.mantissa - 7))
            normal = (normal >> (23 - M.mantissa)) - ((127 - M.bias) << M.mantissa)
            subnormal = (y * 2.0 ** (M.bias + M.mantissa - 1) + uniform(noise)).to(tl.int32)
            codes = tl.where(y < 2.0 ** (1 - M.bias), subnormal, normal)
    if M.signed:
        codes |= ((bits_of(x) >> 31) & 1) << (M.bits - 1)
    else:
        codes = tl.maximum(codes, (share > 0).to(tl.int32))
    return codes


@triton.jit
def _power_below(y, BIAS: tl.constexpr):
    return number_of(tl.maximum(bits_of(y) & EXPONENT, (128 - BIAS) << 23))


@triton.jit
def _code_below(y, MANTISSA: tl.constexpr, BIAS: tl.constexpr):
    """Round y >= 0 down to a code."""
    subnormal = (y * 2.0 ** (BIAS + MANTISSA - 1)).to(tl.int32)
    normal = (bits_of(y) >> (23 - MANTISSA)) - ((127 - BIAS) << MANTISSA)
    return tl.where(y < 2.0 ** (1 - BIAS), subnormal, normal)


@triton.jit
def decode_master(codes, scale):
    """codes float16 [T, TILE], scale int16 [T] -> float32."""
    return codes.to(tl.float32) * 3.0517578125e-05 * _read_scale(scale)  # 2^-15


@triton.jit
def encode_master(x, noise):
    """x float32 [T, TILE] -> (codes float16, scale int16 [T]), |codes| = 2^15 |x| / scale."""
    scale, inverse = _scales(tl.max(bits_of(x) & 0x7FFFFFFF, axis=1), POW2_DROPS)
    x = tl.where((scale == NAN >> 16)[:, None], 0.0, x)
    size = tl.minimum(tl.abs(x) * inverse, 1.0) * 32768.0
    gap_bits = bits_of(_power_below(size, 15)) - (10 << 23)
    # Divides by the gap, a power of two: exact.
    parts = size * number_of((254 << 23) - gap_bits)
    whole = tl.floor(parts)
    size = tl.where(uniform(noise) < parts - whole, whole + 1.0, whole) * number_of(gap_bits)
    signed = number_of(bits_of(size) | (bits_of(x) & -0x80000000))
    return signed.to(tl.float16), scale
