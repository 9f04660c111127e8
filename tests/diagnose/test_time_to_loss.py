"""The time to the same loss: two runs with known curves, and what cannot be told."""

from __future__ import annotations

import math

import pytest

from narrowgauge.diagnose.time_to_loss import reached_s, time_to_loss

LINE = [(10.0, 4.0), (20.0, 3.0), (30.0, 2.0)]


def events(curve, seconds="elapsed_s"):
    return [
        {"event": "eval", "step": step, "loss": loss, seconds: at_s}
        for step, (at_s, loss) in enumerate(curve, 1)
    ] + [{"event": "step", "step": 1, "loss": 0.0, "elapsed_s": 1.0}]


@pytest.mark.parametrize(
    "loss, expected", [(4.0, 10.0), (9.0, 10.0), (3.5, 15.0), (2.0, 30.0), (1.9, None)]
)
def test_a_line_joins_evaluations(loss, expected):
    assert reached_s(LINE, loss) == expected


def test_a_loss_that_rises_again_is_not_reached_for_good():
    curve = [(10.0, 4.0), (20.0, 2.5), (30.0, 3.5), (40.0, 2.5)]
    assert reached_s(curve, 3.0) == 35.0


def test_no_line_starts_at_a_loss_that_is_not_finite():
    assert reached_s([(10.0, math.inf), (20.0, 2.0)], 3.0) == 20.0
    assert reached_s([(10.0, 4.0), (20.0, math.nan)], 3.0) is None


@pytest.mark.parametrize("slower", [1.0, 1.5, 4.0])
def test_a_run_with_the_same_losses_gains_what_its_seconds_gain(slower):
    reference = [(at_s * slower, loss) for at_s, loss in LINE]
    found = time_to_loss(events(LINE), events(reference))
    assert found.loss == 2.0 and found.run_s == 30.0
    assert found.gain == pytest.approx(slower)


def test_a_faster_run_that_learns_less_pays_for_it():
    """It ends at 3.0, where its reference was after two thirds of its time."""
    worse = [(at_s / 2, loss + 1) for at_s, loss in LINE]
    found = time_to_loss(events(worse), events(LINE))
    assert (found.loss, found.run_s, found.reference_s) == (3.0, 15.0, 20.0)
    words = "15 s against 20 s to a validation loss of 3.0000; the last ones are 3.0000 and 2.0000"
    assert found.words() == words


@pytest.mark.parametrize(
    "run, reference",
    [
        ([], events(LINE)),
        (events(LINE), []),
        (events(LINE), events(LINE[:2])),  # of a few steps
        (events(LINE, "s"), events(LINE)),  # of a former run, which records no seconds
        ([*events(LINE)[:-1], {"event": "step", "step": 4}], events(LINE)),  # a branch
        (events([*LINE, (40.0, math.nan)]), events(LINE)),
        (events(LINE), events([*LINE, (40.0, math.inf)])),
    ],
)
def test_what_cannot_be_told(run, reference):
    assert time_to_loss(run, reference) is None
