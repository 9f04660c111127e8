"""Whether curves are the same within control (exact: the numbers are made)."""

from __future__ import annotations

import math
import random

import pytest

from narrowgauge.diagnose.same_curve import DIFFERS, SAME, SMALL, UNKNOWN, control_of, judge

BASE = [3.0 + 0.001 * step for step in range(40)]


def shifted(gap, start=0):
    return [loss + (gap if step >= start else 0.0) for step, loss in enumerate(BASE)]


def noisy(seed, size):
    draw = random.Random(seed)
    return [loss + draw.gauss(0, size) for loss in BASE]


CONTROL = [(shifted(0.0005, 20), BASE)]


@pytest.mark.parametrize(
    ("gap", "name", "words"),
    [
        (0.0009, SAME, "the same within control (+0.00090 nats over the last 20 steps; control 0.00050): the cause is not the"),
        (0.004, SMALL, "more than control, but by less than the margin of 0.0076 nats"),
        (0.02, DIFFERS, "The curve is higher (+0.020"),
        (-0.02, DIFFERS, "The curve is lower (−0.020"),
    ],
)  # fmt: skip
def test_the_difference_is_held_against_control_and_margin(gap, name, words):
    found = judge(shifted(gap), BASE, CONTROL)
    assert found.name == name and words in found.sentence()
    assert found.difference == pytest.approx(gap) and found.event()["verdict"] == name


def test_without_control_or_with_few_steps_nothing_is_said():
    alone = judge(shifted(0.02), BASE)
    assert alone.name == UNKNOWN and alone.control is None
    assert alone.numbers in alone.sentence()
    short = judge(shifted(0.02)[:12], BASE[:12], CONTROL)
    assert short.name == UNKNOWN and "6 steps" in short.sentence()
    assert judge([], BASE, CONTROL).name == UNKNOWN


def test_the_same_bits_are_the_same_without_a_control():
    assert judge(BASE, BASE).name == SAME


def test_a_loss_that_is_lost():
    lost = [*BASE[:10], math.nan]
    assert (
        judge(lost, BASE, CONTROL).name == DIFFERS
        and "run alone stops" in judge(lost, BASE).sentence()
    )
    assert judge(BASE, lost).name == DIFFERS and "reference alone" in judge(BASE, lost).sentence()
    both = judge(lost, lost)
    assert both.name == SAME and not math.isfinite(both.loss)
    assert "not the optimizer" in both.sentence("the optimizer")
    assert control_of(lost, BASE) is None


def test_rounding_alone_is_the_same_in_nine_of_ten():
    """Statistical: two controls' means over 20 steps against the largest of four blocks of five, times two; seeds fixed."""
    same = sum(
        judge(noisy(seed, 1e-3), BASE, [(noisy(seed + 1000, 1e-3), BASE)]).name == SAME
        for seed in range(200)
    )
    assert same >= 190
