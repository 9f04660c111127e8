"""The guard's rates over simulated runs (statistical, fixed seeds): a few cases of tests/lab/guard/false_alarms.py, 400 runs each.

Limits are 4 standard errors of 400 runs away from what was promised, so a sound rule fails in one of 30,000 tests.
"""

from __future__ import annotations

import math

import pytest

from tests.lab.guard.false_alarms import TINY, Case, cases, measured

RUNS = 400

pytestmark = pytest.mark.slow


def above(share: float) -> float:
    return share + 4 * math.sqrt(share * (1 - share) / RUNS)


def below(share: float) -> float:
    return share - 4 * math.sqrt(share * (1 - share) / RUNS)


@pytest.mark.parametrize("within", [0.0, 0.8, 0.95])
@pytest.mark.parametrize("drift", [False, True])
def test_healthy_runs_are_called_worse_in_one_of_twenty_at_most(within, drift):
    """Twenty looks each, and not even a margin: the scale of the noise comes from controls and from the checks themselves."""
    case = Case(name=f"steps {within} {drift}", deviation=TINY, within=within, drift=drift)
    assert measured(case, RUNS)["worse"] <= above(0.05)


@pytest.mark.parametrize("deviation", [0.1, 0.5, 1.0])
def test_a_gap_at_the_margin_is_neither_worse_nor_within(deviation):
    """The edge of both hypotheses, with controls that are as noisy as the run."""
    found = measured(Case(name=f"edge {deviation}", deviation=deviation, gap=1.0), RUNS)
    assert found["worse"] <= above(0.05) and found["within"] <= above(0.05)


@pytest.mark.parametrize(("gap", "promised"), [(1, 0.45), (2, 0.98)])
def test_a_gap_of_some_deviations_is_found(gap, promised):
    """Without margin, over twenty checks."""
    found = measured(Case(name=f"power {gap}", deviation=TINY, gap=gap * TINY), RUNS)
    assert found["worse"] >= below(promised)


def test_a_hundredth_of_a_nat_is_found_by_the_third_check():
    """Where the margin is 0.003 or 0.005 nats, and checks scatter by 0.001."""
    for margin, promised in ((0.003, 0.99), (0.005, 0.97)):
        case = Case(name=f"nats {margin}", deviation=0.001 / margin, gap=0.01 / margin, control=0.1)
        assert measured(case, RUNS)["worse_by_3"] >= below(promised)


def test_sound_recipes_are_certified_by_the_eighth_check():
    """Both numbers have to lie within; at half the margin that takes longer than the eighth check in four of ten runs."""
    for gap, promised in ((0.0, 0.97), (0.5, 0.5)):
        case = Case(name=f"certified {gap}", deviation=0.33, gap=gap, control=0.1)
        found = measured(case, RUNS)
        assert found["within_by_8"] >= promised and found["worse"] <= above(0.01)


def test_every_case_of_the_benchmark_runs():
    assert len({case.name for case in cases()}) == len(cases())
    for case in cases():
        found = measured(case, 3)
        assert all(0 <= found[key] <= 1 for key in ("worse", "worse_by_3", "within", "within_by_8"))
