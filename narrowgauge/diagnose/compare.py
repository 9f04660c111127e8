"""Compares two runs on the same batches: how far apart their losses are, and how much of that is noise.

At step t both runs saw the same batch, so its difficulty cancels in d[t] = run loss - reference loss. What stays is the
difference between the runs, plus noise.

The noise band: neighbouring d are correlated because two runs drift apart slowly, so scatter / sqrt(n) would be too narrow.
We cut the values into blocks and use the scatter of the block means (batch means): blocks longer than the correlation are
independent. We try blocks of 1, 2, 4, ... steps while at least 4 blocks remain, and keep the widest band. Student's t corrects
for few blocks. Share of 65-value bands that hold the true mean, for values with lag-1 correlation c (4,000 series each):

    c = 0: 98.6 %    c = 0.5: 97 %    c = 0.8: 94 %    c = 0.9: 88 %        33 values: 98, 96, 89, 80 %

A difference whose band lies within SMALL of the reference's loss is "small": found, and no reason to call the run worse.
The band does not cover another seed, another order of the data, or longer training (over seeds: `seeds`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from narrowgauge.diagnose.format_text import PERCENT, count, decimals, loss_value, plural, signed

MINIMUM_BLOCKS = 4
MINIMUM_VALUES = 16  # blocks of 1, 2 and 4; below, no band is given
SMALL = 0.0025  # of the reference's loss: gaps of sound FP8 runs are of the order of 0.001 nats
NORMAL_QUANTILE = statistics.NormalDist().inv_cdf(0.975)  # two-sided 95 %

Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The mean of `count` values and half the width of its 95 % band (None if there are too few values)."""

    mean: float
    half_width: float | None
    count: int


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One quantity of both runs at, or up to, their last common step."""

    run: float
    reference: float
    step: int

    @property
    def difference(self) -> float:
        return self.run - self.reference

    @property
    def ratio(self) -> float | None:
        """run / reference; None if the reference is zero or either is not finite."""
        fine = self.reference != 0 and math.isfinite(self.run) and math.isfinite(self.reference)
        return self.run / self.reference if fine else None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The result of `compare`. A field is None if one of the runs did not record the quantity."""

    run_name: str
    reference_name: str
    steps: list[int]  # steps where both runs have a finite loss
    unpaired: int  # of these, steps with different numbers of tokens
    identical: bool  # every common loss is the same, bit for bit
    window: int  # steps in the moving window, and at most in `tail`
    curve: list[tuple[int, Estimate]]  # moving mean of the difference of the training losses
    tail: Estimate | None  # its mean over the last `window` common steps
    tail_loss: float  # the reference's mean loss there; NaN if there are none
    validation: Pair | None  # at the last step where both were evaluated
    tokens_per_s: Pair | None
    peak_bytes: Pair | None
    run_nonfinite: int | None  # first step whose loss is not finite
    reference_nonfinite: int | None

    @property
    def finding(self) -> str:
        """'nonfinite', 'unpaired', or the `training_finding`."""
        if self.run_nonfinite is not None or self.reference_nonfinite is not None:
            return "nonfinite"
        return "unpaired" if self.unpaired else self.training_finding

    @property
    def training_finding(self) -> str:
        """The end of the paired training losses: 'unknown', 'identical', 'noise', 'small', 'higher' or 'lower'."""
        if self.tail is None or self.tail.half_width is None:
            return "unknown"
        if self.identical:
            return "identical"
        if abs(self.tail.mean) <= self.tail.half_width:
            return "noise"
        if abs(self.tail.mean) + self.tail.half_width <= SMALL * abs(self.tail_loss):
            return "small"
        return "higher" if self.tail.mean > 0 else "lower"

    @property
    def verdict(self) -> str:
        """The finding as sentences, with its numbers and its limits."""
        stops = ((self.run_name, self.run_nonfinite), (self.reference_name, self.reference_nonfinite))
        sentences = [
            f"The loss of {name} is not finite at step {count(step)}." for name, step in stops if step is not None
        ]
        if sentences and self.steps:
            sentences.append("The rest compares the steps before.")
        sentences.append(self._about_training())
        if self.validation is not None:
            sentences.append(self._about_validation(self.validation))
        if self.tail is not None:
            sentences.append(
                "This is one pair of runs with one seed; it does not show how much another seed would change."
            )
        return " ".join(sentences)

    def _about_training(self) -> str:
        run, reference, tail = self.run_name, self.reference_name, self.tail
        if tail is None:
            return f"{run} and {reference} have no step with a finite loss in common, so nothing can be compared."
        if self.unpaired:
            return (
                f"At {count(self.unpaired)} of {plural(len(self.steps), 'common step')} {run} and {reference} did not see the "
                "same number of tokens, so their training losses cannot be compared batch by batch."
            )
        if self.identical:
            return f"The training losses of {run} and {reference} are identical at {plural(len(self.steps), 'common step')}."
        places = decimals(tail.half_width or tail.mean)
        over = f"Over the last {plural(tail.count, 'common step')}"
        gap = f"they differ by {signed(tail.mean, places)} nats per token on average"
        if tail.half_width is None:
            return (
                f"{over}, too few to tell a difference from noise, the training losses of {run} and {reference}: {gap}."
            )
        low, high = (signed(tail.mean + side * tail.half_width, places) for side in (-1, 1))
        band = f"95{PERCENT} band from {low} to {high}"
        if self.training_finding == "noise":
            compared, meaning = "cannot be told from", "which is within the noise"
        elif self.training_finding == "small":
            compared, meaning = (
                "is near",
                f"more than step-to-step noise explains, and less than {100 * SMALL:g}{PERCENT} of the loss",
            )
        else:
            compared, meaning = f"is {self.training_finding} than", "more than step-to-step noise explains"
        return f"{over} the training loss of {run} {compared} that of {reference}: {gap}, {meaning} ({band})."

    def _about_validation(self, pair: Pair) -> str:
        said = f"At step {count(pair.step)} the validation loss is {loss_value(pair.run)} against {loss_value(pair.reference)}"
        if not pair.ratio:
            return f"{said}."
        nats = signed(pair.difference, decimals(pair.difference))
        return f"{said} ({nats} nats, {signed(100 * pair.difference / pair.reference, 2)}{PERCENT})."


def compare(run: Sequence[Event], reference: Sequence[Event], run_name: str, reference_name: str) -> Comparison:
    """The comparison of two lists of events as `runs.read_metrics` returns them."""
    ours, theirs = step_events(run), step_events(reference)
    common = sorted(ours.keys() & theirs.keys())
    steps = [step for step in common if finite_loss(ours[step]) and finite_loss(theirs[step])]
    differences = [ours[step]["loss"] - theirs[step]["loss"] for step in steps]
    radius = window_radius(len(steps))
    window = 2 * radius + 1
    evaluated, reference_evaluated = dict(evaluations(run)), dict(evaluations(reference))
    last_evaluated = max(evaluated.keys() & reference_evaluated.keys(), default=0)

    def pair(ours: float | None, theirs: float | None, step: int = max(common, default=0)) -> Pair | None:
        return None if ours is None or theirs is None else Pair(run=ours, reference=theirs, step=step)

    return Comparison(
        run_name=run_name,
        reference_name=reference_name,
        steps=steps,
        unpaired=sum(ours[step].get("tokens") != theirs[step].get("tokens") for step in steps),
        identical=not any(differences),
        window=window,
        curve=moving(steps, differences, radius),
        tail=estimate(differences[-window:]) if steps else None,
        tail_loss=statistics.fmean(theirs[step]["loss"] for step in steps[-window:]) if steps else math.nan,
        validation=pair(evaluated.get(last_evaluated), reference_evaluated.get(last_evaluated), last_evaluated),
        tokens_per_s=pair(tokens_per_s(run), tokens_per_s(reference)),
        peak_bytes=pair(peak_bytes(run), peak_bytes(reference)),
        run_nonfinite=first_nonfinite(run),
        reference_nonfinite=first_nonfinite(reference),
    )


def smooth(curve: Sequence[tuple[int, float]], radius: int, points: int = 600) -> list[tuple[int, float]]:
    """(step, value) smoothed at up to `points` places, by a local linear fit.

    The fit is a least-squares line through the finite values within `radius` places, evaluated at the place: it neither lags
    nor flattens at the ends, as a moving mean does. The value is NaN where the curve itself is not finite.
    """
    found = []
    for place in spread(len(curve), points):
        step, value = curve[place]
        first = max(place - radius, 0)
        window = enumerate(curve[first : place + radius + 1], first)
        near = [(each, value) for each, (_, value) in window if math.isfinite(value)]
        if not math.isfinite(value):
            value = math.nan
        elif len(near) > 1:
            slope, intercept = statistics.linear_regression(*zip(*near, strict=True))
            value = slope * place + intercept
        found.append((step, value))
    return found


def spread(total: int, points: int) -> list[int]:
    """At most `points` of 0 ... total - 1, evenly spaced, both ends included."""
    if total <= points:
        return list(range(total))
    return [round(i * (total - 1) / (points - 1)) for i in range(points)]


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and 95 % band of a series that may be correlated; the method is at the top of this file."""
    widths = []
    length = 1
    while len(values) >= MINIMUM_VALUES and len(values) // length >= MINIMUM_BLOCKS:
        first = len(values) % length  # an incomplete block is left out at the older end
        means = [statistics.fmean(values[i : i + length]) for i in range(first, len(values), length)]
        widths.append(student_quantile(len(means) - 1) * math.sqrt(statistics.variance(means) / len(means)))
        length *= 2
    return Estimate(mean=statistics.fmean(values), half_width=max(widths, default=None), count=len(values))


def student_quantile(freedom: int) -> float:
    """Two-sided 95 % quantile of Student's t, Abramowitz and Stegun 26.7.5; 0.7 % too small at 3, less above."""
    z, n = NORMAL_QUANTILE, freedom
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    return z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2) + third


def window_radius(total: int) -> int:
    """At most an eighth of the run on either side, 16 to 256: a power of two, so that the longest blocks fill the window."""
    return min(max(1 << int(math.log2(max(total / 8, 1))), MINIMUM_VALUES), 256)


def moving(steps: Sequence[int], values: Sequence[float], radius: int, points: int = 300) -> list[tuple[int, Estimate]]:
    """The estimate in a moving window of `radius` values on either side, shorter at the ends, at up to `points` places."""
    return [(steps[i], estimate(values[max(i - radius, 0) : i + radius + 1])) for i in spread(len(values), points)]


def step_events(events: Sequence[Event]) -> dict[int, Event]:
    """The `step` events by step."""
    return {event["step"]: event for event in events if event["event"] == "step"}


def finite_loss(event: Event) -> bool:
    return math.isfinite(event["loss"])


def first_nonfinite(events: Sequence[Event]) -> int | None:
    """The first step whose training loss is NaN or infinite."""
    return min((step for step, event in step_events(events).items() if not finite_loss(event)), default=None)


def evaluations(events: Sequence[Event]) -> list[tuple[int, float]]:
    """(step, validation loss), in order."""
    return sorted((event["step"], event["loss"]) for event in events if event["event"] == "eval")


def tokens_per_s(events: Sequence[Event]) -> float | None:
    """The median over the steps, without the first, which includes start-up."""
    by_step = step_events(events)
    rates = [by_step[step]["tokens_per_s"] for step in sorted(by_step) if by_step[step].get("tokens_per_s")]
    return statistics.median(rates[1:] or rates) if rates else None


def peak_bytes(events: Sequence[Event]) -> float | None:
    """The largest peak of all steps; None if none was measured (zero means not measured)."""
    return max((event.get("peak_bytes") or 0 for event in step_events(events).values()), default=0) or None
