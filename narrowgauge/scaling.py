"""Tiles, the pieces of a matrix that share a scale, and the rules from a tile's amax to its scale.

One direction everywhere: x ~= decode(codes) * scale. Elements are multiplied by the reciprocal of
the scale, rounded once to float32: codes = encode(x * (1 / scale)). A division per element would
cost a GPU as much as the rest of the cast. The reciprocal is off by at most one and a half units in
the last place of float32, which moves a code only next to a tie.

    FP32             amax / max
    POW2             the smallest power of two >= amax / max: nothing saturates
    E8M0_CEIL        the same, within the range of an 8-bit exponent ("RCEIL" in the MX literature)
    E8M0_FLOOR       2 ** (floor(log2 amax) - floor(log2 max)), OCP MX v1.0 section 6.3: the top of
                     a tile may saturate
    E4M3_TWO_LEVEL   an e4m3 number per tile times one float32 per tensor, as in NVFP4: the top of a
                     tile may saturate
    E4M3_TWO_LEVEL_CEIL   the same, the e4m3 number rounded up: nothing saturates
    E4M3_TWO_LEVEL_POW2   as E4M3_TWO_LEVEL, the float32 rounded up to a power of two
    E4M3_FOUR_OVER_SIX    as E4M3_TWO_LEVEL, for e2m1: of two scales of a tile, which put its largest
                     element at 6 or at 4, the one with the smaller squared error
    E4M3_FOUR_OVER_SIX_POW2   the same, the float32 rounded up to a power of two
    E4M3_EDEN        as E4M3_TWO_LEVEL, for casts that correct their scales (ops/quantize/eden.py):
                     the largest tile at 256, its top at 0.988 of e2m1's 6
    E4M3_EDEN_FOUR_OVER_SIX   of the scales of E4M3_EDEN and 1.5 times these the better one

    amax              FP32            POW2, E8M0_CEIL  E8M0_FLOOR      E4M3_TWO_LEVEL (_CEIL)
    0 or subnormal    1               1                1               0 (codes are zero)
    NaN or infinity   NaN             NaN              NaN             NaN
    tiny              >= smallest     >= smallest      >= smallest     0 below 2**-9, e4m3's minimum
    huge              <= 2**126       <= 2**126        <= 2**126       finite

A scale of NaN makes the whole tile NaN, so a poisoned tensor stays visible and is never clipped to
plausible values. Under the two-level rules it makes the whole tensor NaN, since all tiles share its
float32.

Two-level scales follow the order of NVFP4 (arXiv 2509.25149, appendix C; bit-identical to torchao
0.18), each step rounded to float32:

    whole   = max amax / (448 * max)                     the float32 of the tensor
    scale   = e4m3((amax / max) / whole)                 the number of a tile
    codes   = encode(x * ((1 / whole) / scale))          rounded reciprocal, as in hardware

Four over six (arXiv 2512.02010) exists because e2m1 has no number between 4 and 6: elements just
below the largest are far from any code. A tile tries the scales of amax and of 1.5 amax. So that
the larger one is an e4m3 number too, the largest tile is at 256 and not at 448.

    scale   = the first of e4m3(f * (amax / max) / whole), f = 1 and 1.5, with the least
              sum((x - decode(codes) * (scale * whole))**2), codes rounded to nearest
    sum     differences in float32, subnormal ones as zero; squares in float64, by `halved_sum`

e4m3's subnormals down to 2**-9 are used, as in TransformerEngine. torchao raises smaller scales to
2**-6, which quantizes tiles with an amax below 2**-14.8 of the tensor's more coarsely.

`smallest_scale` of a format is 2**-125 / format.smallest (2**-116 in e4m3), not the 2**-127 that
E8M0 could represent. At this scale float32's subnormals round to zero and no decoded value is
subnormal, so flush-to-zero changes no result. It does not change a reciprocal either: scales end at
2**126, where formats whose largest value is below 4 saturate.

A tile (a, b) on [outer, inner] covers a rows and b columns; -1 is a whole axis. With
A = ceil(outer / a), B = ceil(inner / b):

    scale      [A, B]
    as_tiles   [A, a, B, b]; [outer, B, b] if a is 1; [outer, inner] for one scale per tensor or row
    per_tile   the scale as [A, 1, B, 1], [outer, B, 1] or [A, B], which broadcasts against as_tiles

The three views exist for speed and because Inductor (2.13) has a bug on CPUs: where an index is
divided by the size of a tile, loop splitting drops a vector tail or fails an assertion
(try_loop_split in codegen/cpp.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache

import torch
from torch import Tensor

from narrowgauge.formats import E4M3, Format

WHOLE = -1  # in a tile: the whole axis
# One scale per tensor or per row: x needs no view of tiles.
_ONE_SCALE = ((WHOLE, WHOLE), (1, WHOLE))
SMALLEST_NORMAL = 2.0**-126  # of float32
LARGEST_SCALE = 2.0**126
_MANTISSA = 23
_MANTISSA_BITS = 0x007FFFFF
_EXPONENT_BITS = 0x7F800000
_LARGEST_FINITE = 0x7F7FFFFF


@dataclass(frozen=True, repr=False)
class ScaleRule:
    """A named rule that turns amax into a scale.

    function      function(amax, format): float32 amax >= 0 of any shape -> scales of that shape
    power_of_two  True if every scale is a power of two: multiplying by it is exact
    two_level     True if a per-tensor scale multiplies the scales of the tiles. `function` then
                  takes the desired scales relative to the per-tensor scale (see `two_level_scales`)
    power_of_two_whole  True if that per-tensor scale is a power of two. Tensors can then share the
                  largest of their scales, exactly: the numbers of their tiles shift by a power of two
    largest_tile  number of the tile with the largest amax, relative to the per-tensor scale
    tries         factors of amax, each of which gives a candidate for the scale of a tile. The one
                  with the least error is taken
    reads_elements  True if there are several: the scale of a tile depends on more than its amax
    """

    name: str
    function: Callable[[Tensor, Format], Tensor]
    power_of_two: bool = False
    two_level: bool = False
    power_of_two_whole: bool = False
    largest_tile: float = E4M3.max
    tries: tuple[float, ...] = (1.0,)
    reads_elements: bool = field(init=False, compare=False)

    def __post_init__(self) -> None:
        # An attribute and no property: every cast of every step asks for it.
        object.__setattr__(self, "reads_elements", len(self.tries) > 1)

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        """Omits the address of the function, so that the text is the same in every process."""
        return f"ScaleRule({self.name!r})"

    def __call__(self, amax: Tensor, format: Format) -> Tensor:
        return self.function(amax.to(torch.float32), format)


def smallest_scale(format: Format) -> float:
    """The smallest scale of a tile of `format`, a power of two.

    The module docstring gives the reason.
    """
    exact = 2 * SMALLEST_NORMAL / format.smallest
    return 2.0 ** (_floor_log2(exact) + (math.frexp(exact)[0] > 0.5))


def _fp32(amax: Tensor, format: Format) -> Tensor:
    return _guard(_quotient(amax, format.max).clamp(smallest_scale(format), LARGEST_SCALE), amax)


def ceil_carry(format: Format) -> int:
    """Integer that, added to amax's bits, carries into the exponent where rounding up is needed.

    The carry happens where amax has a larger mantissa than format.max.
    """
    return _MANTISSA_BITS - int((2 * math.frexp(format.max)[0] - 1) * 2**_MANTISSA)


def _power_of_two_ceil(amax: Tensor, format: Format) -> Tensor:
    return _power_of_two_floor(amax, format, ceil_carry(format))


def _power_of_two_floor(amax: Tensor, format: Format, carry: int = 0) -> Tensor:
    """2 ** (floor(log2 amax) - floor(log2 max)), doubled where `carry` reaches the exponent.

    carry  added to amax's bits; 0 for E8M0_FLOOR
    """
    # Computed on the bits: exp2(floor(log2 x)) is wrong next to exact powers of two. Infinity and
    # NaN are clamped, so that adding the carry cannot overflow int32; `_guard` turns them into NaN.
    bits = amax.view(torch.int32).clamp(max=_LARGEST_FINITE) + carry
    exponent = (bits & _EXPONENT_BITS) - (_floor_log2(format.max) << _MANTISSA)
    lowest, highest = (
        (_floor_log2(power) + 127) << _MANTISSA for power in (smallest_scale(format), LARGEST_SCALE)
    )
    return _guard(exponent.clamp(lowest, highest).view(torch.float32), amax)


def least_error_clip(largest: float) -> float:
    """Clip, in standard deviations, with the least squared error of normal numbers in integers.

    largest  of the integers -largest ... largest. 7 gives 2.475, a step of 0.354 standard deviations
    ->       largest times the step s that minimises, for a standard normal z and its code q s,

                 E (z - q s)^2 = 1 - 4 s sum phi(t_k) + 2 s^2 sum (2 k - 1) P(z > t_k)

             with t_k = (k - 1/2) s, k = 1 ... largest. Found by golden section to seven digits
    """
    return _searched_clip(largest)


# As `ops.registry.constant_while_compiling`, or Dynamo would trace the search.
least_error_clip._dynamo_marked_constant = True  # type: ignore[attr-defined]


@cache
def _searched_clip(largest: float) -> float:
    def error(clip: float) -> float:
        step = clip / largest
        limits = [(k - 0.5) * step for k in range(1, int(largest) + 1)]
        density = sum(math.exp(-t * t / 2) for t in limits) / math.sqrt(2 * math.pi)
        above = sum((2 * k + 1) * math.erfc(t / math.sqrt(2)) / 2 for k, t in enumerate(limits))
        return 1 - 4 * step * density + 2 * step * step * above

    low, high, part = 0.5, 8.0, (math.sqrt(5) - 1) / 2
    while high - low > 1e-7:
        left, right = high - part * (high - low), low + part * (high - low)
        low, high = (low, right) if error(left) < error(right) else (left, high)
    return (low + high) / 2


def two_level_scales(amax: Tensor, format: Format, rule: ScaleRule) -> tuple[Tensor, Tensor]:
    """Scales of a two-level rule: (e4m3 numbers of the tiles, 0-d float32 of the tensor).

    The float32 places the largest tile at `rule.largest_tile`; the module docstring has the
    equations. A rule that tries several factors gets the numbers of the first.
    """
    whole = whole_scale(amax, format, rule)
    return relative_scales(amax, whole, format, rule, rule.tries[0]), whole


def whole_scale(amax: Tensor, format: Format, rule: ScaleRule) -> Tensor:
    """Float32 of a tensor under a two-level rule, 0-d, from the amax of its tiles."""
    if amax.numel() == 0:
        return amax.new_ones(())
    largest = amax.amax()
    whole = _quotient(largest, rule.largest_tile * format.max).clamp(
        min=smallest_scale(format) / E4M3.smallest
    )
    if rule.power_of_two_whole:
        # On the bits, as `_power_of_two_floor`: any mantissa carries into the exponent.
        bits = whole.view(torch.int32) + _MANTISSA_BITS
        whole = (bits & _EXPONENT_BITS).view(torch.float32)
    return _guard(whole, largest)


def relative_scales(
    amax: Tensor, whole: Tensor, format: Format, rule: ScaleRule, factor: float
) -> Tensor:
    """E4M3 numbers of tiles under a two-level rule, relative to the float32 of the tensor.

    factor  one of `rule.tries`
    """
    wanted = _quotient(amax, format.max)
    # Subnormals are set to zero, whether or not the division flushes them: rounding up would
    # otherwise turn a surviving subnormal into 2**-9.
    return rule(torch.where(wanted < SMALLEST_NORMAL, 0.0, wanted) * factor / whole, format)


def _e4m3_relative(wanted: Tensor, format: Format) -> Tensor:
    """Round relative tile scales to e4m3; NaN passes through e4m3.

    wanted  scale of a tile relative to the tensor's scale (see `two_level_scales`)
    """
    return _guard(E4M3.round(wanted), wanted, when_zero=0.0)


def _e4m3_relative_ceil(wanted: Tensor, format: Format) -> Tensor:
    # Stochastic rounding with zero noise rounds up wherever there is a fraction.
    return _guard(E4M3.round(wanted, noise=torch.zeros_like(wanted)), wanted, when_zero=0.0)


def _guard(scale: Tensor, amax: Tensor, when_zero: float = 1.0) -> Tensor:
    scale = torch.where(amax < SMALLEST_NORMAL, when_zero, scale)
    return torch.where(amax.isfinite(), scale, float("nan"))


def _quotient(amax: Tensor, divisor: float) -> Tensor:
    """amax / divisor, correctly rounded to float32.

    float64, because CUDA multiplies by the reciprocal of a constant divisor, so a float32 quotient
    would differ between devices.
    """
    return (amax.to(torch.float64) / divisor).to(torch.float32)


def _floor_log2(value: float) -> int:
    return math.frexp(value)[1] - 1


FP32 = ScaleRule("fp32", _fp32)
POW2 = ScaleRule("pow2", _power_of_two_ceil, power_of_two=True)
E8M0_CEIL = ScaleRule("e8m0-ceil", _power_of_two_ceil, power_of_two=True)
E8M0_FLOOR = ScaleRule("e8m0-floor", _power_of_two_floor, power_of_two=True)
E4M3_TWO_LEVEL = ScaleRule("e4m3-two-level", _e4m3_relative, two_level=True)
E4M3_TWO_LEVEL_CEIL = ScaleRule("e4m3-two-level-ceil", _e4m3_relative_ceil, two_level=True)
E4M3_TWO_LEVEL_POW2 = ScaleRule(
    "e4m3-two-level-pow2", _e4m3_relative, two_level=True, power_of_two_whole=True
)
E4M3_FOUR_OVER_SIX = ScaleRule(
    "e4m3-four-over-six", _e4m3_relative, two_level=True, largest_tile=256.0, tries=(1.0, 1.5)
)
E4M3_FOUR_OVER_SIX_POW2 = replace(
    E4M3_FOUR_OVER_SIX, name="e4m3-four-over-six-pow2", power_of_two_whole=True
)
# The factor is Quartet II's (arXiv 2601.22813): a scale is 1.2 % larger than amax asks for. Of normal
# numbers in 1x16 the corrected error is 0.0098 of their square with it.
_EDEN_FACTOR = 1 / 0.988
E4M3_EDEN = ScaleRule(
    "e4m3-eden", _e4m3_relative, two_level=True, largest_tile=256.0, tries=(_EDEN_FACTOR,)
)
E4M3_EDEN_FOUR_OVER_SIX = replace(
    E4M3_EDEN, name="e4m3-eden-four-over-six", tries=(_EDEN_FACTOR, 1.5 * _EDEN_FACTOR)
)
RULES: tuple[ScaleRule, ...] = (
    FP32,
    POW2,
    E8M0_CEIL,
    E8M0_FLOOR,
    E4M3_TWO_LEVEL,
    E4M3_TWO_LEVEL_CEIL,
    E4M3_TWO_LEVEL_POW2,
    E4M3_FOUR_OVER_SIX,
    E4M3_FOUR_OVER_SIX_POW2,
    E4M3_EDEN,
    E4M3_EDEN_FOUR_OVER_SIX,
)


def to_exponents(scale: Tensor) -> Tensor:
    """Convert power-of-two scales to E8M0: float32 -> uint8 of the same shape, the exponent bits.

    scale  powers of two from 2**-126 to 2**127, or NaN
    """
    # NaN has exponent bits 0xFF, which is E8M0's NaN.
    return ((scale.contiguous().view(torch.int32) >> _MANTISSA) & 0xFF).to(torch.uint8)


def from_exponents(exponents: Tensor) -> Tensor:
    """Convert E8M0 exponents back to float32 scales; the inverse of `to_exponents`."""
    scale = (exponents.to(torch.int32) << _MANTISSA).view(torch.float32)
    return torch.where(exponents == 0xFF, float("nan"), scale)


# cuBLAS' blocks of byte scales (12.9, "Block scaling factors layout"): rows and columns of a block,
# and rows that are contiguous in it.
SCALE_ROWS, SCALE_COLUMNS, SCALE_GROUP = 128, 4, 32


def swizzled_length(rows: int, columns: int) -> int:
    """Bytes of `swizzled` scales [rows, columns]."""
    return -(-rows // SCALE_ROWS) * -(-columns // SCALE_COLUMNS) * SCALE_ROWS * SCALE_COLUMNS


def swizzled(scale: Tensor) -> Tensor:
    """Swizzle scale [R, C], one byte per element -> flat. One copy.

    Blocks of 128 rows and 4 columns, 512 bytes, the blocks of a row panel consecutive; in a block,
    row r and column c are at (r % 32) * 16 + (r // 32) * 4 + c. R is padded with zeros to a multiple
    of 128, C to a multiple of 4.
    """
    fill = (0, -scale.shape[1] % SCALE_COLUMNS, 0, -scale.shape[0] % SCALE_ROWS)
    bytes_ = torch.nn.functional.pad(scale.view(torch.uint8), fill)
    panels, columns = bytes_.shape[0] // SCALE_ROWS, bytes_.shape[1] // SCALE_COLUMNS
    blocks = bytes_.view(panels, SCALE_ROWS // SCALE_GROUP, SCALE_GROUP, columns, SCALE_COLUMNS)
    return blocks.permute(0, 3, 2, 1, 4).reshape(-1).view(scale.dtype)


def unswizzled(flat: Tensor, rows: int, columns: int) -> Tensor:
    """Invert `swizzled`: flat, one byte per element -> uint8 [rows, columns]."""
    panels, wide = -(-rows // SCALE_ROWS), -(-columns // SCALE_COLUMNS)
    blocks = flat.view(torch.uint8).view(
        panels, wide, SCALE_GROUP, SCALE_ROWS // SCALE_GROUP, SCALE_COLUMNS
    )
    full = blocks.permute(0, 3, 2, 1, 4).reshape(panels * SCALE_ROWS, wide * SCALE_COLUMNS)
    return full[:rows, :columns]


def tile_sizes(shape: tuple[int, ...], tile: tuple[int, int]) -> tuple[int, int]:
    """The tile with -1 replaced by the length of its axis (at least 1)."""
    outer = max(shape[0], 1) if tile[0] == WHOLE else tile[0]
    return outer, max(shape[1], 1) if tile[1] == WHOLE else tile[1]


def scale_shape(shape: tuple[int, ...], tile: tuple[int, int]) -> tuple[int, int]:
    """Number of scales along each axis: ceil(length / tile)."""
    outer, inner = tile_sizes(shape, tile)
    return -(-shape[0] // outer), -(-shape[1] // inner)


def padded_to_tiles(x: Tensor, tile: tuple[int, int]) -> Tensor:
    """x [outer, inner] padded with zeros to whole tiles; x itself if the tiles divide it."""
    if tile in _ONE_SCALE:
        return x
    a, b = tile_sizes(tuple(x.shape), tile)
    fill = (0, -x.shape[1] % b, 0, -x.shape[0] % a)
    return torch.nn.functional.pad(x, fill) if any(fill) else x


def _divides(tile: tuple[int, int], x: Tensor) -> bool:
    """True if x [outer, inner] consists of whole tiles."""
    a, b = tile_sizes(tuple(x.shape), tile)
    return tile in _ONE_SCALE or not (x.shape[0] % a or x.shape[1] % b)


def as_tiles(x: Tensor, tile: tuple[int, int]) -> Tensor:
    """View of a padded x as tiles; the module docstring lists the shapes.

    No copy if x is contiguous.
    """
    if tile in _ONE_SCALE:
        return x
    a, b = tile_sizes(tuple(x.shape), tile)
    if a == 1:
        return x.reshape(x.shape[0], x.shape[1] // b, b)
    return x.reshape(x.shape[0] // a, a, x.shape[1] // b, b)


def from_tiles(tiles: Tensor, full: Tensor, rows: int, columns: int) -> Tensor:
    """Inverse of `as_tiles`: [rows, columns] without the padding.

    full  the padded tensor that `as_tiles` was called on; only its shape is used
    """
    found = tiles.reshape(full.shape)
    if not torch.compiler.is_compiling() or found.shape == (rows, columns):
        return found[:rows, :columns]
    # Inductor (2.13) splits a loop over part of a tile where it divides the index by the tile's
    # size, and then drops the remainder of a vector. A cut by strides is computed as a whole.
    return found.contiguous().as_strided((rows, columns), (found.shape[1], 1))


def per_tile(scale: Tensor, tile: tuple[int, int]) -> Tensor:
    """View of scale [A, B] that broadcasts against `as_tiles` of the same tile."""
    if tile in _ONE_SCALE:
        return scale
    return scale[:, :, None] if tile[0] == 1 else scale[:, None, :, None]


def halved_sum(tiles: Tensor) -> Tensor:
    """Sum over the elements of each tile, in one order on every device: [A, B].

    tiles  in a shape of `as_tiles` for tiles of fixed sizes. The later half of a tile's elements,
           row by row, is added to the earlier half until one is left. Of an odd number, the middle
           one stays as it is
    """
    if tiles.ndim == 4:
        tiles = tiles.transpose(1, 2)
    left = tiles.flatten(2)
    while left.shape[2] > 1:
        half = -(-left.shape[2] // 2)
        first, second = left[:, :, :half], left[:, :, half:]
        left = torch.nn.functional.pad(second, (0, half - second.shape[2])) + first
    return left[:, :, 0]


def times_scale(values: Tensor, scale: Tensor, tile: tuple[int, int]) -> Tensor:
    """values [outer, inner] times the scale of their tile, in the dtype of values.

    Row-major if the tiles do not divide values, else in the memory order of values.
    """
    is_transposed = values.stride(0) < values.stride(1)
    if is_transposed and tile not in _ONE_SCALE and not torch.compiler.is_compiling():
        # As rows: torch pads a transposed matrix element by element, and multiplies one with runs of
        # scales so, which takes four times as long.
        scaled = times_scale(values.T, scale.T.contiguous(), (tile[1], tile[0])).T
        return scaled if _divides(tile, values) else scaled.contiguous()
    # On a CPU torch multiplies a run of fewer than 32 bfloat16 numbers by one number element by
    # element. A factor for each takes a quarter of the time.
    is_short = 1 < tile[1] < 32 and tile[0] > 0 and values.dtype == torch.bfloat16
    is_short = is_short and values.is_cpu and not torch.compiler.is_compiling()
    full = padded_to_tiles(values, tile)
    tiles, factors = as_tiles(full, tile), per_tile(scale, tile).to(values.dtype)
    if is_short:
        factors = factors.expand(tiles.shape).contiguous()
    scaled = tiles * factors
    return from_tiles(scaled, full, values.shape[0], values.shape[1])
