"""The mean of a series whose neighbours resemble each other, with a 95 % band, for one look at a finished series.

Neighbouring values are correlated because two runs drift apart slowly, so scatter / sqrt(n) would be far too narrow. Two parts are added:

    blocks   The values are cut into blocks, and the scatter of the block means counts (batch means): blocks longer than the
             correlation are independent. Blocks of 1, 2, 4, ... values while at least 4 remain, and thirds; the widest band is kept.
             Student's t corrects for few blocks.
    drift    Half of how far a straight line through the values moves from end to end. What drifts by so much within the window
             may have drifted as far before it.

How often the band holds the true mean, in per cent of 4,000 series (`tests/diagnose/test_band.py`). AR(1) by its correlation c, of
deviation 1; slope, walk: AR(1) 0.5 plus a straight line, or a random walk, that ends at about N(0, 1 or 2) and began at 0:

    values   c = 0    0.5    0.8    0.9   0.95    slope 1   slope 2    walk 1   walk 2
        33    99.8   99.1   97.4   93.9   88.1       96.9      97.5      95.4     94.2
        65    99.8   99.6   98.8   97.2   93.2       98.0      97.9      95.5     93.5
       257    99.8   99.8   99.6   99.2   98.8       98.6      98.6      94.8     93.7

It is too wide rather than too narrow, except where a correlation lasts as long as the series.

Looking again and again as a run goes on is another matter: over twenty looks a band of 95 % misses the truth once or more in far more
than 5 % of runs. `diagnose/guard/evidence.py` is made for that. Nor does the band cover another seed, another order of the data, or
longer training.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MINIMUM_BLOCKS = 4
MINIMUM_VALUES = 16  # blocks of 1, 2 and 4; below, no band is given
NORMAL_QUANTILE = statistics.NormalDist().inv_cdf(0.975)  # two-sided 95 %


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The mean of `count` values and half the width of its 95 % band (None if there are too few values)."""

    mean: float
    half_width: float | None
    count: int


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and 95 % band of a series that may be correlated and drift; the method is at the top of this file."""
    half_width = None
    if len(values) >= MINIMUM_VALUES:
        half_width = max(_block_widths(values)) + _drift(values)
    return Estimate(mean=statistics.fmean(values), half_width=half_width, count=len(values))


def _block_widths(values: Sequence[float]) -> Iterator[float]:
    lengths = [1 << power for power in range(len(values).bit_length()) if len(values) >> power >= MINIMUM_BLOCKS]
    for length in (*lengths, len(values) // 3):
        first = len(values) % length  # an incomplete block is left out at the older end
        means = [statistics.fmean(values[i : i + length]) for i in range(first, len(values), length)]
        yield student_quantile(len(means) - 1) * math.sqrt(statistics.variance(means) / len(means))


def _drift(values: Sequence[float]) -> float:
    slope, _ = statistics.linear_regression(range(len(values)), values)
    return abs(slope) * len(values) / 2


def student_quantile(freedom: int) -> float:
    """Two-sided 95 % quantile of Student's t: exact at 2, else Abramowitz and Stegun 26.7.5, 0.7 % too small at 3, less above."""
    if freedom == 2:
        return 0.95 * math.sqrt(2 / (1 - 0.95**2))
    z, n = NORMAL_QUANTILE, freedom
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2) + third


def window_radius(total: int) -> int:
    """At most an eighth of the run on either side, 16 to 256: a power of two, so that the longest blocks fill the window."""
    return min(max(1 << int(math.log2(max(total / 8, 1))), MINIMUM_VALUES), 256)


def moving(steps: Sequence[int], values: Sequence[float], radius: int, points: int = 300) -> list[tuple[int, Estimate]]:
    """The estimate in a moving window of `radius` values on either side, shorter at the ends, at up to `points` places."""
    return [(steps[i], estimate(values[max(i - radius, 0) : i + radius + 1])) for i in spread(len(values), points)]


def spread(total: int, points: int) -> list[int]:
    """At most `points` of 0 ... total - 1, evenly spaced, both ends included."""
    if total <= points:
        return list(range(total))
    return [round(i * (total - 1) / (points - 1)) for i in range(points)]
