"""Learning-rate schedules at their corners (exact), and a resumed run beside a straight one (exact)."""

from __future__ import annotations

import math
import shutil
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from narrowgauge.train import loop
from narrowgauge.train.config.settings import InvalidSettings, TrainConfig
from narrowgauge.train.schedule import decay_steps, learning_rate
from tests.train import tiny

COSINE, LINEAR, CONSTANT, STABLE = "cosine", "linear", "constant", "warmup-stable-decay"
SCHEDULES = (COSINE, LINEAR, CONSTANT, STABLE)


def rate(step, schedule=COSINE, **changes):
    low = 0.0 if schedule == CONSTANT else 1e-4
    settings = {
        "steps": 100,
        "warmup_steps": 10,
        "learning_rate": 1e-3,
        "min_learning_rate": low,
        "rate_schedule": schedule,
    } | changes
    return learning_rate(TrainConfig(**settings), step)


def test_corners_of_the_schedule():
    assert rate(1) == pytest.approx(1e-4, rel=1e-12)  # one tenth of the peak
    assert rate(10) == 1e-3
    assert rate(55, steps=99) == pytest.approx((1e-3 + 1e-4) / 2, rel=1e-12)  # half of the way down
    assert rate(101) == pytest.approx(1e-4, rel=1e-12)  # after the last step


def test_schedule_without_warm_up_and_with_nothing_else():
    assert rate(1, warmup_steps=0) == pytest.approx(
        1e-4 + 9e-4 * 0.5 * (1 + math.cos(math.pi / 101)), rel=1e-12
    )
    assert rate(100, warmup_steps=100) == 1e-3
    assert rate(50, warmup_steps=200) == pytest.approx(2.5e-4, rel=1e-12)
    assert rate(1, steps=1, warmup_steps=0) == pytest.approx((1e-3 + 1e-4) / 2, rel=1e-12)
    assert rate(1, steps=1, warmup_steps=1) == 1e-3


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("warmup_steps", [0, 10, 99, 100])
def test_the_last_update_changes_something(warmup_steps, schedule):
    assert rate(100, schedule, warmup_steps=warmup_steps, min_learning_rate=0.0) > 0


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_rate_rises_then_falls(schedule):
    rates = [rate(step, schedule) for step in range(1, 101)]
    assert rates[:10] == sorted(rates[:10]) and rates[9:] == sorted(rates[9:], reverse=True)
    assert rates[9] == max(rates) == 1e-3


def test_linear_falls_by_the_same_amount_at_each_step():
    """Bounded: 91 differences of float64 numbers near 1e-3."""
    rates = [rate(step, LINEAR) for step in range(10, 102)]
    falls = [before - after for before, after in pairwise(rates)]
    assert falls == pytest.approx([9e-4 / 91] * 91, rel=1e-9)
    assert rates[-1] == pytest.approx(1e-4, rel=1e-12)


def test_constant_stays_and_does_not_depend_on_the_length():
    assert {rate(step, CONSTANT, steps=steps) for steps in (50, 1000) for step in (10, 50)} == {
        1e-3
    }


def test_warmup_stable_decay_falls_in_its_last_tenth_alone():
    assert [rate(step, STABLE) for step in (10, 50, 90)] == [1e-3] * 3
    assert rate(91, STABLE) == pytest.approx(1e-4 + 9e-4 * 10 / 11, rel=1e-12)
    assert rate(100, STABLE) == pytest.approx(1e-4 + 9e-4 / 11, rel=1e-12)
    assert rate(81, STABLE, decay_steps=20) == pytest.approx(1e-4 + 9e-4 * 20 / 21, rel=1e-12)
    # Before its decay a run does not know its length, so it can be extended without a jump.
    assert rate(80, STABLE, steps=100) == rate(80, STABLE, steps=400) == 1e-3


@pytest.mark.parametrize(
    ("steps", "warmup_steps", "found"),
    [(100, 10, 10), (5, 2, 1), (1, 0, 1), (3, 3, 1), (95, 0, 10)],
)
def test_the_decay_is_a_tenth_and_begins_after_the_warm_up(steps, warmup_steps, found):
    config = TrainConfig(steps=steps, warmup_steps=warmup_steps, rate_schedule=STABLE)
    assert decay_steps(config) == found


@pytest.mark.parametrize(
    ("changes", "setting"),
    [
        ({"rate_schedule": "triangle"}, "rate_schedule"),
        ({"rate_schedule": CONSTANT, "min_learning_rate": 1e-5}, "min_learning_rate"),
        ({"decay_steps": 10}, "decay_steps"),
        ({"rate_schedule": STABLE, "steps": 100, "decay_steps": 90}, "decay_steps"),
    ],
)
def test_what_has_no_effect_or_does_not_fit_is_refused(changes, setting):
    with pytest.raises(InvalidSettings) as caught:
        TrainConfig(**changes)
    assert caught.value.problems[0][0][0] == setting


@pytest.mark.parametrize("schedule", [LINEAR, STABLE])
def test_a_resumed_run_is_equal_to_a_straight_one(make, schedule):
    """Exact: weights, optimizer and logged rates, with a stop inside of the fall."""
    changes = {"rate_schedule": schedule, "steps": 5, "warmup_steps": 1}
    changes |= {"decay_steps": 3} if schedule == STABLE else {}
    straight = make("straight", **changes)
    assert loop.run(straight) == 0
    stopped = make("stopped", **changes, checkpoint_every=3)
    assert loop.run(stopped) == 0
    folder = Path(stopped.output)
    for later in ("checkpoints/step-00000005", "final"):
        shutil.rmtree(folder / later)
    assert loop.run(replace(stopped, resume=True)) == 0
    assert tiny.digests(folder) == tiny.digests(Path(straight.output))
    expected = [learning_rate(straight, step) for step in range(1, 6)]
    rates = {event["step"]: event["lr"] for event in tiny.events(folder, "step")}
    assert [rates[step] for step in range(1, 6)] == expected
