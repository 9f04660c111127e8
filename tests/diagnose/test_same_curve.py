"""Whether curves are the same within control (exact: the numbers are made)."""

from __future__ import annotations

import math
import random

import pytest

from narrowgauge.diagnose.same_curve import control_of, judge
from narrowgauge.diagnose.verdict import (
    BETTER,
    DIVERGED,
    EQUIVALENT,
    REFERENCE_DIVERGED,
    UNKNOWN,
    WITHIN_CONTROL,
    WITHIN_MARGIN,
    WORSE,
)

BASE = [3.0 + 0.001 * step for step in range(40)]


def shifted(gap, start=0):
    return [loss + (gap if step >= start else 0.0) for step, loss in enumerate(BASE)]


def noisy(seed, size):
    draw = random.Random(seed)
    return [loss + draw.gauss(0, size) for loss in BASE]


def case_of(found):
    return found.outcome, found.detail


CONTROL = [(shifted(0.0005, 20), BASE)]


@pytest.mark.parametrize(
    ("gap", "case", "word", "words"),
    [
        (0.0009, (EQUIVALENT, WITHIN_CONTROL), "same", "the same within control (+0.00090 nats over the last 20 steps; control 0.00050)"),
        (0.004, (EQUIVALENT, WITHIN_MARGIN), "small", "more than control, but by less than the margin of 0.0076 nats"),
        (0.02, (WORSE, ""), "differs", "The curve is higher (+0.020"),
        (-0.02, (BETTER, ""), "differs", "The curve is lower (−0.020"),
    ],
)  # fmt: skip
def test_the_difference_is_held_against_control_and_margin(gap, case, word, words):
    found = judge(shifted(gap), BASE, CONTROL)
    assert (found.outcome, found.detail) == case and words in found.sentence()
    assert found.difference == pytest.approx(gap) and found.event()["verdict"] == word


def test_without_control_or_with_few_steps_nothing_is_said():
    alone = judge(shifted(0.02), BASE)
    assert alone.outcome == UNKNOWN and alone.control is None
    assert alone.numbers in alone.sentence()
    short = judge(shifted(0.02)[:12], BASE[:12], CONTROL)
    assert short.outcome == UNKNOWN and "6 steps" in short.sentence()
    assert judge([], BASE, CONTROL).outcome == UNKNOWN


def test_the_same_bits_are_the_same_without_a_control():
    assert judge(BASE, BASE).is_within_control


def test_a_loss_that_is_lost():
    lost = [*BASE[:10], math.nan]
    assert (
        case_of(judge(lost, BASE, CONTROL)) == (WORSE, DIVERGED)
        and "run alone stops" in judge(lost, BASE).sentence()
    )
    assert (
        case_of(judge(BASE, lost)) == (BETTER, REFERENCE_DIVERGED)
        and "reference alone" in judge(BASE, lost).sentence()
    )
    both = judge(lost, lost)
    assert both.is_within_control and not math.isfinite(both.loss)
    assert "not the optimizer" in both.sentence("the optimizer")
    assert control_of(lost, BASE) is None


def test_rounding_alone_is_the_same_in_nine_of_ten():
    """Statistical: two controls' means over 20 steps against the largest of four blocks of five, times two; seeds fixed."""
    same = sum(
        judge(noisy(seed, 1e-3), BASE, [(noisy(seed + 1000, 1e-3), BASE)]).is_within_control
        for seed in range(200)
    )
    assert same >= 190
