"""Sequential evidence over checks: exact where the answer is known; the rates are in test_false_alarms.py."""

from __future__ import annotations

import json
import math

import pytest

from narrowgauge.diagnose import runs
from narrowgauge.diagnose.format_text import loss_value
from narrowgauge.diagnose.guard_settings import parse
from narrowgauge.diagnose.verdict import EQUIVALENT, REFERENCE_DIVERGED, UNKNOWN, WORSE
from narrowgauge.errors import ConfigError
from narrowgauge.lab.guard.bets import CEILING, LIMIT, Money, Scale, chi2_quantile, factors
from narrowgauge.lab.guard.evidence import Evidence
from narrowgauge.lab.guard.result import FORESIGHT
from tests.raising import raises

LOSS = 2.0  # its margin is 0.005


def judged(differences, loss=LOSS, control=0.0001):
    """The verdict after each check; every fourth check has a control."""
    evidence = Evidence()
    return [
        evidence.add(d, loss=loss, control=None if i % 4 else control)
        for i, d in enumerate(differences)
    ]


def first(verdicts, name):
    """The number of the first check with this verdict, or None."""
    return next((i for i, verdict in enumerate(verdicts, 1) if verdict.outcome == name), None)


# The gaps of healthy and sick runs that were measured on a small Llama, without the first check.
HEALTHY = {
    "control": [0.0001, -0.0001] * 5,
    "fp8": [0.0003, -0.0002, 0.0001, -0.0003] * 2,
    "mxfp8": [0.001, 0.0005, 0.0008, 0.001] * 2,
    "int4": [0.004, -0.004, 0.002, -0.003, 0.005, -0.001, 0.001, -0.002],
}
SICK = {
    "e2m1": [0.020, 0.025, 0.037, 0.030],
    "int4": [0.12, 0.04, 0.13, 0.09],
    "saturating": [-0.13, -0.03, 0.03, 0.27],
    "saturating later": [-0.03, 0.03, 0.1, 0.27],
    "jumping": [0.1, -0.07, 0.2, -0.15],
}


@pytest.mark.parametrize("name", HEALTHY)
def test_healthy_runs_are_certified_by_the_eighth_check_and_never_called_worse(name):
    verdicts = judged(HEALTHY[name])
    assert first(verdicts, WORSE) is None
    assert first(verdicts, EQUIVALENT) <= 8


@pytest.mark.parametrize("name", SICK)
def test_sick_runs_are_worse_by_their_third_check(name):
    assert first(judged(SICK[name]), WORSE) <= 3


def test_both_signs_are_judged_and_said():
    above, below = judged([0.02] * 3)[-1], judged([-0.02] * 3)[-1]
    assert (above.outcome, above.detail) == (WORSE, "higher") and "higher than" in above.sentence
    assert (below.outcome, below.detail) == (WORSE, "lower") and "lower than" in below.sentence
    assert "saturate" in below.sentence and "saturate" not in above.sentence
    assert above.e_worse == below.e_worse


def test_one_wild_check_decides_nothing():
    """A spike of one of two continuations is chaos; the run is judged by the checks around it."""
    assert first(judged([5.0, 0.0, 0.0]), WORSE) is None
    assert first(judged([0.0, 0.0, 5.0, 0.0, 0.0]), WORSE) is None
    assert first(judged([0.065, *[0.0006] * 8]), EQUIVALENT) is not None


def test_a_gap_that_begins_late_is_found_three_checks_later():
    verdicts = judged([0.0002] * 15 + [0.03] * 3)
    assert first(verdicts, EQUIVALENT) < 15
    assert first(verdicts, WORSE) in (17, 18)
    last = verdicts[-1]
    assert (last.since, last.mean) == (
        16,
        pytest.approx(0.03),
    ) and "over the last 3 checks" in last.sentence


def test_a_gap_that_was_mended_is_forgotten():
    verdicts = judged([0.03] * 3 + [0.0002] * 8)
    assert verdicts[2].outcome == WORSE and verdicts[-1].outcome == EQUIVALENT
    assert verdicts[-1].since == 4 and verdicts[-1].mean == pytest.approx(0.0002)


def test_the_margin_is_a_share_of_the_loss_and_at_least_its_nats():
    assert judged([0.0], loss=4.0)[0].margin == 0.01
    assert judged([0.0], loss=0.5)[0].margin == 0.003
    assert Evidence(margin=0.01, least_margin=0.001).margin_at(0.2) == 0.002
    assert first(judged([0.006] * 8, loss=1.0), WORSE) and not first(
        judged([0.006] * 8, loss=4.0), WORSE
    )


def test_a_loss_that_is_not_finite_is_worse_at_once():
    for value in (math.nan, math.inf):
        verdict = judged([0.0, 0.0, value])[-1]
        assert (verdict.outcome, verdict.detail, verdict.more_checks) == (WORSE, "not finite", 0)
        assert "not finite" in verdict.sentence
    assert judged([math.nan, 0.0])[-1].outcome == UNKNOWN, "the next check is judged by itself"


def test_a_reference_that_diverges_is_said_to_be_so():
    evidence = Evidence()
    for loss, difference in ((math.nan, math.nan), (math.inf, -math.inf)):
        verdict = evidence.add(difference, loss=loss)
        assert (verdict.outcome, verdict.detail) == (UNKNOWN, REFERENCE_DIVERGED)
        assert loss_value(loss) in verdict.sentence
    assert math.isnan(verdict.mean) and verdict.e_worse == 1


def test_a_reference_whose_loss_doubles_diverges_and_its_check_does_not_count():
    evidence = Evidence()
    for loss in (2.0, 1.9, 1.8):
        assert evidence.add(0.0, loss=loss).detail != REFERENCE_DIVERGED
    before = evidence.result()
    verdict = evidence.add(0.8, loss=4.0)
    assert (verdict.outcome, verdict.detail) == (
        UNKNOWN,
        REFERENCE_DIVERGED,
    ) and verdict.usual == 1.9
    assert "diverges (loss 4.0000, it was 1.9000 before)" in verdict.sentence
    assert (verdict.e_worse, verdict.e_within, verdict.mean) == (
        before.e_worse,
        before.e_within,
        before.mean,
    )
    assert evidence.add(0.0, loss=1.8).outcome == before.outcome
    for _ in range(8):
        verdict = evidence.add(0.0, loss=4.0)
    assert verdict.outcome == EQUIVALENT, "a new level of the loss becomes the usual one"


def test_a_control_that_is_not_finite_counts_for_nothing():
    assert judged([0.0], control=math.nan)[0].scale == judged([0.0], control=None)[0].scale


def test_what_is_not_known_says_how_many_checks_are_missing():
    for gap in (0.0, 0.002, 0.02, -0.02):
        verdicts = judged([gap] * 20)
        decided = next(i for i, verdict in enumerate(verdicts, 1) if verdict.outcome != UNKNOWN)
        for checks, verdict in enumerate(verdicts[: decided - 1], 1):
            assert verdict.more_checks == decided - checks
            assert "more check" in verdict.sentence and f"{gap:+.4f}"[1:] in verdict.sentence
    at_the_margin = judged([0.005] * 3)[-1]
    assert (
        at_the_margin.more_checks is None
        and f"more than {FORESIGHT:,} checks" in at_the_margin.sentence
    )


def test_noise_of_controls_hides_a_gap():
    """The same differences decide where controls agree, and nothing where they scatter as far."""
    assert judged([0.02] * 3, control=0.0001)[-1].outcome == WORSE
    assert judged([0.02] * 3, control=0.02)[-1].outcome == UNKNOWN


def test_jumps_of_many_margins_are_a_departure_and_not_noise():
    """A kernel that drops columns, as measured: training grows used to it, so the sign turns between the second and third check."""
    assert first(judged([0.0304, 0.0026, -0.0370, -0.1542]), WORSE) == 4
    assert first(judged([0.0304, 0.0026, -0.0370, -0.1542], control=0.03), WORSE) is None, (
        "controls jump as well"
    )


def test_the_state_goes_through_json_and_gives_the_same_verdicts():
    evidence = Evidence()
    for i, difference in enumerate([0.01, math.nan, -0.002, 0.02]):
        evidence.add(difference, loss=LOSS + i, control=0.001 if i == 0 else None)
    evidence.add(0.0, loss=math.inf)
    resumed = Evidence()
    resumed.load_state_dict(runs.decode(runs.encode(evidence.state_dict())))
    assert resumed.result() == evidence.result()
    assert resumed.add(0.03, loss=LOSS) == evidence.add(0.03, loss=LOSS)
    event = resumed.result().event()
    assert event["outcome"] == evidence.result().outcome and json.dumps(event, allow_nan=False)


def test_margins_that_are_none_are_refused():
    for value in (0.0, -1.0, math.nan, math.inf):
        with raises(ConfigError, "evidence.not-positive"):
            Evidence(margin=value)
        with raises(ConfigError, "evidence.not-positive"):
            Evidence(least_margin=value)
    with raises(ConfigError, "evidence.no-check"):
        Evidence().result()


# --- the bets ---


def test_a_bet_does_not_win_on_average_where_its_hypothesis_holds():
    """Exact integral over a normal distribution of the excess, at its hypothesis' edge and inside."""
    grid = [i / 50 for i in range(-500, 501)]
    for center in (0.0, -0.5, -3.0):
        weights = [math.exp(-((x - center) ** 2) / 2) / math.sqrt(2 * math.pi) / 50 for x in grid]
        means = [
            sum(w * f for w, f in zip(weights, each, strict=True))
            for each in zip(*map(factors, grid), strict=True)
        ]
        assert all(mean <= 1 + 1e-6 for mean in means)


def test_money_is_neither_made_nor_lost_by_bets_that_stand_still():
    money = Money()
    assert money.value == 1
    for _ in range(50):
        money.bet([1.0, 1.0, 1.0])
        assert money.value == pytest.approx(1, abs=1e-12)


def test_factors_and_money_are_limited():
    assert max(factors(1e6)) == LIMIT and max(factors(-1e6)) == 0
    money = Money()
    for _ in range(9):
        money.bet(factors(1e6))
    assert money.value <= CEILING + 1


def test_the_scale_is_that_of_controls_and_neighbouring_differences():
    scale = Scale()
    assert scale.value == 0
    scale.control(0.001)
    assert scale.value == pytest.approx(0.001 * 7.958, rel=1e-3)
    scale.difference(5.0)
    scale.difference(5.001)
    assert scale.value == pytest.approx(math.sqrt((1e-6 + 0.5e-6) / 0.2107), rel=1e-3)
    for i in range(6):
        scale.difference(5.001 - i % 2 * 0.001)
    before = scale.value
    scale.difference(9.0)
    scale.difference(5.0)
    assert scale.value < 1.2 * before, "one wild check does not blind those that follow"
    scale.difference(9.0)
    assert scale.value > 100 * before


def test_quantiles_of_chi_squared_agree_with_tables():
    for freedom, value in {1: 0.0158, 2: 0.2107, 3: 0.5844, 5: 1.610, 10: 4.865, 30: 20.60}.items():
        assert chi2_quantile(freedom) == pytest.approx(value, rel=0.014)


def test_the_margin_in_nats_is_no_large_part_of_a_loss_that_has_none():
    """A mean squared error of 0.003 would be within 0.003 nats whatever happens. Nats that are asked for stay."""
    assert judged([0.0], loss=0.003)[0].margin == pytest.approx(0.00003)
    assert Evidence().margin_at(0.0) > 0
    asked = parse("margin=0.003")
    assert asked is not None and Evidence.of(asked).margin_at(0.003) == 0.003
    evidence = Evidence.of(asked)
    *_, last = [evidence.add(0.0, loss=0.01) for _ in range(6)]
    assert last.outcome == EQUIVALENT and "30% of the loss" in last.sentence


def test_the_former_name_of_the_result_still_works():
    evidence = Evidence()
    evidence.add(0.0, loss=LOSS)
    with pytest.warns(DeprecationWarning):
        former = evidence.verdict()
    assert former == evidence.result() and former.name == "unknown"
