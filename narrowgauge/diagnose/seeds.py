"""Verdict over seeds: does a recipe end where its reference ends, by how much not, and how sure is that?

A seed decides weights, order of the data and stochastic rounding, so a recipe and the reference of one seed are twins: they start equal
and see the same batches, unless a run left some out at a loss spike, which the verdict names (`Runs.left_out`). What is judged is the
mean of their differences, d = recipe - reference, one number a seed; its sign is turned where a higher value is better, so that "harm" is
above zero. Tests and intervals: `paired_tests`. With a margin, chosen before the runs:

    worse             shown (one-sided, 5 %): harm above the margin
    better            shown (one-sided, 5 %): harm below minus the margin
    equivalent        shown (two one-sided tests, 5 % each): harm between minus the margin and the margin
    not worse         shown (one-sided, 5 %): harm below the margin; whether it is better by more than that is open
    identical         every pair has the same value
    diverged          a run of the recipe ended with numbers that are not finite, and the reference's of that seed did not
    not known yet     none of these: too few seeds for this spread. `needed` says how many, by the power of the test of equivalence

Beside it the reference's own interval: where one more seed of the reference would fall (a 95 % prediction interval), which is how scores of
downstream tasks are judged in practice. A mean inside it is no proof of equivalence: with few seeds that interval is wide.

Every verdict has its own 5 %. Of several recipes against one reference, `with_holm` says which verdicts hold for all of them together.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

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
from narrowgauge.errors import ConfigError

WORSE, BETTER, EQUIVALENT, NOT_WORSE = "worse", "better", "equivalent", "not worse"
IDENTICAL, DIVERGED, UNKNOWN = "identical", "diverged", "not known yet"
LOWER_IS_BETTER = ("loss", "perplexity")
NOT_FINITE = "not finite"  # how a run ended; the other ways say nothing of a recipe's numbers


@dataclass(frozen=True)
class Margin:
    """The largest difference that does not matter: in units of the metric, or as a share of the reference's mean."""

    value: float
    is_share: bool = False

    @classmethod
    def parse(cls, text: str) -> Margin:
        """'0.25%' or '0.003'. ConfigError for what is not a number above zero."""
        match = re.fullmatch(r"\s*(\d{0,9}\.?\d{0,12})\s*(%?)\s*", text)
        try:
            value = float(match[1]) if match else math.nan
        except ValueError:
            value = math.nan
        if not match or not value > 0 or (match[2] and value >= 100):
            raise ConfigError(f"margin = {text!r}: is no margin. Write a share as '0.25%', or a difference as '0.003'.")
        return cls(value / 100, True) if match[2] else cls(value)

    @classmethod
    def usual(cls, metric: str) -> Margin:
        """0.25 % of a loss or perplexity; 0.01 of a score, which is between -1 and 1, or half a point of one up to 100 (BLEU)."""
        if metric in LOWER_IS_BETTER:
            return cls(0.0025, True)
        return cls(0.5 if metric in ("bleu", "chrf") else 0.01)

    def of(self, reference_mean: float) -> float:
        """In units of the metric."""
        return self.value * abs(reference_mean) if self.is_share else self.value

    def __str__(self) -> str:
        return f"{100 * self.value:g}%" if self.is_share else f"{self.value:g}"


@dataclass(frozen=True, kw_only=True)
class Runs:
    """What the runs of one recipe came to.

    values   seed -> the metric of its last evaluation, of finished runs
    failed   seed -> how it ended: NOT_FINITE, "out of memory", ...
    left_out seed -> the batches that it left out at loss spikes
    """

    name: str
    values: Mapping[int, float]
    failed: Mapping[int, str] = field(default_factory=dict)
    left_out: Mapping[int, tuple[int, ...]] = field(default_factory=dict)

    @property
    def finite(self) -> dict[int, float]:
        return {seed: value for seed, value in self.values.items() if math.isfinite(value)}

    @property
    def diverged(self) -> set[int]:
        """Seeds whose numbers were not finite, at the end or on the way."""
        return {seed for seed, why in self.failed.items() if why == NOT_FINITE} | (set(self.values) - set(self.finite))


@dataclass(frozen=True, kw_only=True)
class OwnInterval:
    """Where one more seed of these runs would fall, at 95 %."""

    name: str
    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def half_width(self) -> float | None:
        return half_width_of_next(self.values)

    def holds(self, value: float) -> bool | None:
        """None if there is no interval."""
        half = self.half_width
        return None if half is None else abs(value - self.mean) <= half


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """A recipe against its reference, over seeds. Numbers in the metric's units; None where there are too few pairs."""

    runs: Runs
    reference: Runs
    metric: str
    margin: Margin
    seeds: tuple[int, ...]  # those of the pairs
    differences: tuple[float, ...]  # recipe minus reference
    p_worse: float
    p_better: float
    p_not_worse: float
    p_equivalent: float
    holds_together: bool | None = None  # with Holm's correction over all recipes; None: one recipe, or nothing shown

    @property
    def sign(self) -> int:
        """1 where a positive difference is harm, -1 where a higher metric is better."""
        return 1 if self.metric in LOWER_IS_BETTER else -1

    @property
    def mean(self) -> float | None:
        return statistics.fmean(self.differences) if self.differences else None

    @property
    def half_width(self) -> float | None:
        """Half of the 95 % t interval of the mean difference."""
        return half_width(self.differences) if spread_of(self.differences) else None

    @property
    def interval(self) -> tuple[float, float] | None:
        half = self.half_width
        return None if half is None or self.mean is None else (self.mean - half, self.mean + half)

    @property
    def absolute_margin(self) -> float | None:
        """In units of the metric; a share is of the reference's mean over the pairs."""
        paired = [self.reference.values[seed] for seed in self.seeds]
        return self.margin.of(statistics.fmean(paired)) if paired else None

    @property
    def own_interval(self) -> OwnInterval | None:
        """The reference's, over all of its seeds."""
        values = tuple(self.reference.finite.values())
        return OwnInterval(name=self.reference.name, values=values) if len(values) > 1 else None

    @property
    def inside(self) -> bool | None:
        """Whether the recipe's mean lies in the reference's own interval."""
        own, values = self.own_interval, list(self.runs.finite.values())
        return own.holds(statistics.fmean(values)) if own and values else None

    @property
    def inside_count(self) -> int:
        """How many single runs do."""
        own = self.own_interval
        return sum(bool(own and own.holds(value)) for value in self.runs.finite.values())

    @property
    def other_batches(self) -> dict[int, tuple[tuple[int, ...], tuple[int, ...]]]:
        """Seed -> the batches that each run of a pair left out, where they are not the same: from there on the two saw others."""
        found = {seed: (self.runs.left_out.get(seed, ()), self.reference.left_out.get(seed, ())) for seed in self.seeds}
        return {seed: both for seed, both in found.items() if both[0] != both[1]}

    @property
    def lost_by_divergence(self) -> list[int]:
        return sorted(self.runs.diverged - self.reference.diverged)

    @property
    def name(self) -> str:
        """One of the verdicts at the top of this file."""
        if self.lost_by_divergence:
            return DIVERGED
        if len(self.differences) > 1 and not any(self.differences):
            return IDENTICAL
        shown = {WORSE: self.p_worse, BETTER: self.p_better, EQUIVALENT: self.p_equivalent, NOT_WORSE: self.p_not_worse}
        return next((name for name, p in shown.items() if p < ALPHA), UNKNOWN)

    @property
    def p(self) -> float | None:
        """Of the test that the verdict rests on."""
        shown = {WORSE: self.p_worse, BETTER: self.p_better, EQUIVALENT: self.p_equivalent, NOT_WORSE: self.p_not_worse}
        return shown.get(self.name)

    @property
    def needed(self) -> tuple[int | None, int | None] | None:
        """Seeds that decide with 80 % power at the observed spread: if there is no true difference, and if it is the observed mean.

        None for more than MOST; of a verdict that is known, or has no spread, there is no such pair.
        """
        spread, margin, mean = spread_of(self.differences), self.absolute_margin, self.mean
        if not spread or not margin or mean is None or self.name != UNKNOWN:
            return None
        return pairs_needed(spread, margin), pairs_needed(spread, margin, mean)

    def numbers(self) -> dict[str, object]:
        """What stands behind the verdict, for JSON."""
        interval, own = self.interval, self.own_interval
        return {
            "recipe": self.runs.name, "verdict": self.name, "seeds": list(self.seeds),
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


def judge(runs: Runs, reference: Runs, metric: str, margin: Margin | None = None) -> Verdict:
    """The verdict on one recipe. ConfigError for a margin that is nothing, as a share of a mean of zero."""
    margin = margin or Margin.usual(metric)
    ours, theirs = runs.finite, reference.finite
    seeds = tuple(sorted(ours.keys() & theirs.keys()))
    differences = tuple(ours[seed] - theirs[seed] for seed in seeds)
    absolute = margin.of(statistics.fmean(theirs[seed] for seed in seeds)) if seeds else 1.0
    if not absolute > 0:
        raise ConfigError(
            f"margin = {margin}: is a share of {reference.name}'s mean {metric}, which is zero. Give a difference, as 0.01."
        )
    sign = 1 if metric in LOWER_IS_BETTER else -1
    harm = [sign * each for each in differences]
    relief = [-each for each in harm]
    return Verdict(
        runs=runs, reference=reference, metric=metric, margin=margin, seeds=seeds, differences=differences,
        p_worse=p_above(harm, absolute), p_better=p_above(relief, absolute), p_not_worse=p_above(relief, -absolute),
        p_equivalent=p_equivalent(harm, absolute),
    )  # fmt: skip


def judge_all(runs: Sequence[Runs], metric: str, margin: Margin | None = None) -> list[Verdict]:
    """Each of `runs` but the first against the first."""
    return with_holm([judge(each, runs[0], metric, margin) for each in runs[1:]])


def with_holm(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Says of each verdict that rests on a test whether it holds for all recipes together: Holm over the recipes, test by test."""
    if len(verdicts) < 2:
        return list(verdicts)
    adjusted = {
        name: holm([getattr(each, key) for each in verdicts])
        for name, key in (
            (WORSE, "p_worse"),
            (BETTER, "p_better"),
            (EQUIVALENT, "p_equivalent"),
            (NOT_WORSE, "p_not_worse"),
        )
    }
    return [
        replace(each, holds_together=adjusted[each.name][place] < ALPHA) if each.name in adjusted else each
        for place, each in enumerate(verdicts)
    ]
