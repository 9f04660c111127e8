"""Verdicts over seeds: the definitions against scipy's own tests, the cases that have no spread, and what the sentences may say (exact)."""

from __future__ import annotations

import json
import math
import random
import statistics

import pytest
from scipy import stats

from narrowgauge.diagnose import paired_tests, seeds, seeds_text
from narrowgauge.diagnose.seeds import Margin, Runs, judge, judge_all
from narrowgauge.errors import ConfigError
from tests.raising import raises

BASE = [3.842, 3.861, 3.829, 3.850, 3.838]


def learnt(value: float) -> list[float]:
    """Training losses of 60 steps that fall from twice the value to it."""
    return [value * (1 + math.exp(-step / 8)) for step in range(60)]


def runs(name: str, values: list[float], **failed: str) -> Runs:
    return Runs(
        name=name,
        values=dict(enumerate(values)),
        failed={int(key[1:]): why for key, why in failed.items()},
        curves={seed: learnt(value) for seed, value in enumerate(values)},
    )


def moved(by: float, noise: float, count: int = 5, seed: int = 0) -> list[float]:
    """The base, with a mean difference and a spread that are exactly these."""
    draw = random.Random(seed)
    raw = [draw.gauss(0, 1) for _ in range(count)]
    scale = noise / statistics.stdev(raw) if noise else 0.0
    return [
        base + by + scale * (each - statistics.fmean(raw))
        for base, each in zip(BASE, raw, strict=False)
    ]


def test_two_values_have_an_interval_and_one_has_none():
    found = stats.ttest_1samp([1.0, 3.0], 0.0).confidence_interval(0.95)
    assert paired_tests.half_width([1.0, 3.0]) == pytest.approx((found.high - found.low) / 2)
    assert paired_tests.half_width([1.0]) is None


def test_intervals_and_tests_are_scipys():
    values = [0.003, -0.001, 0.004, 0.0, 0.002]
    margin = 0.005
    found = stats.ttest_1samp(values, 0.0).confidence_interval(0.95)
    half = paired_tests.half_width(values)
    mean = statistics.fmean(values)
    assert (mean - half, mean + half) == pytest.approx((found.low, found.high), rel=1e-12)
    above = stats.ttest_1samp(values, -margin, alternative="greater").pvalue
    below = stats.ttest_1samp(values, margin, alternative="less").pvalue
    assert paired_tests.p_equivalent(values, margin) == pytest.approx(max(above, below), rel=1e-9)
    assert paired_tests.p_above(values, 0.001) == pytest.approx(
        stats.ttest_1samp(values, 0.001, alternative="greater").pvalue, rel=1e-9
    )


def test_a_verdicts_interval_is_that_of_the_paired_t_test():
    verdict = judge(runs("fp8", moved(0.01, 0.004)), runs("bf16", BASE), "loss")
    found = stats.ttest_1samp(verdict.differences, 0.0).confidence_interval(0.95)
    assert verdict.interval == pytest.approx((found.low, found.high), rel=1e-9)


def test_two_one_sided_tests_are_the_90_percent_interval():
    values = [0.003, -0.001, 0.004, 0.0, 0.002]
    mean, half = statistics.fmean(values), paired_tests.half_width(values, 0.90)
    edge = max(abs(mean - half), abs(mean + half))
    assert (
        paired_tests.p_equivalent(values, 1.001 * edge)
        < 0.05
        < paired_tests.p_equivalent(values, 0.999 * edge)
    )


def test_holm_steps_down_and_never_falls():
    assert paired_tests.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert paired_tests.holm([0.9, 0.8]) == [1.0, 1.0] and paired_tests.holm([]) == []


@pytest.mark.slow
def test_power_is_that_of_simulated_studies():
    """2,000 studies: within 4 standard errors, 0.045."""
    draw, n, spread, margin = random.Random(1), 8, 1.0, 1.0
    shown = [
        paired_tests.p_equivalent([draw.gauss(0, spread) for _ in range(n)], margin) < 0.05
        for _ in range(2000)
    ]
    assert statistics.fmean(shown) == pytest.approx(
        paired_tests.power_of_equivalence(n, spread, margin), abs=4 * math.sqrt(0.25 / 2000)
    )


def test_a_true_difference_takes_power_away_on_either_side():
    """Far beyond the margin nothing is shown, next to it little, and the sign does not matter."""
    powers = [
        paired_tests.power_of_equivalence(8, 0.5, 1.0, true) for true in (0.0, 0.5, -0.5, 1.0, 3.0)
    ]
    none, more, less, margin, beyond = powers
    assert none > more > margin > beyond == pytest.approx(0.0, abs=1e-6)
    assert more == pytest.approx(less, rel=1e-12)
    assert margin == pytest.approx(paired_tests.ALPHA, abs=0.01)  # at the margin, the test's size


def test_the_need_is_the_first_number_of_pairs_that_has_the_power():
    for spread, margin in ((1.0, 1.0), (1.0, 0.4), (0.2, 1.0)):
        n = paired_tests.pairs_needed(spread, margin)
        assert paired_tests.power_of_equivalence(n, spread, margin) >= 0.8
        assert n == 2 or paired_tests.power_of_equivalence(n - 1, spread, margin) < 0.8
    assert (
        paired_tests.pairs_needed(1.0, 0.001) is None
        and paired_tests.pairs_needed(0.0, 1.0) is None
    )
    assert paired_tests.pairs_needed(1.0, 1.0, true=2.0) <= paired_tests.pairs_needed(1.0, 1.0)
    assert paired_tests.pairs_needed(1.0, 1.0, true=1.05) is None  # next to the margin


@pytest.mark.parametrize(
    ("by", "noise", "name"),
    [
        (0.001, 0.002, seeds.EQUIVALENT),
        (0.030, 0.004, seeds.WORSE),
        (-0.030, 0.004, seeds.BETTER),
        (-0.012, 0.012, seeds.NOT_WORSE),
        (0.008, 0.008, seeds.UNKNOWN),
        (0.0, 0.0, seeds.IDENTICAL),
    ],
)
def test_each_verdict(by, noise, name):
    """The margin is 0.25 % of 3.844, 0.0096; of a score the same numbers turn their sign."""
    verdict = judge(runs("fp8", moved(by, noise)), runs("bf16", BASE), "loss")
    assert verdict.name == name
    turned = judge(
        runs("fp8", moved(-by, -noise)), runs("bf16", BASE), "mcc", Margin(0.25e-2, True)
    )
    assert turned.name == name
    json.dumps(verdict.numbers(), allow_nan=False)
    assert seeds_text.heading(verdict) and seeds_text.sentences(verdict)


def test_zero_in_the_interval_is_said_and_no_difference_is_called_above():
    """+0.0006 of pairs that scatter by 0.002 is neither higher nor worse."""
    verdict = judge(runs("fp8", moved(0.0006, 0.002)), runs("bf16", BASE), "loss")
    said = seeds_text.sentences(verdict)
    assert verdict.name == seeds.EQUIVALENT and abs(verdict.mean) <= verdict.half_width
    assert "includes zero" in said and "equivalent" in said
    assert not {"above", "higher", "worse"} & set(said.replace(",", " ").split())


def test_an_open_verdict_says_how_many_seeds():
    verdict = judge(runs("fp8", moved(0.002, 0.02)), runs("bf16", BASE), "loss")
    none, observed = verdict.needed
    assert verdict.name == seeds.UNKNOWN and 5 < none < observed
    assert f"needs {none} to {observed} seeds" in seeds_text.heading(verdict)
    assert f"about {none} seeds" in seeds_text.sentences(verdict)
    assert judge(runs("fp8", moved(0.0, 0.001)), runs("bf16", BASE), "loss").needed is None


def test_the_references_own_interval_is_that_of_one_seed_more():
    own = judge(runs("fp8", BASE), runs("bf16", BASE), "loss").own_interval
    expected = stats.t.ppf(0.975, 4) * statistics.stdev(BASE) * math.sqrt(1.2)
    assert own.half_width == pytest.approx(expected, rel=1e-12)
    outside = judge(runs("fp8", moved(0.06, 0.001)), runs("bf16", BASE), "loss")
    assert (
        outside.inside is False
        and outside.inside_count == 0
        and "is outside; 0 of its 5 runs" in seeds_text.about_own_interval(outside)
    )


@pytest.mark.parametrize(
    ("ours", "theirs", "name"),
    [
        ([3.8], [3.8], seeds.UNKNOWN),
        ([], BASE, seeds.UNKNOWN),
        (BASE, [], seeds.UNKNOWN),
        (
            [each + 0.5 for each in BASE[:1]] * 2,
            BASE[:1] * 2,
            seeds.UNKNOWN,
        ),  # the same difference twice tells no spread
        ([math.nan, *BASE[1:]], BASE, seeds.DIVERGED),
        ([math.inf], BASE[:1], seeds.DIVERGED),
        ([math.nan], [math.nan], seeds.UNKNOWN),
    ],
)
def test_too_little_is_no_verdict(ours, theirs, name):
    verdict = judge(runs("fp8", ours), runs("bf16", theirs), "loss")
    assert verdict.name == name and seeds_text.sentences(verdict) and seeds_text.heading(verdict)
    json.dumps(verdict.numbers(), allow_nan=name != seeds.DIVERGED)


def test_a_run_that_diverged_is_part_of_the_verdict_and_one_without_memory_is_not():
    failed = Runs(
        name="fp8", values=dict(enumerate(moved(0.001, 0.002)[:4])), failed={4: seeds.NOT_FINITE}
    )
    verdict = judge(failed, runs("bf16", BASE), "loss")
    assert verdict.name == seeds.DIVERGED and "diverged in 1 of 5 runs" in seeds_text.heading(
        verdict
    )
    assert "4 pairs" in seeds_text.sentences(verdict) and verdict.seeds == (0, 1, 2, 3)
    lost = Runs(
        name="fp8", values=dict(enumerate(moved(0.001, 0.002)[:4])), failed={4: "no memory"}
    )
    verdict = judge(lost, runs("bf16", BASE), "loss")
    assert (
        verdict.name == seeds.EQUIVALENT
        and "did not finish (no memory) at seed 4" in seeds_text.sentences(verdict)
    )


def test_a_reference_that_diverges_is_no_reference():
    """The seeds that survived in both are no sample of all seeds."""
    reference = runs("bf16", BASE[:4], s4=seeds.NOT_FINITE)
    both = runs("fp8", moved(0.001, 0.002)[:4], s4=seeds.NOT_FINITE)
    verdict = judge(both, reference, "loss")
    assert verdict.name == seeds.UNKNOWN and verdict.is_insensitive
    said = seeds_text.sentences(verdict)
    assert (
        "bf16 ended with numbers that are not finite at seed 4" in said
        and "bf16 diverged itself, at seed 4." in said
    )
    assert "Lower the learning rate." in said


def test_what_does_not_hold_for_all_recipes_together_is_said():
    """p = 0.033 alone is shown; with Holm over two it is 0.066."""
    close = runs("a", moved(-0.0207, 0.027))
    wide = runs("b", moved(0.0, 0.05, seed=3))
    alone, pair = (
        judge(close, runs("bf16", BASE), "loss"),
        judge_all([runs("bf16", BASE), close, wide], "loss"),
    )
    assert alone.name == pair[0].name == seeds.NOT_WORSE and 0.025 < alone.p < 0.05
    assert (
        alone.holds_together is None
        and pair[0].holds_together is False
        and pair[1].holds_together is None
    )
    assert "Holm" in seeds_text.sentences(pair[0]) and "Holm" not in seeds_text.sentences(alone)
    sound = judge_all(
        [runs("bf16", BASE), runs("a", moved(0.0, 0.001)), runs("b", moved(0.0, 0.001, seed=2))],
        "loss",
    )
    assert [each.holds_together for each in sound] == [True, True]


@pytest.mark.parametrize(
    ("text", "of_four"), [("0.25%", 0.01), ("0.003", 0.003), (" 5 % ", 0.2), ("1", 1.0)]
)
def test_margins_are_shares_or_differences(text, of_four):
    assert Margin.parse(text).of(-4.0) == pytest.approx(of_four)
    assert Margin.parse(str(Margin.parse(text))) == Margin.parse(text)


@pytest.mark.parametrize(
    "text",
    ["", "0", "0%", "-1", "100%", "nan", "inf", "1e999", ".", "%", "1 2", "0.25 percent", "9" * 40],
)
def test_other_margins_are_refused(text):
    with raises(ConfigError, "study.margin", "0.25"):
        Margin.parse(text)


def test_a_share_of_nothing_is_refused():
    with raises(ConfigError, "study.zero-mean"):
        judge(runs("fp8", [0.1, 0.1]), runs("bf16", [0.0, 0.0]), "mcc", Margin(0.01, True))


def test_pairs_that_did_not_see_the_same_batches_are_named():
    """What one run left out stands in the words and the numbers; a seed at which both left out the same is no such pair."""
    values = {seed: 3.0 + 0.001 * seed for seed in range(4)}
    narrow = Runs(name="fp8-row", values=values, left_out={0: (57,), 1: (9,), 2: ()})
    wide = Runs(
        name="bf16", values={seed: 3.0 for seed in range(4)}, left_out={1: (9,), 2: (30, 40)}
    )
    found = judge(narrow, wide, "loss")
    assert found.other_batches == {0: ((57,), ()), 2: ((), (30, 40))}
    said = seeds_text.sentences(found)
    assert "2 pairs of them did not see the same batches to the end (on_spike = skip; " in said
    assert "; seed 0: fp8-row left out batch 57 and bf16 left out none; " in said
    assert "seed 2: fp8-row left out none and bf16 left out batches 30 and 40)" in said
    assert found.numbers()["left_out"] == {"0": [[57], []], "2": [[], [30, 40]]}
    assert "same batches" not in seeds_text.sentences(
        judge(runs("a", BASE), runs("b", moved(0.0, 0.01)), "loss")
    )
