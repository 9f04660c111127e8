"""Mean of an autocorrelated series with a 95 % band, valid for one look at a finished series.

Neighbouring values are correlated because two runs drift apart slowly, so s / sqrt(n) would be far
too narrow. The half width of the band is the sum of two parts:

    blocks   Batch means: the values are cut into blocks, and the standard deviation of the block
             means counts. Blocks longer than the correlation are independent. Block lengths are 1,
             2, 4, ... while at least 4 blocks remain, and a third of the series; the widest band is
             used. Student's t corrects for few blocks.
    drift    Half the distance that a fitted straight line moves from end to end. A series that
             drifts by that much within the window may have drifted as far before it.

Coverage of the true mean in per cent of 4,000 series (`tests/diagnose/test_band.py`). Columns are
AR(1) with correlation c and standard deviation 1; "slope" and "walk" are AR(1) with c = 0.5 plus a
straight line or a random walk, from 0 to about N(0, 1 or 2) at the end:

    values   c = 0    0.5    0.8    0.9   0.95    slope 1   slope 2    walk 1   walk 2
        33    99.8   99.1   97.4   93.9   88.1       96.9      97.5      95.4     94.2
        65    99.8   99.6   98.8   97.2   93.2       98.0      97.9      95.5     93.5
       257    99.8   99.8   99.6   99.2   98.8       98.6      98.6      94.8     93.7

The band errs on the wide side, except where a correlation lasts as long as the series.

Repeated looks at a growing series need another method. Over twenty looks a 95 % band misses the
truth at least once in far more than 5 % of runs. `lab/guard/evidence.py` handles repeated
looks. The band does not cover another seed, another order of the data, or longer training.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

MINIMUM_BLOCKS = 4
MINIMUM_VALUES = 16  # blocks of 1, 2 and 4; no band for fewer values
NORMAL_QUANTILE = statistics.NormalDist().inv_cdf(0.975)  # two-sided 95 %


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """Mean of `count` values, and half the width of its 95 % band (None for too few values)."""

    mean: float
    half_width: float | None
    count: int


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and 95 % band of a correlated, drifting series.

    The module docstring describes the method.
    """
    half_width = None
    if len(values) >= MINIMUM_VALUES:
        # Tried and lost: full-bandwidth HAC covered 64 to 70 % of the hardest series (33 values of
        # AR(1) with c = 0.95, a random walk) and blocks alone 67 to 73 %; this sum 88 to 94 %.
        half_width = max(_block_widths(values)) + _drift(values)
    return Estimate(mean=statistics.fmean(values), half_width=half_width, count=len(values))


def _block_widths(values: Sequence[float]) -> Iterator[float]:
    lengths = [
        1 << power
        for power in range(len(values).bit_length())
        if len(values) >> power >= MINIMUM_BLOCKS
    ]
    for length in (*lengths, len(values) // 3):
        first = len(values) % length  # an incomplete block is dropped at the older end
        means = [
            statistics.fmean(values[i : i + length]) for i in range(first, len(values), length)
        ]
        yield student_quantile(len(means) - 1) * math.sqrt(statistics.variance(means) / len(means))


def _drift(values: Sequence[float]) -> float:
    slope, _ = statistics.linear_regression(range(len(values)), values)
    return abs(slope) * len(values) / 2


def student_quantile(freedom: int) -> float:
    """Two-sided 95 % quantile of Student's t without scipy.

    Exact for 2 degrees of freedom; else Abramowitz and Stegun 26.7.5, which is 0.7 % too small for
    3 and better above.
    """
    if freedom == 2:
        return 0.95 * math.sqrt(2 / (1 - 0.95**2))
    z, n = NORMAL_QUANTILE, freedom
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2) + third


def window_radius(total: int) -> int:
    """Radius of a moving window: at most an eighth of the run, 16 to 256.

    A power of two, so that the longest blocks fill the window.
    """
    return min(max(1 << int(math.log2(max(total / 8, 1))), MINIMUM_VALUES), 256)


def moving(
    steps: Sequence[int], values: Sequence[float], radius: int, points: int = 300
) -> list[tuple[int, Estimate]]:
    """Estimates in a moving window, at up to `points` places.

    radius  values on either side; fewer at the ends of the series
    """
    return [
        (steps[i], estimate(values[max(i - radius, 0) : i + radius + 1]))
        for i in spread(len(values), points)
    ]


def spread(total: int, points: int) -> list[int]:
    """At most `points` of 0 ... total - 1, evenly spaced, including both ends."""
    if total <= points:
        return list(range(total))
    return [round(i * (total - 1) / (points - 1)) for i in range(points)]
