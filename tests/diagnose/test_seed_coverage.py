"""What verdicts over seeds promise, in simulated studies (statistical: 10,000 each, fixed seeds, 4 standard errors: 1 in 16,000)."""

from __future__ import annotations

import math

import pytest

from tests.diagnose.seed_verdicts import simulated

pytestmark = [pytest.mark.slow, pytest.mark.benchmark]
STUDIES = 10_000


def error(share: float) -> float:
    return 4 * math.sqrt(share * (1 - share) / STUDIES)


@pytest.mark.parametrize("n", [2, 3, 5, 10, 20])
def test_normal_differences(n):
    """Coverage of both intervals, wrong verdicts at the margin, and power as predicted."""
    row = simulated("normal", n, STUDIES)
    for key in ("interval_holds_the_mean", "interval_holds_the_next"):
        assert row[key] == pytest.approx(0.95, abs=error(0.05))
    for margin in ("margin 1", "margin 2"):
        assert row[f"{margin}: equivalent, wrongly"] < 0.05 + error(0.05)
        assert row[f"{margin}: worse, wrongly"] == pytest.approx(0.05, abs=error(0.05))
        predicted = row[f"{margin}: predicted"]
        assert row[f"{margin}: equivalent, rightly"] == pytest.approx(
            predicted, abs=error(predicted) + 0.002
        )
        assert row[f"{margin}: worse, rightly"] >= row[f"{margin}: equivalent, rightly"] - error(
            0.5
        )


@pytest.mark.parametrize("n", [3, 5, 10])
def test_heavy_tails_err_on_the_safe_side(n):
    row = simulated("heavy tails", n, STUDIES)
    assert row["interval_holds_the_mean"] > 0.95 - error(0.05)
    for margin in ("margin 1", "margin 2"):
        assert (
            row[f"{margin}: equivalent, wrongly"]
            < 0.05 + error(0.05)
            > row[f"{margin}: worse, wrongly"]
        )


@pytest.mark.parametrize("n", [3, 5, 10])
def test_strongly_skewed_differences_break_the_promise_as_the_docs_say(n):
    """An exponential: up to 17 % instead of 5."""
    row = simulated("skewed", n, STUDIES)
    assert (
        0.10 < row["margin 1: equivalent, wrongly"] < 0.18 and row["interval_holds_the_mean"] < 0.92
    )
