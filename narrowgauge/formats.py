"""Number formats: the values that one element of a quantized tensor can take.

A format is a finite set of values and three maps:

    round   float32 -> float32   the nearest representable value, ties to even, saturating at +-max
    encode  float32 -> codes     the same choice, as stored bits
    decode  codes   -> float32   exact

`encode(x) == encode(round(x))` always, and `decode(encode(x)) == round(x)`. NaN stays NaN where the
format has one and becomes zero where it has none (the scale of its tile carries the NaN, see
`scaling`). Infinity saturates like any other large number.

With `noise`, a tensor of numbers in [0, 1) of x's shape, rounding is stochastic. The upper
neighbour is taken with probability equal to x's distance from the lower neighbour, in units of
their gap, so the mean of the result is x. Representable x never move.

The rounding uses float32 arithmetic that every PyTorch release and device computes identically.
PyTorch's own cast to float8_e4m3fn differs between releases: up to 2.11 it gave NaN above the
maximum, 2.13 saturates and turns infinity into 448. Values passed to that cast here are already
representable, and for these all releases agree.

float64 input is converted to float32 first (two roundings). Formats are data: a new format is a
constant above `ALL`. Casts, GEMMs, tests and reports read its fields or iterate over `ALL`. Formats
are named only where a unit of a GPU is made for them (ops/mm/spec.py, ops/triton/cast_constants.py);
others are computed without it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from narrowgauge.addresses import cached
from narrowgauge.errors import ConfigError, closest

FLOAT32_MANTISSA = 23
BFLOAT16_MANTISSA = 7
FLOAT32_EXPONENT_BITS = 0x7F800000


@dataclass(frozen=True, kw_only=True)
class Format:
    """A set of representable numbers.

    name     name in recipes and reports
    bits     bits of one code
    max      the largest finite magnitude
    storage  dtype of codes as `encode` returns them, one code per element
    """

    name: str
    bits: int
    max: float
    storage: torch.dtype

    def __str__(self) -> str:
        return self.name

    def round(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        """Round x (any float dtype) to representable values; returns float32 of the same shape."""
        return self.decode(self.encode(x, noise))

    def encode(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        """Encode x (any float dtype) as codes of dtype `storage` and the same shape."""
        raise TypeError(
            f"{type(self).__name__} does not define encode; use one of {', '.join(NAMES)}."
        )

    def decode(self, codes: Tensor) -> Tensor:
        """Decode codes to float32 of the same shape, exactly."""
        # Dynamo warns of cached functions.
        compiles = torch.compiler.is_compiling()
        table = self.values().to(codes.device) if compiles else _table(self, codes.device)
        return table[codes.to(torch.int64)]

    def codes_of(self, values: Tensor) -> Tensor:
        """Encode representable values, in float32 or bfloat16, to the codes of `encode`."""
        return self.encode(values)

    def decode_packed(self, packed: Tensor, length: int) -> Tensor:
        """Decode bytes [..., m] of two codes each -> float32 [..., length], as `decode` of `unpack`."""
        if packed.device.type != "cpu" or torch.compiler.is_compiling():
            return self.decode(self.unpack(packed, length))
        # A byte selects two values at once, as 64 bits: a third of the time of two passes.
        both = _pairs(self).index_select(0, packed.reshape(-1).to(torch.int32)).view(torch.float32)
        found = both.view(*packed.shape[:-1], 2 * packed.shape[-1])
        return found if found.shape[-1] == length else found[..., :length].contiguous()

    def values(self) -> Tensor:
        """Value of each code 0 ... 2**bits - 1, float32 on the CPU; NaN for codes that mean NaN."""
        codes = torch.arange(2**self.bits, dtype=torch.int32, device="cpu")
        return self._decode_bits(codes)

    def _decode_bits(self, codes: Tensor) -> Tensor:
        raise TypeError(
            f"{type(self).__name__} does not define its codes; use one of {', '.join(NAMES)}."
        )

    @property
    def is_signed(self) -> bool:
        """True if the format has negative numbers, as the operand of a GEMM needs them."""
        return True

    @property
    def nan_code(self) -> int | None:
        """The code that `encode` gives a NaN, its sign bit aside; None if the format has no NaN."""
        return None

    @property
    def smallest(self) -> float:
        """The smallest magnitude above zero."""
        raise TypeError(
            f"{type(self).__name__} does not define smallest; use one of {', '.join(NAMES)}."
        )

    @property
    def codes_per_byte(self) -> int:
        """2 for 4-bit formats, 1 for all others: 6-bit codes are stored one per byte."""
        return 2 if self.bits == 4 else 1

    def pack(self, codes: Tensor) -> Tensor:
        """Pack codes [..., n] -> uint8 [..., ceil(n / codes_per_byte)].

        The first of two 4-bit codes is the low nibble. An odd last axis is padded with a zero
        nibble. Codes of formats wider than 4 bits are only viewed as bytes.
        """
        if self.codes_per_byte == 1:
            return codes.view(torch.uint8)
        nibbles = codes.to(torch.uint8) & 0xF
        if nibbles.shape[-1] % 2:
            nibbles = torch.nn.functional.pad(nibbles, (0, 1))
        return nibbles[..., 0::2] | (nibbles[..., 1::2] << 4)

    def unpack(self, packed: Tensor, length: int) -> Tensor:
        """Unpack bytes [..., m] -> codes [..., length] of dtype `storage`.

        The inverse of `pack`.
        """
        if self.codes_per_byte == 1:
            return packed.view(self.storage)
        nibbles = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)[..., :length]
        return self._from_nibble(nibbles)

    def _from_nibble(self, nibbles: Tensor) -> Tensor:
        return nibbles


@dataclass(frozen=True, kw_only=True)
class FloatFormat(Format):
    """Sign, exponent and mantissa bits, with subnormals.

    value = (-1)**s * 2**(e - bias) * (1 + m / 2**mantissa)

    exponent, mantissa  bits of each field; bias is 2**(exponent - 1) - 1
    has_nan             True if the format has a NaN (e4m3 has one per sign and no infinity; e2m1
                        has neither)
    reserved            codes at the top of each sign that are not numbers (NaN, infinity); `max` is
                        the code below them
    """

    exponent: int
    mantissa: int
    has_nan: bool = False
    reserved: int = 0

    def __post_init__(self) -> None:
        if (
            self.bits != 1 + self.exponent + self.mantissa
            or not 0 <= self.reserved < 2 ** (self.bits - 1) - 1
        ):
            raise ConfigError(
                f"{self.name}: {self.bits} bits with exponent = {self.exponent}, mantissa = {self.mantissa}, reserved = {self.reserved}; "
                "bits is one for the sign and those of both fields, and codes other than zero must be left.",
                code="format.bits",
            )
        if self.has_nan and not self.reserved:
            raise ConfigError(
                f"{self.name}: has_nan without a code for it. Say with reserved how many codes are no number.",
                code="format.nan",
            )
        exponent, fraction = divmod(2 ** (self.bits - 1) - 1 - self.reserved, 2**self.mantissa)
        significand = fraction * 2.0**-self.mantissa + (exponent > 0)
        largest = significand * 2.0 ** (max(exponent, 1) - self.bias)
        if self.max != largest:
            raise ConfigError(
                f"{self.name}: max is {self.max:g}, but its largest code, with {self.reserved} reserved above it, means {largest:g}. "
                "Set max to that, or reserved to the codes that are no number.",
                code="format.max",
            )

    @property
    def nan_code(self) -> int | None:
        # All bits below the sign: torch's casts to e4m3 and e5m2 and the GPU's give the same code.
        return 2 ** (self.bits - 1) - 1 if self.has_nan else None

    @property
    def bias(self) -> int:
        return 2 ** (self.exponent - 1) - 1

    @property
    def smallest_normal(self) -> float:
        return 2.0 ** (1 - self.bias)

    @property
    def smallest(self) -> float:
        return 2.0 ** (1 - self.bias - self.mantissa)

    def round(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        x = x.to(torch.float32)
        y = x.clamp(-self.max, self.max)
        # 2 ** floor(log2 |y|), no smaller than the smallest normal; infinity where y is NaN.
        power = (
            (y.view(torch.int32) & FLOAT32_EXPONENT_BITS)
            .view(torch.float32)
            .clamp_(min=self.smallest_normal)
        )
        # A float format is a float32 with fewer mantissa bits: round at the gap of x's binade.
        if noise is None and self.mantissa == 0:
            y = self._nearest_power(y.abs(), power)
        elif noise is None:
            # y + 1.5 * 2**23 * gap has no bits below the gap: float32's own addition rounds to nearest even.
            gaps = 1.5 * 2.0 ** (FLOAT32_MANTISSA - self.mantissa)  # times a power of two is exact
            y.add_(power, alpha=gaps).sub_(power, alpha=gaps)
        else:
            gap = power.mul_(2.0**-self.mantissa)
            y = _round_stochastically(y / gap, noise) * gap
        y = y.copysign_(x)  # the addition above turns -0 into +0
        # The sign of a NaN differs between devices.
        return y if self.has_nan else torch.where(x.isnan(), 0.0, y)

    def _nearest_power(self, magnitude: Tensor, power: Tensor) -> Tensor:
        """Round to a power of two, for formats without mantissa bits.

        The gap above a power is the power itself, and a tie goes to the even exponent field.
        """
        code = (power.view(torch.int32) >> FLOAT32_MANTISSA) - 127 + self.bias
        above = (magnitude > 1.5 * power) | ((magnitude == 1.5 * power) & (code % 2 == 1))
        normal = torch.where(above, 2 * power, power)
        return torch.where(magnitude <= self.smallest / 2, 0.0, normal)

    def encode(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        y = self.round(x, noise)
        if self.storage != torch.uint8:
            return y.to(self.storage)
        bits = y.abs().view(torch.int32)
        normal = (bits >> (FLOAT32_MANTISSA - self.mantissa)) - ((127 - self.bias) << self.mantissa)
        # y is representable here, so both branches are exact: no rounding happens below.
        subnormal = (y.abs() * (1 / self.smallest)).to(torch.int32)
        magnitude = torch.where(y.abs() < self.smallest_normal, subnormal, normal)
        if self.nan_code is not None:
            magnitude = torch.where(y.isnan(), self.nan_code, magnitude)
        sign = y.signbit().to(torch.int32) << (self.bits - 1)
        return (magnitude | sign).to(torch.uint8)

    def codes_of(self, values: Tensor) -> Tensor:
        looks_up = (
            values.device.type == "cpu"
            and values.dtype == torch.bfloat16
            and not torch.compiler.is_compiling()
        )
        if not looks_up or self.has_nan or self.storage != torch.uint8:
            return super().codes_of(values)
        # The sign, the exponent and as many bits of the mantissa as the format has: a tenth of the
        # time of `encode`, which rounds. A NaN may have no bit there, hence formats without one.
        keys = values.view(torch.int16).bitwise_right_shift(BFLOAT16_MANTISSA - self.mantissa)
        keys = keys.bitwise_and_((1 << (9 + self.mantissa)) - 1).to(torch.int32)
        return _codes_by_bits(self).index_select(0, keys.reshape(-1)).view(values.shape)

    def decode(self, codes: Tensor) -> Tensor:
        if codes.dtype == self.storage != torch.uint8:
            return codes.to(torch.float32)
        return super().decode(codes)

    def _decode_bits(self, codes: Tensor) -> Tensor:
        if self.storage != torch.uint8:
            return codes.to(torch.uint8).view(self.storage).to(torch.float32)
        fraction = (codes & (2**self.mantissa - 1)).double() * 2.0**-self.mantissa
        exponent = (codes >> self.mantissa) & (2**self.exponent - 1)
        normal = torch.ldexp(1 + fraction, exponent - self.bias)
        magnitude = torch.where(exponent > 0, normal, fraction * self.smallest_normal)
        reserved = (codes & (2 ** (self.bits - 1) - 1)) >= 2 ** (self.bits - 1) - self.reserved
        magnitude = torch.where(reserved, float("nan"), magnitude)
        sign = 1 - 2 * (codes >> (self.bits - 1)).double()
        return (sign * magnitude).float()


@dataclass(frozen=True, kw_only=True)
class IntFormat(Format):
    """Symmetric integers -max ... max.

    A code is a two's complement number of `bits` bits. Codes beyond the range are never produced, in
    particular the most negative one. Stored codes are int8, the sign extended.
    """

    @property
    def smallest(self) -> float:
        return 1.0

    def round(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        y = x.to(torch.float32).clamp(-self.max, self.max)
        y = y.round_() if noise is None else _round_stochastically(y, noise)
        return torch.where(y.abs() > 0, y, 0.0)  # integers have no code for NaN and -0

    def encode(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        return self.round(x, noise).to(self.storage)

    def decode(self, codes: Tensor) -> Tensor:
        return codes.to(torch.float32)

    def _decode_bits(self, codes: Tensor) -> Tensor:
        return self._sign_extended(codes).float()

    def _from_nibble(self, nibbles: Tensor) -> Tensor:
        return self._sign_extended(nibbles)

    def _sign_extended(self, codes: Tensor) -> Tensor:
        """Sign-extend two's complement numbers of `bits` bits to `storage`, without a branch."""
        sign = 2 ** (self.bits - 1)
        # With 8 bits the conversion and the sum wrap around, which undo each other. Written as a sum:
        # torch takes -128 as an int8, but not 128.
        return (((codes & (2 * sign - 1)) ^ sign).to(torch.int8) + -sign).to(self.storage)


@dataclass(frozen=True, kw_only=True)
class ExponentFormat(Format):
    """E8M0, a format of scales: 2**(code - 127) without sign and zero; code 255 is NaN.

    `encode` takes the nearest power of two, ties to the even code. Zero becomes the smallest power,
    a negative number becomes NaN.
    """

    @property
    def is_signed(self) -> bool:
        return False

    @property
    def nan_code(self) -> int:
        return 255

    @property
    def smallest(self) -> float:
        return 2.0**-127

    def encode(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        if noise is not None:
            raise ConfigError(
                f"encode: {self.name} holds scales and has no stochastic rounding. Leave out noise.",
                code="format.noise",
            )
        x = x.to(torch.float32)
        bits = x.abs().view(torch.int32)
        normal = (bits + 0x3FFFFF + ((bits >> FLOAT32_MANTISSA) & 1)) >> FLOAT32_MANTISSA
        # Below 2**-126 float32 is subnormal: codes 0 and 1 meet at 1.5 * 2**-127.
        code = torch.where(bits < 0x00800000, (bits > 0x00600000).to(torch.int32), normal).clamp_(
            max=254
        )
        # Tested on the bits: under flush-to-zero a subnormal compares equal to zero.
        negative = x.signbit() & (bits > 0)
        return torch.where(x.isnan() | negative, self.nan_code, code).to(torch.uint8)

    def _decode_bits(self, codes: Tensor) -> Tensor:
        bits = torch.where(
            codes == 0, 0x00400000, codes << FLOAT32_MANTISSA
        )  # 2**-127 is subnormal in float32
        return torch.where(
            codes == self.nan_code, float("nan"), bits.to(torch.int32).view(torch.float32)
        )


@dataclass(frozen=True, kw_only=True)
class TableFormat(Format):
    """Any sorted list of levels; code i means levels[i].

    Rounds to the nearest level, and to the lower one at a tie.
    """

    levels: tuple[float, ...] = field(repr=False)

    def __post_init__(self) -> None:
        if len(self.levels) != 2**self.bits or list(self.levels) != sorted(set(self.levels)):
            raise ConfigError(
                f"{self.name}: {len(self.levels)} levels given; a {self.bits}-bit table needs {2**self.bits} "
                "distinct levels in ascending order.",
                code="format.levels",
            )

    @property
    def is_signed(self) -> bool:
        return self.levels[0] < 0

    @property
    def smallest(self) -> float:
        return min(abs(level) for level in self.levels if level != 0)

    def encode(self, x: Tensor, noise: Tensor | None = None) -> Tensor:
        levels, boundaries = _table(self, x.device), _boundaries(self, x.device)
        # contiguous(): bucketize copies a strided input and warns.
        y = (
            torch.where(x.isnan(), 0.0, x.to(torch.float32))
            .clamp_(levels[0], levels[-1])
            .contiguous()
        )
        if noise is None:
            return torch.bucketize(y, boundaries).to(torch.uint8)
        below = (torch.bucketize(y, levels, right=True) - 1).clamp_(0, len(levels) - 2)
        low, high = levels[below], levels[below + 1]
        up = noise * (high - low) < y - low
        return (below + up).to(torch.uint8)

    def _decode_bits(self, codes: Tensor) -> Tensor:
        return torch.tensor(self.levels, dtype=torch.float32, device=codes.device)[codes]


def _round_stochastically(y: Tensor, noise: Tensor) -> Tensor:
    """floor(y), or floor(y) + 1 if noise is below the fraction of y; whole numbers stay."""
    floor = y.floor()
    # Adding the bool mask directly would allocate a third tensor on a CPU.
    return (noise < y - floor).to(y.dtype).add_(floor)


@cached
def _table(format: Format, device: torch.device) -> Tensor:
    return format.values().to(device)


@cached
def _pairs(format: Format) -> Tensor:
    """Values of both codes of each byte, two float32 as one int64 [256]."""
    packed = torch.arange(256, dtype=torch.uint8, device="cpu").unsqueeze(-1)
    return format.decode(format.unpack(packed, 2)).view(torch.int64).view(-1)


@cached
def _codes_by_bits(format: FloatFormat) -> Tensor:
    """The code of each bfloat16 number, by its upper bits; of others than the format's it means nothing."""
    keys = torch.arange(1 << (9 + format.mantissa), dtype=torch.int32, device="cpu")
    bits = (keys << (BFLOAT16_MANTISSA - format.mantissa)).to(torch.int16)
    return format.encode(bits.view(torch.bfloat16))


@cached
def _boundaries(format: TableFormat, device: torch.device) -> Tensor:
    """Midpoints between levels, rounded down to float32.

    x <= boundary is then exactly the test that x is not nearer to the upper level.
    """
    levels = format.values().double()
    exact = (levels[:-1] + levels[1:]) / 2
    nearest = exact.float()
    lower = torch.nextafter(nearest, nearest.new_tensor(-torch.inf))
    return torch.where(nearest.double() > exact, lower, nearest).to(device)


def _dynamic_levels(signed: bool) -> tuple[float, ...]:
    """The 8-bit dynamic exponent map of Dettmers et al. (arXiv 2110.02861), section 2.2.

    "8-bit Optimizers via Block-wise Quantization". Seven decades from 1 down to 1e-6; decade i has
    2**i (signed) or 2**(i + 1) (unsigned) levels, the centres of equal steps of [0.1, 1], on each
    side of zero if signed. With 0 and 1 that makes 256 levels.
    """
    levels = [0.0, 1.0]
    for i in range(7):
        steps = 2**i if signed else 2 ** (i + 1)
        decade = 10.0 ** (i - 6)
        centres = [decade * (0.1 + 0.9 * (step + 0.5) / steps) for step in range(steps)]
        levels += centres + ([-centre for centre in centres] if signed else [])
    return tuple(sorted(levels))


# The 4-bit NormalFloat of QLoRA (arXiv 2305.14314), appendix E: equal-mass quantiles of a normal distribution in [-1, 1].
_NF4_LEVELS = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip

# e4m3 reserves only NaN; e5m2 reserves infinity and three NaNs (OCP FP8, as torch's dtypes). e3m4
# reserves the sixteen codes that IEEE's rule gives to infinity and NaN (as ml_dtypes' float8_e3m4).
E4M3 = FloatFormat(
    name="e4m3",
    bits=8,
    exponent=4,
    mantissa=3,
    max=448,
    storage=torch.float8_e4m3fn,
    has_nan=True,
    reserved=1,
)
E5M2 = FloatFormat(
    name="e5m2",
    bits=8,
    exponent=5,
    mantissa=2,
    max=57344,
    storage=torch.float8_e5m2,
    has_nan=True,
    reserved=4,
)
E3M4 = FloatFormat(
    name="e3m4",
    bits=8,
    exponent=3,
    mantissa=4,
    max=15.5,
    storage=torch.uint8,
    has_nan=True,
    reserved=16,
)
E3M2 = FloatFormat(name="e3m2", bits=6, exponent=3, mantissa=2, max=28, storage=torch.uint8)
E2M3 = FloatFormat(name="e2m3", bits=6, exponent=2, mantissa=3, max=7.5, storage=torch.uint8)
E3M0 = FloatFormat(name="e3m0", bits=4, exponent=3, mantissa=0, max=16, storage=torch.uint8)
E2M1 = FloatFormat(name="e2m1", bits=4, exponent=2, mantissa=1, max=6, storage=torch.uint8)
E8M0 = ExponentFormat(name="e8m0", bits=8, max=2.0**127, storage=torch.uint8)
INT8 = IntFormat(name="int8", bits=8, max=127, storage=torch.int8)
# Bit splitting (arXiv 2306.11987, 4.1) writes a gradient as two INT4 numbers, 14 * high + low: t =
# x / scale, high = round(t / 14), low = the remainder, rounded stochastically. high is whole, so
# the sum equals t rounded stochastically to whole numbers, for any high. The gradient is therefore
# encoded as one number, which INT8 units multiply in one GEMM instead of two. The base is 14: the
# remainder spans -7 ... 7 including both ends, so base 15 would need +-8. Nothing clips, since amax
# / scale = 98 = 7 * 14.
INT4X2 = IntFormat(name="int4x2", bits=8, max=98, storage=torch.int8)
INT4 = IntFormat(name="int4", bits=4, max=7, storage=torch.int8)
NF4 = TableFormat(name="nf4", bits=4, max=1, storage=torch.uint8, levels=_NF4_LEVELS)
DYNAMIC_SIGNED = TableFormat(
    name="dynamic-signed", bits=8, max=1, storage=torch.uint8, levels=_dynamic_levels(signed=True)
)
DYNAMIC_UNSIGNED = TableFormat(
    name="dynamic-unsigned",
    bits=8,
    max=1,
    storage=torch.uint8,
    levels=_dynamic_levels(signed=False),
)

# All formats above in definition order: the registry that docs, reports and tests use.
ALL: tuple[Format, ...] = tuple(
    each for each in list(globals().values()) if isinstance(each, Format)
)
NAMES: tuple[str, ...] = tuple(format.name for format in ALL)
# Formats of elements; an ExponentFormat holds scales alone.
ELEMENTS: tuple[Format, ...] = tuple(
    format for format in ALL if not isinstance(format, ExponentFormat)
)


def get(name: str) -> Format:
    """The format called `name`. Raises ConfigError with the closest names."""
    for format in ALL:
        if format.name == name:
            return format
    raise ConfigError(
        f"formats.get: no format {name!r}. Closest: {closest(name, NAMES) or ', '.join(NAMES)}.",
        code="formats.unknown",
    )
