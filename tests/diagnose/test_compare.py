"""The comparison of two loss curves (exact). The band of the mean is in test_band.py."""

from __future__ import annotations

import math
import random
from typing import Any

import pytest

from narrowgauge.diagnose import compare
from narrowgauge.diagnose.compare import smooth
from narrowgauge.diagnose.metrics_table import loss_unit_of
from tests.diagnose.test_band import noise


def steps(losses: list[float], **keys: Any) -> list[dict[str, Any]]:
    return [
        {"event": "step", "step": i, "loss": loss, "tokens": 64, **keys}
        for i, loss in enumerate(losses, 1)
    ]


def evaluation(step: int, loss: float) -> dict[str, Any]:
    return {"event": "eval", "step": step, "loss": loss}


def compared(gap: float, *, count: int = 300, size: float = 0.01) -> compare.Comparison:
    shared = [2 + random.Random(i).gauss(0, 0.3) for i in range(count)]
    own = noise(7, count, 0.3, size)
    run = [loss + gap + extra for loss, extra in zip(shared, own, strict=True)]
    return compare.compare(steps(run), steps(shared), "narrow", "wide")


# --- smoothing ---


def test_smoothing_keeps_a_straight_line_up_to_its_ends():
    line = [3.0 - 0.25 * i for i in range(40)]
    assert [value for _, value in smooth(list(enumerate(line)), 5)] == pytest.approx(
        line, abs=1e-12
    )


def test_smoothing_leaves_out_what_is_not_finite_and_breaks_there():
    values = [1.0, 1.0, math.nan, 1.0, math.inf, 1.0]
    smoothed = [value for _, value in smooth(list(enumerate(values)), 2)]
    assert [math.isnan(value) for value in smoothed] == [False, False, True, False, True, False]
    assert all(value == pytest.approx(1.0) for value in smoothed if not math.isnan(value))


def test_smoothing_of_a_long_run_keeps_both_ends_and_few_points():
    places = [place for place, _ in smooth(list(enumerate([1.0] * 10_000)), 100)]
    assert len(places) <= 600 and places[0] == 0 and places[-1] == 9_999
    assert smooth([], 3) == [] and smooth([(0, 2.0)], 3) == [(0, 2.0)]


# --- findings and words ---


def test_a_clear_gap_is_found_and_said_with_its_sign():
    above, below = compared(+0.05), compared(-0.05)
    assert (above.case, below.case) == (("unknown", "higher"), ("unknown", "lower"))
    for found, sign in ((above, "+"), (below, "−")):
        said = found.verdict.sentence
        assert f" {sign}0.0" in said.partition("(")[0] and "95" in said
    assert above.tail.count == 65 and abs(above.tail.mean - 0.05) < above.tail.half_width


@pytest.mark.parametrize(
    ("run", "unit"),
    [
        ({"loss_unit": "nats/word", "task": "tagging"}, "nats per word"),
        ({"task": "regression"}, "squared error"),  # of a run before the key was recorded
        ({}, "nats per token"),
    ],
    ids=str,
)
def test_losses_are_told_in_the_unit_of_the_task(run, unit):
    given = [*steps([1.0, 2.0]), evaluation(2, 1.0)], [*steps([1.5, 2.5]), evaluation(2, 1.5)]
    found = compare.compare(*given, "narrow", "wide", loss_unit=loss_unit_of(run))
    said = found.verdict.sentence
    assert f" {unit} on average" in said and f"0 {unit.partition(' per ')[0]}, " in said


def test_a_gap_within_the_noise_is_not_called_a_difference():
    found = compared(0.0)
    assert found.case == ("unknown", "noise")
    assert (
        "zero lies within the band" in found.verdict.sentence
        and "nor that there is none" in found.verdict.sentence
    )


def test_no_verdict_claims_more_than_one_pair_at_one_look_can_show():
    for found in (compared(0.0), compared(0.05), compared(-0.05), compared(0.1, count=3)):
        claims = (
            "higher",
            "lower",
            "above",
            "below",
            "better",
            "worse",
            "equal",
            "same",
            "significant",
            "cannot",
        )
        own = found._about_training()
        assert not any(word in own for word in claims)
        banded = found.tail.half_width is not None
        said = found.verdict.sentence
        assert ("look" in said) == banded == ("95" in said)


def test_equal_losses_are_called_identical_and_nothing_more():
    found = compare.compare(steps([2.0] * 40), steps([2.0] * 40), "narrow", "wide")
    assert found.case == ("equivalent", "identical")
    assert "identical at 40 common steps" in found.verdict.sentence


def test_the_interval_of_a_verdict_is_around_its_estimate():
    found = compared(0.1)
    low, high = found.verdict.interval
    assert low < found.verdict.estimate < high
    assert high - low == pytest.approx(2 * found.tail.half_width)


def test_every_verdict_says_that_it_is_one_pair():
    for found in (compared(0.0), compared(0.1), compared(0.1, count=3)):
        said = found.verdict.sentence
        assert "seed" in said and "narrowgauge study" in said


def test_few_steps_give_no_verdict_on_the_difference():
    found = compared(0.5, count=3)
    assert found.case == ("unknown", "") and found.tail.half_width is None
    assert "95" not in found.verdict.sentence and "+0.5" in found.verdict.sentence


def test_nothing_in_common_is_said():
    found = compare.compare(steps([2.0]), [], "narrow", "wide")
    assert found.case == ("unknown", "") and found.curve == [] and found.tail is None
    assert (
        found.verdict.sentence
        == "narrow and wide have no step with a finite loss in common, so nothing can be compared."
    )


def test_different_batches_are_not_compared_as_pairs():
    other = steps([2.0] * 50)
    other[10]["tokens"] = 63
    found = compare.compare(steps([2.5] * 50), other, "narrow", "wide")
    assert (
        found.case == ("unknown", "unpaired")
        and "At 1 of 50 common steps" in found.verdict.sentence
    )
    assert "higher" not in found.verdict.sentence


def test_steps_behind_a_batch_that_one_run_left_out_are_no_pairs():
    """The batches are named, with their run; where both left out the same, nothing differs."""
    events = steps([2.5] * 50), steps([2.0] * 50)
    found = compare.compare(*events, "narrow", "wide", ((40,), ()))
    assert found.case == ("unknown", "unpaired") and found.unpaired == 11
    assert (
        "Of the data narrow left out batch 40 and wide left out none (on_spike = skip): at 11 of 50 common steps"
        in found.verdict.sentence
    )
    assert (
        "from step 40 on, they have learnt from different batches" in found.verdict.sentence
        and "higher" not in found.verdict.sentence
    )
    both = compare.compare(*events, "narrow", "wide", ((40,), (40,)))
    assert both.case == ("unknown", "higher") and not both.unpaired
    apart = compare.compare(*events, "narrow", "wide", ((10, 20), (15, 30)))
    assert apart.unpaired == 41, (
        "the batches of steps 15 to 18, and of 29 on, are the same, but not the weights"
    )


def test_a_loss_that_is_not_finite_is_named_and_the_steps_before_are_judged_on_their_own():
    """Noise before the break stays noise in the words, whatever the break."""
    shared = [2.0] * 100
    run = [2.0 + extra for extra in noise(5, 100, 0.0, 0.01)]
    run[90:] = [math.nan] * 10
    found = compare.compare(steps(run), steps(shared), "narrow", "wide")
    assert (
        found.case == ("worse", "diverged")
        and found.run_nonfinite == 91
        and found.reference_nonfinite is None
    )
    assert found.steps[-1] == 90
    assert found.training_finding == compare.NOISE and "step 91" in found.verdict.sentence


def test_the_curve_has_a_point_and_a_band_at_both_ends():
    found = compared(0.05)
    assert found.curve[0][0] == 1 and found.curve[-1][0] == 300
    assert all(point.half_width is not None for _, point in found.curve)
    assert found.curve[0][1].count == 33 and found.curve[150][1].count == 65


# --- the other quantities ---


def test_validation_is_compared_at_the_last_step_that_both_evaluated():
    run = [*steps([2.0] * 3), evaluation(1, 2.2), evaluation(2, 2.1), evaluation(3, 2.0)]
    reference = [*steps([2.0] * 3), evaluation(1, 2.0), evaluation(2, 2.0)]
    pair = compare.compare(run, reference, "narrow", "wide").validation
    assert (pair.step, pair.run, pair.reference) == (2, 2.1, 2.0)
    assert pair.difference == pytest.approx(0.1) and pair.ratio == pytest.approx(1.05)


def test_speed_is_the_median_without_the_first_step():
    run = steps([2.0] * 4)
    for event, rate in zip(run, (1.0, 90.0, 100.0, 500.0), strict=True):
        event["tokens_per_s"] = rate
    assert compare.tokens_per_s(run) == 100.0
    assert compare.tokens_per_s(run[:1]) == 1.0
    assert compare.tokens_per_s(steps([2.0])) is None


def test_memory_is_the_largest_peak_and_unknown_where_none_was_measured():
    found = compare.compare(
        steps([2.0], peak_bytes=50), steps([2.0], peak_bytes=100), "narrow", "wide"
    )
    assert found.peak_bytes.ratio == 0.5
    assert compare.peak_bytes(steps([2.0], peak_bytes=0)) is None
    assert (
        compare.compare(steps([2.0]), steps([2.0], peak_bytes=100), "narrow", "wide").peak_bytes
        is None
    )


def test_ratios_to_zero_or_not_finite_are_not_given():
    assert compare.Pair(run=1.0, reference=0.0, step=1).ratio is None
    assert compare.Pair(run=math.nan, reference=1.0, step=1).ratio is None
