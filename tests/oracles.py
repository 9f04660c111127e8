"""The rules once more, independently: Python fractions, NumPy float64 searches and ml_dtypes. Slow and obvious.

Nothing here calls narrowgauge's arithmetic; formats are asked for their constants (name, max, values) only. Code points are
compared as uint8, values as float32; `plain` makes all NaNs one, since payload and sign of a NaN are nobody's promise.
"""

from __future__ import annotations

import math
from dataclasses import replace
from fractions import Fraction
from functools import cache

import ml_dtypes
import numpy as np
import torch
from torch import Tensor

from narrowgauge import formats
from narrowgauge.formats import (
    DYNAMIC_SIGNED,
    DYNAMIC_UNSIGNED,
    NF4,
    ExponentFormat,
    FloatFormat,
    Format,
    IntFormat,
    TableFormat,
)
from narrowgauge.recipe import Cast

FLOAT32_MAX = float(np.finfo(np.float32).max)
E4M3_VALUES = np.unique(
    np.abs(np.arange(127, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64))
)
NAN = float("nan")
INF = float("inf")


def _ml_dtype(format: Format) -> type | None:
    """ml_dtypes' type with these fields and this largest value; None: it has none, and searches are the oracle."""
    if not isinstance(format, FloatFormat | ExponentFormat):
        return None
    for name in dir(ml_dtypes):
        each = getattr(ml_dtypes, name)
        if not name.startswith("float") or not isinstance(each, type):
            continue
        facts = ml_dtypes.finfo(each)
        fields = (format.exponent, format.mantissa) if isinstance(format, FloatFormat) else (8, 0)
        if (facts.bits, facts.nexp, facts.nmant) == (format.bits, *fields) and float(
            facts.max
        ) == format.max:
            return each
    return None


# Name of a format -> the type of ml_dtypes with the same numbers. Formats that it lacks are absent.
ML_DTYPES: dict[str, type] = {
    format.name: found for format in formats.ALL if (found := _ml_dtype(format)) is not None
}


@cache
def smallest_scale(format: Format) -> float:
    """Smallest power of two that lifts half of the format's smallest step to float32's smallest normal, 2**-126."""
    values = format.values().double().numpy()
    step = Fraction(float(np.abs(values[np.isfinite(values) & (values != 0)]).min()))
    return float(Fraction(2) ** ceil_log2(Fraction(2) ** -125 / step))


def plain(x: Tensor) -> Tensor:
    """x with every NaN replaced by the same one."""
    return torch.where(x.isnan(), NAN, x)


def from_bits(bits: int | list[int]) -> Tensor:
    return torch.from_numpy(np.asarray(bits, dtype=np.uint32).view(np.float32).copy())


def random_bit_patterns(count: int, seed: int) -> Tensor:
    """float32 of `count` uniformly random bit patterns: all exponents alike, 1 in 128 subnormal, 1 in 128 NaN."""
    bits = np.random.default_rng(seed).integers(0, 2**32, count, dtype=np.uint32)
    return torch.from_numpy(bits.view(np.float32))


def neighbours(x: Tensor) -> Tensor:
    """x, and the float32 just below and just above each."""
    x = x.to(torch.float32)
    return torch.cat(
        (x, torch.nextafter(x, torch.tensor(-INF)), torch.nextafter(x, torch.tensor(INF)))
    )


def finite_values(format: Format) -> np.ndarray:
    """The finite values in ascending order, float64, zero once. Symmetric formats leave out -max - 1."""
    values = format.values().double().numpy()
    values = values[np.isfinite(values)]
    return np.unique(values[np.abs(values) <= format.max])


def boundaries(format: Format) -> Tensor:
    """Where rounding can go wrong: every value, every midpoint, and the float32 next to each; both signs; beyond max."""
    values = finite_values(format)
    midpoints = (values[:-1] + values[1:]) / 2
    beyond = format.max * np.array([1 + 2**-6, 15 / 14, 1.5, 2])
    both = np.concatenate((values, midpoints, beyond[beyond <= FLOAT32_MAX]))
    return neighbours(torch.from_numpy(np.concatenate((both, -both))))


def codes_by_ml_dtypes(x: Tensor, format: Format) -> Tensor:
    """uint8 codes by ml_dtypes, for x already within +-max; of integers int8 by NumPy (half to even)."""
    values = x.numpy()
    if isinstance(format, IntFormat):
        return torch.from_numpy(np.rint(values).astype(np.int8).view(np.uint8))
    return torch.from_numpy(values.astype(ML_DTYPES[format.name]).view(np.uint8))


def values_by_ml_dtypes(format: Format) -> Tensor:
    codes = np.arange(2**format.bits, dtype=np.uint8)
    return torch.from_numpy(codes.view(ML_DTYPES[format.name]).astype(np.float32))


def nearest_by_search(x: Tensor, format: Format) -> Tensor:
    """For each x, not NaN, the nearest of all finite values: distances to every one of them, in float64.

    Of two equally near, the even code; in a table the lower level. Differences that decide are exact: near a tie x and the
    two values lie within 2**30 of each other.
    """
    codes = np.flatnonzero(format.values().isfinite().numpy())
    values = format.values().double().numpy()[codes]
    kept = (np.abs(values) <= format.max) & ~((values == 0) & np.signbit(values))
    codes, values = codes[kept], values[kept]
    preferred_first = (
        np.argsort(values)
        if isinstance(format, TableFormat)
        else np.argsort(codes % 2, kind="stable")
    )
    values = values[preferred_first]
    flat = np.clip(x.double().numpy().ravel(), -format.max, format.max)
    chosen = np.concatenate(
        [
            values[np.abs(part[:, None] - values).argmin(axis=1)]
            for part in np.array_split(flat, len(flat) // 4096 + 1)
        ]
    )
    chosen = torch.from_numpy(chosen).float().reshape(x.shape)
    return torch.copysign(chosen, x) if isinstance(format, FloatFormat) else chosen


def round_half_away(x: Tensor, format: Format) -> Tensor:
    """A wrong rule, for controls: ties away from zero, for formats that are symmetric."""
    values = finite_values(format)
    values = values[values >= 0]
    midpoints = (values[:-1] + values[1:]) / 2
    index = np.searchsorted(midpoints, x.abs().double().numpy(), side="right")
    return torch.copysign(torch.from_numpy(values[index]).float(), x)


def nf4_levels() -> list[float]:
    """QLoRA's quantiles: 8 steps of equal mass up to 0.9677 above zero, 7 below, divided by the largest."""
    from statistics import NormalDist

    offset, quantile = 0.9677083, NormalDist().inv_cdf
    above = [quantile(p) for p in np.linspace(offset, 0.5, 9)[:-1]]
    below = [-quantile(p) for p in np.linspace(offset, 0.5, 8)[:-1]]
    return sorted(level / max(above) for level in [*above, 0.0, *below])


def dynamic_levels(signed: bool) -> list[float]:
    """The dynamic map as bitsandbytes builds it: per decade, the means of neighbouring points of linspace(0.1, 1)."""
    levels = [0.0, 1.0]
    for i in range(7):
        points = np.linspace(0.1, 1, 2 ** (i + (not signed)) + 1)
        means = (points[:-1] + points[1:]) / 2 * 10.0 ** (i - 6)
        levels += [*means, *(-means if signed else [])]
    return sorted(levels)


TABLE_LEVELS = {
    NF4.name: nf4_levels,
    DYNAMIC_SIGNED.name: lambda: dynamic_levels(True),
    DYNAMIC_UNSIGNED.name: lambda: dynamic_levels(False),
}


# --- scales, in exact rational arithmetic -------------------------------------------------------------------------------


def to_float32(exact: Fraction) -> float:
    """The float32 nearest to a non-negative rational, ties to even; subnormals kept; infinity beyond the range."""
    if exact == 0:
        return 0.0
    exponent = max(floor_log2(exact), -126)
    unit = Fraction(2) ** (exponent - 23)
    quotient, remainder = divmod(exact, unit)
    steps = int(quotient)
    if 2 * remainder > unit or (2 * remainder == unit and steps % 2):
        steps += 1
    rounded = steps * unit
    return INF if rounded > Fraction(FLOAT32_MAX) else float(rounded)


def floor_log2(exact: Fraction) -> int:
    exponent = exact.numerator.bit_length() - exact.denominator.bit_length()
    return exponent if Fraction(2) ** exponent <= exact else exponent - 1


def ceil_log2(exact: Fraction) -> int:
    exponent = floor_log2(exact)
    return exponent if Fraction(2) ** exponent == exact else exponent + 1


def exact_scale(rule: str, amax: float, format: Format) -> float:
    """The scale of a tile of this amax, by the definition of the rule."""
    if not math.isfinite(amax):
        return NAN
    if amax < 2.0**-126:
        return 1.0
    smallest, ratio = Fraction(smallest_scale(format)), Fraction(amax) / Fraction(format.max)
    if rule == "fp32":
        return to_float32(min(max(ratio, smallest), Fraction(2) ** 126))
    if rule in ("pow2", "e8m0-ceil"):
        exponent = ceil_log2(ratio)
    elif rule == "e8m0-floor":
        exponent = floor_log2(Fraction(amax)) - floor_log2(Fraction(format.max))
    else:
        raise AssertionError(rule)
    return float(min(max(Fraction(2) ** exponent, smallest), Fraction(2) ** 126))


def exact_two_level(
    amax: np.ndarray, format: Format, rule: str = "e4m3-two-level"
) -> tuple[np.ndarray, float]:
    """Scales of tiles (e4m3 values) and of the tensor, every division rounded once to float32."""
    largest = float(amax.max(initial=0.0)) if not np.isnan(amax).any() else NAN
    if not math.isfinite(largest):
        return np.full_like(amax, NAN), NAN
    smallest = Fraction(smallest_scale(format)) * 2**9
    # Corrected scales leave room to grow, and the top of a tile at 0.988 of the largest number.
    top, factor = (256, to_float32(Fraction(1 / 0.988))) if rule == "e4m3-eden" else (448, 1.0)
    whole = 1.0
    if largest >= 2.0**-126:
        whole = to_float32(max(Fraction(largest) / Fraction(top * format.max), smallest))
        if rule == "e4m3-two-level-pow2":
            whole = 2.0 ** math.ceil(math.log2(whole))
    wanted = [to_float32(Fraction(float(a)) / Fraction(format.max)) for a in amax.ravel()]
    relative = [
        to_float32(Fraction(to_float32(Fraction(r) * Fraction(factor))) / Fraction(whole))
        if r >= 2.0**-126
        else 0.0
        for r in wanted
    ]
    relative = np.array([r if r >= 2.0**-126 else 0.0 for r in relative], dtype=np.float32)
    if rule == "e4m3-two-level-ceil":
        values = E4M3_VALUES
        scales = values[np.searchsorted(values, np.minimum(relative, 448))].astype(np.float32)
    else:
        scales = np.minimum(relative, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return scales.reshape(amax.shape), whole


def quantize_by_loop(x: Tensor, cast: Cast) -> tuple[Tensor, Tensor, Tensor | None]:
    """(decoded elements, scales, global scale), one tile after another; nearest rounding."""
    values = x.to(torch.float32).numpy()
    rows, columns = values.shape
    a = max(rows, 1) if cast.tile[0] == -1 else cast.tile[0]
    b = max(columns, 1) if cast.tile[1] == -1 else cast.tile[1]
    tiles = [
        [values[i : i + a, j : j + b] for j in range(0, columns, b)] for i in range(0, rows, a)
    ]
    amax = np.array([[np.abs(tile).max() for tile in row] for row in tiles], dtype=np.float32)
    amax = amax.reshape(-(-rows // a), -(-columns // b))
    if cast.scale.two_level:
        scales, whole = exact_two_level(amax, cast.format, str(cast.scale))
        whole = float(np.float32(whole) * np.float32(cast.headroom))
        with np.errstate(divide="ignore", invalid="ignore"):
            reciprocals = np.where(
                scales == 0, np.float32(0), (np.float32(1) / np.float32(whole)) / scales
            )
    else:
        flat = [exact_scale(str(cast.scale), float(m), cast.format) for m in amax.ravel()]
        scales = np.array(flat, dtype=np.float32).reshape(amax.shape)
        whole = float(np.float32(cast.headroom)) if cast.headroom != 1 else None
        reciprocals = np.float32(1) / (scales * np.float32(cast.headroom))
    quotients = np.zeros((rows, columns), dtype=np.float32)
    for i, row in enumerate(tiles):
        for j, tile in enumerate(row):
            quotients[i * a : i * a + a, j * b : j * b + b] = tile * reciprocals[i, j]
    elements = decoded(torch.from_numpy(quotients), cast.format)
    return elements, torch.from_numpy(scales), None if whole is None else torch.tensor(whole)


def decoded(x: Tensor, format: Format) -> Tensor:
    """The value each x is rounded to, NaN included: kept by formats that have one, zero elsewhere."""
    nearest = nearest_by_search(torch.where(x.isnan(), 0.0, x), format)
    has_nan = bool(format.values().isnan().any())
    return torch.where(x.isnan(), NAN if has_nan else 0.0, nearest)


# --- the quality of a cast --------------------------------------------------------------------------------------------------


def gaussian_sqnr_db(cast: Cast) -> float:
    """dB of a normal tensor [128, 256] over the error of its cast; the expected error of a stochastic one."""
    x = torch.from_numpy(np.random.default_rng(0).standard_normal((128, 256)).astype(np.float32))
    _, scales, whole = quantize_by_loop(x, replace(cast, rounding="nearest"))
    a, b = (size if tile == -1 else tile for size, tile in zip(x.shape, cast.tile, strict=True))
    scale = scales.double().numpy().repeat(a, axis=0)[:128].repeat(b, axis=1)[:, :256]
    scale = scale * (1.0 if whole is None else float(whole))
    values = finite_values(cast.format)
    y = np.clip(x.double().numpy() / scale, values[0], values[-1])
    above = np.searchsorted(values, y).clip(1, len(values) - 1)
    down, up = y - values[above - 1], values[above] - y
    # A stochastic cast goes up with probability down / (down + up): its mean squared error is down * up.
    error = down * up if cast.rounding == "stochastic" else np.minimum(down, up) ** 2
    return float(10 * np.log10((x.double().numpy() ** 2).sum() / (error * scale**2).sum()))
