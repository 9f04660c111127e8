"""The band of the mean of a correlated series: exact where the answer is known, statistical for its coverage."""

from __future__ import annotations

import math
import random
import statistics

import pytest

from narrowgauge.diagnose.band import estimate, student_quantile, window_radius
from tests.selection import quick


def noise(seed: int, count: int, correlation: float, size: float = 1.0) -> list[float]:
    """Gaussian values of which each resembles the one before by `correlation`."""
    source = random.Random(seed)
    value, values = source.gauss(0, size), []
    for _ in range(count):
        values.append(value)
        value = correlation * value + math.sqrt(1 - correlation**2) * source.gauss(0, size)
    return values


def test_student_quantile_agrees_with_tables():
    """Abramowitz and Stegun, table 26.10."""
    table = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 7: 2.365, 15: 2.131, 31: 2.040, 120: 1.980}
    for freedom, quantile in table.items():
        assert student_quantile(freedom) == pytest.approx(quantile, rel=0.008)


SERIES = {  # the table of the module: correlation, final deviation of a slope and of a walk -> per cent of bands with 65 values
    (0.0, 0, 0): 99.8, (0.5, 0, 0): 99.6, (0.8, 0, 0): 98.8, (0.9, 0, 0): 97.2, (0.95, 0, 0): 93.2,
    (0.5, 1, 0): 98.0, (0.5, 2, 0): 97.9, (0.5, 0, 1): 95.5, (0.5, 0, 2): 93.5,
}  # fmt: skip


@pytest.mark.parametrize(
    ("correlation", "slope", "walk"), quick([(0.8, 0, 0), (0.5, 2, 0), (0.5, 0, 2)], SERIES)
)
def test_the_band_covers_the_true_mean_as_often_as_the_module_says(correlation, slope, walk):
    """400 series of 65 values, fixed seeds; four standard errors below the promise are a false alarm in 30,000."""
    promised, covered = SERIES[correlation, slope, walk] / 100, 0
    for seed in range(400):
        source, values, place = random.Random(-1 - seed), noise(seed, 65, correlation), 0.0
        ending = source.gauss(0, slope)
        for i in range(65):
            place += source.gauss(0, walk / math.sqrt(65))
            values[i] += ending * i / 64 + place
        found = estimate(values)
        covered += abs(found.mean) <= found.half_width
    assert covered / 400 >= promised - 4 * math.sqrt(promised * (1 - promised) / 400)


def test_a_series_that_drifts_has_zero_in_its_band():
    """What moved by so much within the window may have moved as far before."""
    found = estimate([0.001 * i for i in range(65)])
    assert found.half_width >= found.mean > 0


def test_the_band_is_wider_than_the_naive_one_where_neighbours_resemble_each_other():
    values = noise(3, 65, 0.9)
    naive = 2 * math.sqrt(statistics.variance(values) / 65)
    assert estimate(values).half_width > 2 * naive


def test_too_few_values_have_no_band():
    assert estimate([1.0] * 15).half_width is None
    assert estimate([1.0] * 16).half_width == 0.0


def test_the_longest_blocks_fill_the_window():
    assert [window_radius(count) for count in (1, 127, 255, 256, 300, 1000, 100_000)] == [
        16,
        16,
        16,
        32,
        32,
        64,
        256,
    ]
