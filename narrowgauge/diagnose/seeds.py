"""Verdicts over seeds: does a recipe reach its reference's final metric, and how sure is that?

A seed determines weights, order of the data and stochastic rounding. A recipe and the reference of
one seed are a pair: they start equal and see the same batches, unless a run skipped batches at a
loss spike (`Runs.left_out`), which the verdict then names. The verdict judges the mean of the
differences d = recipe - reference, one number per seed. "Harm" is d with the sign chosen so that
harm > 0 is worse. Tests and intervals: `paired_tests`. With a margin, chosen before the runs:

    worse             shown (one-sided, 5 %): harm above the margin
    better            shown (one-sided, 5 %): harm below minus the margin
    equivalent        shown (two one-sided tests, 5 % each): harm between minus the margin and the
                      margin
    not worse         shown (one-sided, 5 %): harm below the margin; better by more than that stays
                      open
    identical         every pair has equal values (an equivalent outcome)
    diverged          a run of the recipe became non-finite, and the reference's of that seed did
                      not (a worse outcome)
    unknown           nothing shown: too few seeds for this standard deviation. `needed` estimates
                      how many are enough, from the power of the equivalence test

All verdicts except worse and diverged need a reference that could have shown a difference (assay
sensitivity, `sensitivity`): it learnt, beats the trivial predictor, and differs from a positive
control. Otherwise the verdict is unknown. The margin is also limited to a share of the reference's
progress. `seeds_text.verdict` puts the outcome into words.

Beside the verdict stands the reference's own interval: where one more seed of the reference would
fall (a 95 % prediction interval), which is how scores of downstream tasks are judged in practice. A
mean inside it does not prove equivalence, since that interval is wide for few seeds.

Each verdict has its own error rate of 5 %. For several recipes against one reference, `with_holm`
marks the verdicts that hold for all recipes together.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from narrowgauge.diagnose.metrics_table import metric_of
from narrowgauge.diagnose.paired_tests import (
    ALPHA,
    half_width,
    half_width_of_next,
    holm,
    p_above,
    p_equivalent,
    pairs_needed,
    spread_of,
)
from narrowgauge.diagnose.sensitivity import (
    DIVERGENCE,
    LARGEST_EXPONENT,
    SEEDS,
    Assay,
    Control,
    LossDecrease,
    Reference,
    assess,
    progress_of,
)
from narrowgauge.diagnose.verdict import (
    BETTER,
    DIVERGED,
    EQUIVALENT,
    IDENTICAL,
    NOT_SENSITIVE,
    NOT_WORSE,
    STUDY,
    UNKNOWN,
    WORSE,
    Case,
    stored_word,
)
from narrowgauge.errors import ConfigError

# The only reason for a failed run that says something about a recipe's arithmetic.
NOT_FINITE = "not finite"


@dataclass(frozen=True)
class Margin:
    """Largest difference that does not matter.

    value     in units of the metric, or a share of the reference's mean
    is_share  True if `value` is a share
    """

    value: float
    is_share: bool = False

    @classmethod
    def parse(cls, text: str) -> Margin:
        """Parse '0.25%' or '0.003'. Raises ConfigError unless the number is above zero."""
        # A limited number of digits and no exponent: inf, nan and overflow cannot be written.
        match = re.fullmatch(r"\s*(\d{0,9}\.?\d{0,12})\s*(%?)\s*", text)
        try:
            value = float(match[1]) if match else math.nan
        except ValueError:
            value = math.nan
        if not match or not value > 0 or (match[2] and value >= 100):
            raise ConfigError(
                f"margin = {text!r}: is no margin. Write a share as '0.25%', or a difference as '0.003'.",
                code="study.margin",
            )
        return cls(value / 100, True) if match[2] else cls(value)

    @classmethod
    def usual(cls, metric: str) -> Margin:
        """Default margin of a metric.

        0.25 % of a loss or perplexity; 0.01 of a score from -1 to 1; half a point of a score up to
        100 (BLEU).
        """
        if metric_of(metric).lower_is_better:
            return cls(0.0025, True)
        return cls(0.5 if metric_of(metric).largest == 100.0 else 0.01)

    def of(self, reference_mean: float) -> float:
        """The margin in units of the metric."""
        return self.value * abs(reference_mean) if self.is_share else self.value

    def __str__(self) -> str:
        return f"{100 * self.value:g}%" if self.is_share else f"{self.value:g}"


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Results of the runs of one recipe.

    values    seed -> the metric at the last evaluation, for finished runs
    failed    seed -> reason why it failed: NOT_FINITE, "out of memory", ...
    left_out  seed -> batches skipped at loss spikes
    curves    seed -> training losses of its steps, in order
    trivial   trivial predictor of the evaluated targets, from run.json: {"predictor": its name,
              metric: its value}; {}: not known
    targets   targets of one evaluation, the smallest number among the runs; None: not known
    """

    name: str
    values: Mapping[int, float]
    failed: Mapping[int, str] = field(default_factory=dict)
    left_out: Mapping[int, tuple[int, ...]] = field(default_factory=dict)
    curves: Mapping[int, Sequence[float]] = field(default_factory=dict)
    trivial: Mapping[str, Any] = field(default_factory=dict)
    targets: int | None = None

    @property
    def finite(self) -> dict[int, float]:
        return {seed: value for seed, value in self.values.items() if math.isfinite(value)}

    @property
    def diverged(self) -> set[int]:
        """Seeds whose losses became non-finite, during training or at the end."""
        return {seed for seed, why in self.failed.items() if why == NOT_FINITE} | (
            set(self.values) - set(self.finite)
        )


@dataclass(frozen=True, kw_only=True)
class OwnInterval:
    """95 % prediction interval for the value of one more seed."""

    name: str
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def half_width(self) -> float | None:
        return half_width_of_next(self.values)

    def holds(self, value: float) -> bool | None:
        """True if `value` lies inside; None if there is no interval."""
        half = self.half_width
        return None if half is None else abs(value - self.mean) <= half


@dataclass(frozen=True, kw_only=True)
class SeedComparison:
    """A recipe against its reference, over seeds: the numbers behind a verdict.

    seeds           seeds of the pairs
    differences     recipe minus reference, in units of the metric
    limit           margin in units of the metric: `assay.margin`, or the requested one if the assay
                    is not sensitive
    p_worse ...     p-values of the tests in the module docstring
    holds_together  True if the verdict holds with Holm's correction over all recipes; None: one
                    recipe, or nothing shown

    Properties are None where there are too few pairs.
    """

    runs: Runs
    reference: Runs
    metric: str
    margin: Margin
    seeds: tuple[int, ...]
    differences: tuple[float, ...]
    p_worse: float
    p_better: float
    p_not_worse: float
    p_equivalent: float
    limit: float
    assay: Assay
    holds_together: bool | None = None

    @property
    def sign(self) -> int:
        """1 if a positive difference is harm, -1 if a higher metric is better."""
        return sign_of(self.metric)

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.differences) if self.differences else None

    @property
    def half_width(self) -> float | None:
        """Half the width of the 95 % t interval of the mean difference."""
        return half_width(self.differences) if spread_of(self.differences) else None

    @property
    def interval(self) -> tuple[float, float] | None:
        half = self.half_width
        return None if half is None or self.mean is None else (self.mean - half, self.mean + half)

    @property
    def absolute_margin(self) -> float | None:
        """Margin in units of the metric; None without a pair."""
        return self.limit if self.seeds else None

    @property
    def own_interval(self) -> OwnInterval | None:
        """Prediction interval of the reference, over all its seeds."""
        # All seeds of the reference, also those whose pair failed: the interval is about the
        # reference alone.
        values = tuple(self.reference.finite.values())
        return OwnInterval(name=self.reference.name, values=values) if len(values) > 1 else None

    @property
    def inside(self) -> bool | None:
        """True if the recipe's mean lies in the reference's own interval."""
        own, values = self.own_interval, list(self.runs.finite.values())
        return own.holds(statistics.fmean(values)) if own and values else None

    @property
    def inside_count(self) -> int:
        """Number of single runs inside the reference's own interval."""
        own = self.own_interval
        return sum(bool(own and own.holds(value)) for value in self.runs.finite.values())

    @property
    def other_batches(self) -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
        """Seed -> batches that each run of a pair skipped, for pairs where they differ."""
        found = {
            seed: (self.runs.left_out.get(seed, ()), self.reference.left_out.get(seed, ()))
            for seed in self.seeds
        }
        return {seed: both for seed, both in found.items() if both[0] != both[1]}

    @property
    def lost_by_divergence(self) -> list[int]:
        return sorted(self.runs.diverged - self.reference.diverged)

    @property
    def tests(self) -> dict[Case, float]:
        """(outcome, detail) -> p of the test that shows it, the strongest claim first."""
        # The order matters: "equivalent" implies "not worse", and the stronger claim is reported.
        return {
            (WORSE, ""): self.p_worse,
            (BETTER, ""): self.p_better,
            (EQUIVALENT, ""): self.p_equivalent,
            (UNKNOWN, NOT_WORSE): self.p_not_worse,
        }

    @property
    def case(self) -> Case:
        """(outcome, detail) of the verdict; the module docstring lists the cases."""
        if self.lost_by_divergence:
            return WORSE, DIVERGED
        found = next((case for case, p in self.tests.items() if p < ALPHA), (UNKNOWN, ""))
        if len(self.differences) > 1 and not any(self.differences):
            found = EQUIVALENT, IDENTICAL
        # A shown difference proves that the runs can show one. Every other claim needs a reference
        # that would have shown it.
        is_allowed = found[0] == WORSE or self.assay.is_sensitive
        return found if is_allowed else (UNKNOWN, NOT_SENSITIVE)

    @property
    def outcome(self) -> str:
        """worse, better, equivalent or unknown."""
        return self.case[0]

    @property
    def detail(self) -> str:
        """Case within the outcome, or ''."""
        return self.case[1]

    @property
    def name(self) -> str:
        """The verdict in the one word that studies of all versions write (`verdict.STORED`)."""
        return stored_word(STUDY, *self.case)

    @property
    def is_insensitive(self) -> bool:
        """True if the verdict is unknown because the runs could not have shown a difference.

        More seeds would not change that.
        """
        return self.detail == NOT_SENSITIVE

    @property
    def lacks_control(self) -> bool:
        """True if no difference is claimed and no positive control backs that claim."""
        claims_none = self.outcome == EQUIVALENT or self.detail == NOT_WORSE
        return claims_none and self.assay.control is None

    @property
    def p(self) -> float | None:
        """p of the test behind the verdict; None if the verdict rests on no test."""
        return self.tests.get(self.case)

    @property
    def needed(self) -> tuple[int | None, int | None] | None:
        """Seeds for 80 % power at the observed standard deviation.

        Returns (seeds if the true mean is zero, seeds if it equals the observed mean). An entry is
        None above MOST. The result is None for known verdicts, and without a standard deviation.
        """
        spread, margin, mean = spread_of(self.differences), self.absolute_margin, self.mean
        if not spread or not margin or mean is None or self.case != (UNKNOWN, ""):
            return None
        # Both numbers: counted at a true mean of zero alone, 6 seeds were named in a case that
        # needed 151.
        return pairs_needed(spread, margin), pairs_needed(spread, margin, mean)

    def numbers(self) -> dict[str, object]:
        """Numbers behind the verdict, for JSON."""
        interval, own = self.interval, self.own_interval
        return {
            "recipe": self.runs.name, "verdict": self.name, "outcome": self.outcome, "sensitivity": self.assay.facts(),
            "seeds": list(self.seeds),
            "values": [self.runs.values[seed] for seed in self.seeds],
            "reference_values": [self.reference.values[seed] for seed in self.seeds],
            "differences": list(self.differences), "mean": self.mean,
            "low": interval and interval[0], "high": interval and interval[1], "margin": self.absolute_margin,
            "p_worse": self.p_worse, "p_better": self.p_better, "p_not_worse": self.p_not_worse, "p_equivalent": self.p_equivalent,
            "holds_together": self.holds_together, "needed": list(self.needed) if self.needed else None,
            "own_mean": own and own.mean, "own_half_width": own and own.half_width, "inside": self.inside,
            "left_out": {str(seed): [list(each) for each in both] for seed, both in self.other_batches.items()},
            "failed": {str(seed): why for seed, why in self.runs.failed.items()},
            "reference_failed": {str(seed): why for seed, why in self.reference.failed.items()},
        }  # fmt: skip


def judge(
    runs: Runs,
    reference: Runs,
    metric: str,
    margin: Margin | None = None,
    control: Runs | None = None,
) -> SeedComparison:
    """Judge one recipe.

    margin   None: `Margin.usual`
    control  runs of the positive control; None: none was trained

    Raises ConfigError for a margin of zero, such as a share of a mean of zero.
    """
    margin = margin or Margin.usual(metric)
    ours, theirs = runs.finite, reference.finite
    seeds = tuple(sorted(ours.keys() & theirs.keys()))
    differences = tuple(ours[seed] - theirs[seed] for seed in seeds)
    # The mean over the seeds of the pairs, so that unpaired runs do not shift the margin.
    absolute = margin.of(statistics.fmean(theirs[seed] for seed in seeds)) if seeds else 1.0
    if not absolute > 0:
        raise ConfigError(
            f"margin = {margin}: is a share of {reference.name}'s mean {metric}, which is zero. Give a difference, as 0.01.",
            code="study.zero-mean",
        )
    assay = assay_of(reference, metric, absolute, control)
    # An insensitive reference leaves "worse" as the only claim, and the requested margin judges it:
    # a margin narrowed by a reference that learnt nothing would call any difference worse.
    limit = assay.margin if assay.is_sensitive else absolute
    harm = [sign_of(metric) * each for each in differences]
    relief = [-each for each in harm]
    return SeedComparison(
        runs=runs, reference=reference, metric=metric, margin=margin, seeds=seeds, differences=differences,
        # p_above tests "mean <= bound"; with the sign of harm turned it tests "harm >= limit" as
        # well.
        p_worse=p_above(harm, limit), p_better=p_above(relief, limit), p_not_worse=p_above(relief, -limit),
        p_equivalent=p_equivalent(harm, limit), limit=limit, assay=assay,
    )  # fmt: skip


def sign_of(metric: str) -> int:
    """1 if a positive difference of the metric is harm, -1 if a higher metric is better."""
    return 1 if metric_of(metric).lower_is_better else -1


def assay_of(reference: Runs, metric: str, asked: float, control: Runs | None) -> Assay:
    """Assay sensitivity of the reference's runs. asked: requested margin in units of the metric."""
    name, sign, values = reference.name, sign_of(metric), list(reference.finite.values())
    progress = progress_of(
        reference.curves[seed] for seed in reference.finite if seed in reference.curves
    )
    mean = statistics.fmean(values) if values else None
    # The worse end of the one-sided 95 % interval; for one seed the value itself.
    reached = None if mean is None else mean + sign * (half_width(values, 0.9) or 0.0)
    trivial = reference.trivial.get(metric)
    lost = ", ".join(map(str, sorted(reference.diverged)))
    are_same = len(values) > 1 and len(set(values)) == 1
    samples = {
        DIVERGENCE: f"{name} diverged itself, at seed {lost}." if lost else "",
        SEEDS: f"All {len(values)} seeds of {name} gave the same {metric}, so they are no samples."
        if are_same
        else "",
    }
    known = Reference(
        name=name, sign=sign, progress=progress, learnt=_learnt(metric, progress, mean, trivial, reached), mean=mean, reached=reached,
        predictor=str(reference.trivial.get("predictor", "")), trivial=trivial, targets=reference.targets,
        whole=abs(mean or 0.0) if metric_of(metric).lower_is_better else metric_of(metric).largest, samples=samples,
    )  # fmt: skip
    return assess(
        known, asked, None if control is None else partial(_control, control, reference, metric)
    )


def _learnt(
    metric: str,
    progress: LossDecrease | None,
    mean: float | None,
    trivial: float | None,
    reached: float | None,
) -> float | None:
    """Progress of the reference in units of the metric.

    None: not known (a score without trivial predictor).
    """
    shown = progress.shown if progress else 0.0
    if metric == "loss":
        return shown
    if metric == "perplexity":
        # A loss that fell by `shown` divided the perplexity by exp(shown).
        return abs(mean or 0.0) * math.expm1(min(shown, LARGEST_EXPONENT))
    # A score has no training curve in its own units: progress is its distance from the trivial
    # predictor. Without one, only a loss that did not fall proves that nothing was learnt.
    if trivial is None or reached is None:
        return None if shown > 0 else 0.0
    return reached - trivial


def _control(control: Runs, reference: Runs, metric: str, margin: float) -> Control:
    """Result of the positive control against the reference."""
    pairs = sorted(control.finite.keys() & reference.finite.keys())
    harm = [sign_of(metric) * (control.finite[seed] - reference.finite[seed]) for seed in pairs]
    # A control that diverges is detected as well, and leaves no pair for the test.
    is_worse = p_above(harm, margin) < ALPHA
    return Control(
        harm=statistics.fmean(harm) if harm else None,
        seeds=len(pairs),
        told=is_worse or bool(control.diverged - reference.diverged),
    )


def judge_all(
    runs: Sequence[Runs], metric: str, margin: Margin | None = None, control: Runs | None = None
) -> list[SeedComparison]:
    """Judge each of `runs` against the first one."""
    return with_holm([judge(each, runs[0], metric, margin, control) for each in runs[1:]])


def with_holm(found: Sequence[SeedComparison]) -> list[SeedComparison]:
    """Set `holds_together` of each comparison whose verdict rests on a test.

    Holm's correction runs over the recipes, separately for each kind of test.
    """
    if len(found) < 2:
        return list(found)
    adjusted = {case: holm([each.tests[case] for each in found]) for case in found[0].tests}
    return [
        replace(each, holds_together=adjusted[each.case][place] < ALPHA)
        if each.case in adjusted
        else each
        for place, each in enumerate(found)
    ]
