"""How a moment is kept: codes and one scale per tile of a row; here the definition, which step.cpp repeats bit for bit.

A parameter is read as [rows, columns] with rows = its first axis. Tiles lie along the columns within a row, so cutting the
first axis into shards never cuts a tile; the last tile of a row may be short. x ~= value(code) * scale, scale a bfloat16:

    name      code                      value(code)                       bound per element, s the tile's scale
    fp32      float32                   the number                        exact
    e5m2      5 exponent, 2 mantissa    2^(e - 32) (1 + f/4), 0           |x - x'| < x / 4, 9.5 decades
    tapered8  16, 8, 4, 2, 1 codes per  see Tapered                       |x - x'| < x / 16 above s / 2^3, x / 8 above s / 2^11, x / 4
              octave, from the top                                        above s / 2^27, x / 2 above s / 2^59, else x, down to
                                                                          s / 2^73; nothing above 0 becomes 0
    e4m3      E4M3 of 2^8 (x/s)^k       the inverse                       2^-4 / k of x (nearest), 2^-3 / k (else), in range
    fp16      float16 of 2^15 x/s       the number                        2^-11 of x (nearest), 2^-10 (else), in range
    dynamic4  c in -7 ... 7             sign(c) DYNAMIC_LEVELS[|c|]       half the gap of the levels around |x|/s, times s
    linear4   c in 1 ... 16             c / 16                            |x - x'| < s / 16; nothing above 0 becomes 0

Second moments are rounded stochastically with E[x'] = x, and E[x'^k] = x^k where an expanded E4M3 has k < 1: its gaps of 30 %
and more would let the logarithm of a v that decays sink by half of its growing variance, and steps grow.
With beta2 = 0.999 a step changes v by a tenth of a percent, far below
half a gap of any 8-bit code, and rounding to nearest would never change v. First moments are rounded to nearest, and
toward zero where they only decay (see `rules.only_decays`); the step corrects the weight for the rounding error (see `rules`).
e5m2 is always rounded stochastically: to nearest, a moment stands still beside a gradient that is too small for one code and too
large for `only_decays`, while v decays and its weight walks on. Five random bits suffice, since the correction takes their bias back.
Lion, whose step is a sign and has no such correction, rounds its moment stochastically in every format (`draws`), by 16 bits.
dynamic4 is not rounded toward zero in a tile that decays as a whole: its scale follows.
Scales are powers of two, at least amax and below 2 amax (the 4-bit ones: within 1 % of amax, 16 codes have no octave to give
away), so they seldom change, and codes of a float survive the change exactly. Scales are at least 2^-94; a tile whose amax
is not finite or above 2^126 gets the scale NaN and is NaN as a whole (with the codes of zeros): never a finite number for one
that was none.

Sources. e5m2 and tapered8: ranges that let a tile hold gradients over nine decades, 2^-31 for m and 2^-73 for v. Earlier
versions kept m as signed square roots and v as 5-exponent 3-mantissa floats (`former`), which hold 4.2 and 4.7 decades of
gradients. The taper spends codes where most second moments of a tile lie, within 2^-12 of its largest, as posits do.
dynamic4: the dynamic map
that 2309.01507 takes for 4 bits, made symmetric, so that the largest number of a tile is kept whatever its sign.
linear4: the zero-free linear map of 2309.01507 (section 4.1), block 128. e4m3 with k: the range
expansion of COAT (arXiv 2410.19313), group 128, with k a power of two: x^k is repeated squaring or square roots, correctly rounded on
every machine, and y^(1/k) of a code is the product of two of 24 constants and a power of two, so decoding takes no root. Zeros are
left out of the choice of k.
fp16: second moments and masters of FP8-LM (arXiv 2310.18313), with a scale per tile where the paper has one per tensor.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from narrowgauge.addresses import cached
from narrowgauge.optim.noise import uniform

EXPONENT = 0x7F800000
POW2_DROPS, BF16_DROPS = 0x7FFFFF, 0xFFFF
LEAST_SCALE, MOST_AMAX = 33 << 23, 253 << 23  # 2^-94 and 2^126 as bits
OCTAVES = 14.0  # of normal E4M3 numbers below 2^8
E5M2_BELOW = 508 - 127  # of the upper 11 bits of a float32, so that code 127 is 1.0
# Of tapered8, in the units of a float32's bits: what is added to a distance below 1, so that the taper begins with 16 codes per octave.
# The upper bits of float32(distance + TAPER) begin at TAPER_SHIFT; the code of 1.0, whose distance is 0, is 255.
# float32(TAPER) is 2^25 (1 + 1/4), whose upper bits are (127 + 25) 64 + 16.
TAPER, TAPER_SHIFT = 5 << 23, 17
TAPER_TOP = ((127 + 25) << (23 - TAPER_SHIFT)) + 16 + 255
DYNAMIC_LEVELS = (0.0, 0.003, 0.012, 0.04, 0.11, 0.27, 0.55, 1.0)
DYNAMIC_BOUNDARIES = tuple((low + high) / 2 for low, high in pairwise(DYNAMIC_LEVELS))
NEAREST = 0x7FF0  # as noise: half of 16 bits, and half of the lowest five
# Of states, kept in the groups of an optimizer. 1 had square roots in the place of dynamic4; 2 had signed squares in the place of e5m2
# and 5-exponent 3-mantissa floats in the place of tapered8; 3 had 60 octaves of tapered8. `former` converts 2 and 3.
FORM = 4


class Encoded(NamedTuple):
    """A moment's tiles: codes [r, t, tile] in the format's dtype, scale [r, t] bfloat16, expansion [r, t] int8 or None."""

    codes: Tensor
    scale: Tensor | None = None
    expansion: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Moment:
    """One way to keep a moment; a constant of the Triton kernel, too.

    kind   its number in the kernels
    dtype  of the codes; two 4-bit codes lie in a byte, the first in the low half
    signed, mantissa, bias, top   of a float: codes stand for `top` times the tile's share; without a sign they are rounded stochastically
    expands, lowest, highest      whether a tile chooses its k, and the least and greatest log2 k that it chooses from
    tile   elements along a row that share a scale; of two moments the smaller one counts for both
    """

    name: str
    kind: int
    dtype: torch.dtype
    bits: int
    has_scale: bool = True
    signed: bool = True
    mantissa: int = 0
    bias: int = 0
    top: float = 1.0
    expands: bool = False
    lowest: int = 0
    highest: int = 0
    tile: int = 256

    def __str__(self) -> str:
        return self.name

    def encode(self, x: Tensor, noise: Tensor, decays: Tensor | None = None, draws: bool = False) -> Encoded:
        """x [r, t, tile] float32; noise of the same shape from `noise.bits`, read where rounding is stochastic.

        decays  bool of the same shape: elements of a first moment that only decay, to round toward zero; None: none
        draws   rounds a first moment stochastically, whatever `decays` is
        """
        return Encoded(x)

    def decode(self, state: Encoded) -> Tensor:
        """-> [r, t, tile] float32."""
        return state.codes


class SignedE5M2(Moment):
    """Signed float without subnormals, in a byte: the sign in the upper bit, 127 for the scale itself. Rounded stochastically."""

    def encode(self, x: Tensor, noise: Tensor, decays: Tensor | None = None, draws: bool = False) -> Encoded:
        scale, inverse, x = scaled(x, POW2_DROPS)
        bits = (x.abs() * inverse).view(torch.int32)
        # Five of the 21 bits that E5M2 drops: kernels work on the upper halves of float32.
        bits = bits + (noise * 32 + 16 if draws else (noise & 31) << 16)
        code = ((bits >> 21) - E5M2_BELOW).clamp(min=0) | (x.signbit().to(torch.int32) << 7)
        return Encoded(code.to(torch.uint8).view(torch.int8), scale)

    def decode(self, state: Encoded) -> Tensor:
        code = state.codes.to(torch.int32) & 0xFF
        share = ((code & 0x7F) + E5M2_BELOW << 21).view(torch.float32)
        x = torch.where((code & 0x7F) > 0, share, 0.0) * _wide(state.scale)
        return torch.where(code > 0x7F, -x, x)


class Dynamic(Moment):
    """Signed, a level of DYNAMIC_LEVELS and its sign: the nearest, of two equally near the one toward zero; the one below if x decays."""

    def encode(self, x: Tensor, noise: Tensor, decays: Tensor | None = None, draws: bool = False) -> Encoded:
        scale, inverse, x = scaled(x, BF16_DROPS)
        share = x.abs() * inverse
        if draws:
            levels = _constants((*DYNAMIC_LEVELS, 1.0), x.device)
            code = torch.bucketize(share, _constants(DYNAMIC_LEVELS[1:], x.device), right=True)
            low, high = levels[code], levels[code + 1]
            code = code + (low + uniform(noise) * (high - low) < share).to(code.dtype)
        else:
            code = torch.bucketize(share, _constants(DYNAMIC_BOUNDARIES, x.device))
            if decays is not None:
                decays = decays & ~decays.all(-1, keepdim=True)
                below = torch.bucketize(share, _constants(DYNAMIC_LEVELS[1:], x.device), right=True)
                code = torch.where(decays, below, code)
        return Encoded(torch.where(x < 0, 8 - code, 8 + code).to(torch.uint8), scale)

    def decode(self, state: Encoded) -> Tensor:
        code = state.codes.to(torch.int64) - 8
        level = _constants(DYNAMIC_LEVELS, code.device)[code.abs() & 7]  # -8 stands nowhere
        return torch.where(code < 0, -level, level) * _wide(state.scale)


class Tapered(Moment):
    """Unsigned float with 4 to 0 bits of mantissa over 3, 8, 16, 32 and 14 octaves from the top down. Rounded stochastically.

    The bits of a float32 are piecewise linear in the logarithm. d = bits(1) - bits(t) counts how far t lies below 1, in octaves
    of 2^23; the bits of float32(d + TAPER) are again such a logarithm, so that every doubling of the distance, counted from
    five octaves above 1, takes 64 codes. Each code lies within one octave of t, where bits are linear in t, so that noise
    below the kept bits rounds without bias.
    """

    def encode(self, x: Tensor, noise: Tensor, decays: Tensor | None = None, draws: bool = False) -> Encoded:
        scale, inverse, x = scaled(x, POW2_DROPS)
        distance = (127 << 23) + TAPER - (x * inverse).view(torch.int32)
        bits = distance.to(torch.float32).view(torch.int32) + (0xFFFF - noise) * 2 + 1
        code = (TAPER_TOP - (bits >> TAPER_SHIFT)).clamp(min=0)
        return Encoded(torch.maximum(code, (x > 0).to(torch.int32)).to(torch.uint8), scale)

    def decode(self, state: Encoded) -> Tensor:
        code = state.codes.to(torch.int32)
        distance = (TAPER_TOP - code << TAPER_SHIFT).view(torch.float32).to(torch.int32)
        share = ((127 << 23) + TAPER - distance).view(torch.float32)
        return torch.where(code > 0, share, 0.0) * _wide(state.scale)


class Linear(Moment):
    """Unsigned, sixteen equal steps of which none is zero; a tile of zeros is told by the least scale."""

    def encode(self, x: Tensor, noise: Tensor, decays: Tensor | None = None, draws: bool = False) -> Encoded:
        scale, inverse, x = scaled(x, BF16_DROPS)
        code = (x * (inverse * 16.0) + uniform(noise)).to(torch.int32).clamp(1, 16) - 1
        return Encoded(code.to(torch.uint8), scale)

    def decode(self, state: Encoded) -> Tensor:
        scale = _wide(state.scale)
        value = (state.codes.to(torch.float32) + 1.0) * (scale * 2.0**-4)
        return torch.where(scale == 2.0**-94, 0.0, value)


class SmallFloat(Moment):
    """E4M3 or float16 of `top` times the tile's share, raised to the power k where `expands`."""

    def encode(self, x: Tensor, noise: Tensor, decays: Tensor | None = None, draws: bool = False) -> Encoded:
        log_k = self._expansion(x)
        scale, inverse, x = scaled(x, POW2_DROPS)
        t = x.abs() * inverse
        y = t
        if log_k is not None:  # t^(2^log_k) by repeated squares or square roots
            wide = log_k[..., None]
            for times in (1, 2):
                y = torch.where(wide >= times, y * y, torch.where(wide <= -times, square_root(y), y))
        y = y * self.top
        if self.signed and draws:
            magnitude = self._drawn(t, y, log_k, noise)
        elif self.signed:
            shift = self.power_below(y) * (1.5 * 2 ** (23 - self.mantissa))
            nearest = (y + shift) - shift
            magnitude = self._code_below(nearest if decays is None else torch.where(decays, y, nearest))
        else:  # nothing above 0 becomes 0
            magnitude = self._drawn(t, y, log_k, noise)
            if log_k is not None:
                normal = (y.view(torch.int32) + (noise << 4)).view(torch.float32)  # 20 bits are dropped
                magnitude = torch.where(log_k[..., None] < 0, self._code_below(y, normal, uniform(noise)), magnitude)
            magnitude = torch.maximum(magnitude, (t > 0).to(torch.int32))
        if self.signed:
            magnitude |= x.signbit().to(torch.int32) << (self.bits - 1)
        integer = torch.uint8 if self.bits == 8 else torch.int16
        return Encoded(magnitude.to(integer).view(self.dtype), scale, log_k)

    def _drawn(self, t: Tensor, y: Tensor, log_k: Tensor | None, noise: Tensor) -> Tensor:
        """The code of t >= 0, y = top t^k, rounded stochastically."""
        if self.bits == 16:
            normal = y.view(torch.int32) + (noise >> (self.mantissa - 7))  # 13 bits for the 13 that float16 drops
            code = self._code_below(y, normal.view(torch.float32), uniform(noise))
        else:
            log_k = t.new_zeros(t.shape[:-1]) if log_k is None else log_k
            code = self._code_below(y)
            below, above = (self._value(each, log_k) for each in (code, code + 1))
            code = code + (below + uniform(noise) * (above - below) < t).to(torch.int32)
        return code

    def decode(self, state: Encoded) -> Tensor:
        if state.expansion is None:
            return state.codes.to(torch.float32) * (1 / self.top) * _wide(state.scale)
        integer = state.codes.view(torch.uint8).to(torch.int32)
        x = self._value(integer & 0x7F, state.expansion) * _wide(state.scale)
        return torch.where(integer > 0x7F, -x, x)

    def _value(self, magnitude: Tensor, log_k: Tensor) -> Tensor:
        """The tile's share that a code of E4M3 without its sign stands for: (code's number / top)^(1/k)."""
        fractions, subnormals, quarters = expansion_tables(magnitude.device)
        row = (log_k.to(torch.int64) + 2)[..., None].expand_as(magnitude)
        fraction = magnitude & 7
        octaves = ((magnitude >> 3) - 15) << (2 - log_k.to(torch.int32))[..., None]  # in quarters
        power = ((octaves >> 2) + 127 << 23).view(torch.float32)
        normal = fractions[row, fraction] * quarters[octaves & 3] * power
        return torch.where(magnitude < 8, subnormals[row, fraction], normal)

    def power_below(self, y: Tensor) -> Tensor:
        """2^floor(log2 y), at least the smallest normal number."""
        return (y.view(torch.int32) & EXPONENT).clamp(min=(128 - self.bias) << 23).view(torch.float32)

    def _code_below(self, y: Tensor, normal: Tensor | None = None, add: Tensor | float = 0.0) -> Tensor:
        """The code of y, rounded down. normal: what stands for y where it is normal; add: to a subnormal y, in its units."""
        subnormal = (y * 2.0 ** (self.bias + self.mantissa - 1) + add).to(torch.int32)
        bits = (y if normal is None else normal).view(torch.int32)
        code = (bits >> (23 - self.mantissa)) - ((127 - self.bias) << self.mantissa)
        return torch.where(y < 2.0 ** (1 - self.bias), subnormal, code)

    def _expansion(self, x: Tensor) -> Tensor | None:
        """log2 k per tile: the greatest with which the tile's octaves still fit. Zeros and poisoned tiles: k = 1."""
        if not self.expands:
            return None
        bits = x.abs().view(torch.int32)
        most = bits.amax(-1)
        least = torch.where(bits > 0, bits, EXPONENT).amin(-1)
        octaves = ((most - least) >> 23).to(torch.float32) + 2.0
        log_k = torch.full_like(octaves, self.lowest)
        for each in range(self.lowest + 1, self.highest + 1):
            log_k = torch.where(octaves * 2.0**each <= OCTAVES, float(each), log_k)
        return torch.where((most == 0) | (most >= EXPONENT), 0.0, log_k).to(torch.int8)


@cached
def expansion_tables(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """float32 constants of y^(1/k) for E4M3 of 2^8 y, one row for each log2 k of -2 ... 2:

    (1 + f/8)^(1/k) [5, 8], (f 2^-17)^(1/k) [5, 8] of the subnormal numbers, and 2^(q/4) [4].
    Roots of roots and squares of squares in float64, rounded once: the same bits on every machine.
    """
    share = torch.arange(8, dtype=torch.float64, device="cpu") / 8
    rows = []
    for y in (1 + share, share * 2.0**-14):
        squared, root = y * y, y.sqrt()
        rows.append(torch.stack((squared * squared, squared, y, root, root.sqrt())).float())
    quarters = torch.tensor([1.0, 2.0, 4.0, 8.0], dtype=torch.float64, device="cpu").sqrt().sqrt().float()
    return rows[0].to(device), rows[1].to(device), quarters.to(device)


def square_root(x: Tensor) -> Tensor:
    """Correctly rounded, which torch's own of a float32 CPU tensor is not (MKL: one in five is off by a bit, torch 2.13)."""
    return x.double().sqrt().float()


def scales(x: Tensor, drops: int) -> Tensor:
    """x [..., tile] -> [...] bfloat16: amax rounded up to the bits that are not in `drops`; NaN above 2^126 and for NaN."""
    amax = x.abs().view(torch.int32).amax(-1)
    bits = ((amax + drops) & ~drops).clamp(min=LEAST_SCALE)
    return torch.where(amax > MOST_AMAX, float("nan"), bits.view(torch.float32)).to(torch.bfloat16)


def inverse(scale: Tensor) -> Tensor:
    """[...] bfloat16 -> [..., 1] float32, 0 for NaN."""
    wide = _wide(scale)
    return torch.where(wide.isnan(), 0.0, 1.0 / wide)


def scaled(x: Tensor, drops: int) -> tuple[Tensor, Tensor, Tensor]:
    """(scales, their inverses, x with zeros in tiles whose scale is NaN)."""
    scale = scales(x, drops)
    return scale, inverse(scale), torch.where(scale.isnan()[..., None], 0.0, x)


def _wide(scale: Tensor | None) -> Tensor:
    """[...] bfloat16 -> [..., 1] float32."""
    assert scale is not None
    return scale.to(torch.float32)[..., None]


@cached
def _constants(values: tuple[float, ...], device: torch.device) -> Tensor:
    """float32, sent to a device once."""
    return torch.tensor(values, dtype=torch.float32, device=device)


WIDE = Moment(name="fp32", kind=1, dtype=torch.float32, bits=32, has_scale=False)
NONE = Moment(name="none", kind=0, dtype=torch.float32, bits=0, has_scale=False)
E5M2 = SignedE5M2(name="e5m2", kind=2, dtype=torch.int8, bits=8)
TAPERED8 = Tapered(name="tapered8", kind=3, dtype=torch.uint8, bits=8)
DYNAMIC4 = Dynamic(name="dynamic4", kind=6, dtype=torch.uint8, bits=4, tile=128)
LINEAR4 = Linear(name="linear4", kind=7, dtype=torch.uint8, bits=4, tile=128)
E4M3 = SmallFloat(name="e4m3", kind=4, dtype=torch.float8_e4m3fn, bits=8, mantissa=3, bias=7, top=2.0**8)
E4M3_POSITIVE = replace(E4M3, signed=False)
E4M3_FIRST = replace(E4M3, name="e4m3-expanded", expands=True, lowest=-1, highest=2, tile=128)
E4M3_SECOND = replace(E4M3_FIRST, lowest=-2, signed=False)
FP16 = SmallFloat(name="fp16", kind=5, dtype=torch.float16, bits=16, mantissa=10, bias=15, top=2.0**15, signed=False)
FP16_FIRST = replace(FP16, signed=True)


@dataclass(frozen=True, kw_only=True)
class States:
    """A choice for both moments. tile is the number of elements along a row that share a scale."""

    first: Moment
    second: Moment
    tile: int


STATES: dict[str, States] = {
    "fp32": States(first=WIDE, second=WIDE, tile=256),
    "8bit": States(first=E5M2, second=TAPERED8, tile=256),
    "fp8": States(first=E4M3_FIRST, second=E4M3_SECOND, tile=128),
    "fp8-lm": States(first=E4M3, second=FP16, tile=256),
    "4bit": States(first=DYNAMIC4, second=LINEAR4, tile=128),
}
