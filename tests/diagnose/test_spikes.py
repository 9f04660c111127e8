"""Spikes of loss and gradient norm: exact on made curves; rates on real ones are in benchmarks.closed spike_rates."""

from __future__ import annotations

import json
import math
import random

import pytest

from narrowgauge.diagnose import spikes
from narrowgauge.diagnose.spikes import LEAST, LOSS, LOSS_WITH_NORM, NORM, WINDOW, Spikes, measured


def curve(steps: int = 300, seed: int = 0) -> list[tuple[float, float]]:
    """(loss, gradient norm) of a run: a loss that falls fast at first, norms that vary by factors."""
    source = random.Random(seed)
    return [
        (2 + 3 * math.exp(-i / 60) + source.gauss(0, 0.05), math.exp(source.gauss(0, 0.3)))
        for i in range(steps)
    ]


def events(points, watch: Spikes | None = None, first: int = 1):
    watch = watch or Spikes()
    found = [watch.add(step, *point) for step, point in enumerate(points, first)]
    return [spike for spike in found if spike]


def test_a_sound_run_has_no_spike():
    for seed in range(20):
        assert events(curve(seed=seed)) == []


def test_a_loss_that_falls_and_a_new_level_are_no_spikes():
    assert events([(8 - 0.02 * i, 1.0) for i in range(300)]) == []
    risen = [(loss + 0.002 * i, norm) for i, (loss, norm) in enumerate(curve())]
    assert events(risen) == []


def test_a_spike_is_an_event_with_its_first_step_and_its_numbers():
    points = curve()
    for i in range(200, 206):
        points[i] = (points[i][0] + 1.5, points[i][1])
    (spike,) = events(points)
    assert spike.step == 201 and spike.loss == points[200][0]
    assert spike.expected_loss == pytest.approx(2.1, abs=0.1) and spike.loss_scales > LOSS
    assert spike.grad_norm == points[200][1] and abs(spike.grad_norm_scales) < NORM
    assert json.loads(json.dumps(spike.event(), allow_nan=False))["step"] == 201


def test_a_smaller_rise_counts_where_the_norm_jumps_too():
    points = curve()
    line, _ = measured([loss for loss, _ in points[200 - WINDOW : 200]], 0.0)
    scale = (points[200][0] + 1 - line) / measured(
        [loss for loss, _ in points[200 - WINDOW : 200]], points[200][0] + 1
    )[1]
    height = line + scale * (LOSS + LOSS_WITH_NORM) / 2
    assert events([*points[:200], (height, 1.0), *points[201:]]) == []
    assert [spike.step for spike in events([*points[:200], (height, 1000.0), *points[201:]])] == [
        201
    ]
    assert events([*points[:200], (points[200][0], 1000.0), *points[201:]]) == [], (
        "a norm alone may jump"
    )


def test_two_spikes_are_two_events_and_a_dip_is_none():
    points = curve()
    for place in (100, 200):
        points[place] = (9.0, 1.0)
    points[150] = (0.1, 1.0)
    assert [spike.step for spike in events(points)] == [101, 201]


def test_a_level_that_stays_becomes_the_runs_own():
    points = [(loss + 2 * (i >= 150), norm) for i, (loss, norm) in enumerate(curve(400))]
    points[350] = (points[350][0] + 3, 1.0)
    assert [spike.step for spike in events(points)] == [151, 351]


def test_what_is_not_finite_is_a_spike_at_once_and_does_not_enter_the_window():
    for bad in ((math.nan, 1.0), (math.inf, 1.0), (2.0, math.nan), (2.0, math.inf)):
        assert [spike.step for spike in events([bad])] == [1]
        points = curve()
        points[200] = bad
        (spike,) = events(points)
        assert spike.step == 201 and spike.expected_loss is not None
    assert spike.grad_norm_scales is None


def test_nothing_is_judged_before_there_is_enough_to_compare_with():
    calm = [(2.0 + 0.01 * (i % 2), 1.0) for i in range(LEAST - 1)]
    assert events([*calm, (50.0, 1.0)]) == []
    assert [spike.step for spike in events([*calm, (2.0, 1.0), (50.0, 1.0)])] == [LEAST + 1]


def test_losses_that_are_all_alike_do_not_divide_by_zero():
    assert events([(2.0, 1.0)] * 100) == []
    assert [spike.step for spike in events([(2.0, 1.0)] * 100 + [(2.5, 1.0)])] == [101]
    assert events([(0.0, 0.0)] * 100) == []


@pytest.mark.parametrize("cut", [3, 150, 201, 203])
def test_a_resumed_watch_sees_what_one_watch_sees(cut):
    points = curve()
    for i in range(200, 206):
        points[i] = (points[i][0] + 1.5, 40.0)
    first = Spikes()
    before = events(points[:cut], first)
    resumed = Spikes()
    resumed.load_state_dict(json.loads(json.dumps(first.state_dict(), allow_nan=False)))
    assert before + events(points[cut:], resumed, cut + 1) == events(points)


def test_the_state_stays_small():
    watch = Spikes()
    events(curve(500), watch)
    assert len(json.dumps(watch.state_dict())) < 50 * spikes.WINDOW
