"""Two runs on the same batches, side by side: how far apart their losses are, and how much of that is noise.

At step t both runs saw the same batch, so the batch's own difficulty cancels in d[t] = run loss - reference loss.
What stays is the difference that we look for, plus noise. Three tools, all in plain Python:

    smooth(losses)      for drawing: the straight line that fits the steps around t best, read at t. No lag, even where
                        the loss falls fast, and none of the flattening that a moving mean has at its ends.
    estimate(values)    the mean of a stretch of d with a 95 % band.
    moving(d)           the estimate in a window that moves along the run: the curve of the difference.

The band: neighbouring d resemble each other, for two runs drift apart slowly, so dividing the scatter by sqrt(n) would
promise too much. We cut the stretch into blocks, take each block's mean, and use the scatter of those means instead:
blocks longer than the resemblance lasts are independent. As we do not know how long that is, we try blocks of
1, 2, 4, ... steps while at least 4 blocks remain, and keep the widest band. Student's t corrects for few blocks.

How often the band of 65 values holds the true mean, where one value resembles the one before with correlation c
(4,000 series each; repeated smaller by the tests):

    c = 0: 98.6 %    c = 0.5: 97 %    c = 0.8: 94 %    c = 0.9: 88 %        33 values: 98, 96, 89, 80 %

What the band does not hold: another seed, another order of the data, longer training. One pair of runs cannot tell.
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
NORMAL_QUANTILE = statistics.NormalDist().inv_cdf(0.975)  # two-sided 95 %

Event = dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """The mean of `count` values and half the width of its 95 % band; None where there are too few values for one."""

    mean: float
    half_width: float | None
    count: int

    @property
    def low(self) -> float | None:
        return None if self.half_width is None else self.mean - self.half_width

    @property
    def high(self) -> float | None:
        return None if self.half_width is None else self.mean + self.half_width


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One quantity of both runs, up to or at the last step that both have it for."""

    run: float
    reference: float
    step: int

    @property
    def difference(self) -> float:
        return self.run - self.reference

    @property
    def ratio(self) -> float | None:
        """run / reference, None where the reference is zero or either is not finite."""
        fine = self.reference != 0 and math.isfinite(self.run) and math.isfinite(self.reference)
        return self.run / self.reference if fine else None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What two runs show of each other. None where one of them did not record the quantity."""

    run_name: str
    reference_name: str
    steps: list[int]  # both runs have a finite loss here
    unpaired: int  # of these, steps where the two did not see the same number of tokens
    identical: bool  # every common loss is the same, bit for bit
    window: int  # steps in the moving window, and at most in `tail`
    curve: list[tuple[int, Estimate]]  # the difference of the training losses along the run
    tail: Estimate | None  # the same over the last `window` common steps
    validation: Pair | None  # at the last step where both were evaluated
    tokens_per_s: Pair | None
    peak_bytes: Pair | None
    run_nonfinite: int | None  # first step whose loss is not finite
    reference_nonfinite: int | None

    @property
    def finding(self) -> str:
        """One word: 'nonfinite', 'unpaired', or what `training_finding` says."""
        if self.run_nonfinite is not None or self.reference_nonfinite is not None:
            return "nonfinite"
        return "unpaired" if self.unpaired else self.training_finding

    @property
    def training_finding(self) -> str:
        """What the paired training losses at the end show: 'unknown', 'identical', 'noise', 'higher' or 'lower'."""
        if self.tail is None or self.tail.half_width is None:
            return "unknown"
        if self.identical:
            return "identical"
        if abs(self.tail.mean) <= self.tail.half_width:
            return "noise"
        return "higher" if self.tail.mean > 0 else "lower"

    @property
    def verdict(self) -> str:
        """The finding in words, with its numbers, and with what it does not show."""
        sentences = [self._about_nonfinite(), self._about_training(), self._about_validation(), self._about_limits()]
        return " ".join(sentence for sentence in sentences if sentence)

    def _about_nonfinite(self) -> str:
        stops = ((self.run_name, self.run_nonfinite), (self.reference_name, self.reference_nonfinite))
        said = [f"The loss of {name} is not finite at step {count(step)}." for name, step in stops if step is not None]
        return " ".join(said) + (" What follows is about the steps before." if said and self.steps else "")

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
        band = f"95{PERCENT} band from {signed(tail.low, places)} to {signed(tail.high, places)}"
        if self.training_finding == "noise":
            compared, meaning = "cannot be told from", "which is within the noise"
        else:
            compared, meaning = f"is {self.training_finding} than", "more than step-to-step noise explains"
        return f"{over} the training loss of {run} {compared} that of {reference}: {gap}, {meaning} ({band})."

    def _about_validation(self) -> str:
        pair = self.validation
        if pair is None:
            return ""
        said = f"At step {count(pair.step)} the validation loss is {loss_value(pair.run)} against {loss_value(pair.reference)}"
        if not pair.ratio:
            return f"{said}."
        nats = signed(pair.difference, decimals(pair.difference))
        return f"{said} ({nats} nats, {signed(100 * pair.difference / pair.reference, 2)}{PERCENT})."

    def _about_limits(self) -> str:
        said = "This is one pair of runs with one seed: how much another seed would change is not known from it."
        return said if self.tail else ""


def compare(run: Sequence[Event], reference: Sequence[Event], run_name: str, reference_name: str) -> Comparison:
    """The comparison of two lists of events as `runs.read_metrics` returns them."""
    ours, theirs = step_events(run), step_events(reference)
    steps = [
        step for step in sorted(ours.keys() & theirs.keys()) if finite_loss(ours[step]) and finite_loss(theirs[step])
    ]
    differences = [ours[step]["loss"] - theirs[step]["loss"] for step in steps]
    radius = window_radius(len(steps))
    window = 2 * radius + 1
    last = max(ours.keys() & theirs.keys(), default=0)
    return Comparison(
        run_name=run_name,
        reference_name=reference_name,
        steps=steps,
        unpaired=sum(ours[step].get("tokens") != theirs[step].get("tokens") for step in steps),
        identical=not any(differences),
        window=window,
        curve=moving(steps, differences, radius),
        tail=estimate(differences[-window:]) if steps else None,
        validation=paired_validation(run, reference),
        tokens_per_s=pair(tokens_per_s(run), tokens_per_s(reference), last),
        peak_bytes=pair(peak_bytes(run), peak_bytes(reference), last),
        run_nonfinite=first_nonfinite(run),
        reference_nonfinite=first_nonfinite(reference),
    )


def smooth(values: Sequence[float], radius: int, points: int = 600) -> list[tuple[int, float]]:
    """(place, smoothed value) at up to `points` places: the height there of the line that fits the values around best.

    "Around" is within `radius` places, fewer at the ends. The curve is NaN where the value itself is not finite.
    """
    return [
        (i, line_height(values, i, radius) if math.isfinite(values[i]) else math.nan)
        for i in spread(len(values), points)
    ]


def line_height(values: Sequence[float], place: int, radius: int) -> float:
    """The least-squares line through the finite values within `radius` of `place`, read at `place`, itself finite."""
    first = max(place - radius, 0)
    near = [(i, value) for i, value in enumerate(values[first : place + radius + 1], first) if math.isfinite(value)]
    if len(near) == 1:
        return near[0][1]
    slope, intercept = statistics.linear_regression(*zip(*near, strict=True))
    return slope * place + intercept


def spread(total: int, points: int) -> list[int]:
    """At most `points` of the places 0 to total - 1, evenly spread, with both ends."""
    if total <= points:
        return list(range(total))
    return [round(i * (total - 1) / (points - 1)) for i in range(points)]


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and 95 % band of a series whose neighbours may resemble each other; how, is at the top of this file."""
    widths = []
    length = 1
    while len(values) >= MINIMUM_VALUES and len(values) // length >= MINIMUM_BLOCKS:
        means = block_means(values, length)
        widths.append(student_quantile(len(means) - 1) * math.sqrt(statistics.variance(means) / len(means)))
        length *= 2
    return Estimate(mean=statistics.fmean(values), half_width=max(widths, default=None), count=len(values))


def block_means(values: Sequence[float], length: int) -> list[float]:
    """Means of consecutive blocks; what does not fill a block is left out at the beginning, the older end."""
    first = len(values) % length
    return [math.fsum(values[i : i + length]) / length for i in range(first, len(values), length)]


def student_quantile(freedom: int) -> float:
    """Two-sided 95 % quantile of Student's t, Abramowitz and Stegun 26.7.5; 0.7 % too small at 3, less above."""
    z, n = NORMAL_QUANTILE, freedom
    return (
        z
        + (z**3 + z) / (4 * n)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )


def window_radius(total: int) -> int:
    """An eighth of the run or less on either side, 16 to 256: a power of two, so that the longest blocks fill it."""
    return min(max(1 << int(math.log2(max(total / 8, 1))), MINIMUM_VALUES), 256)


def moving(steps: Sequence[int], values: Sequence[float], radius: int, points: int = 300) -> list[tuple[int, Estimate]]:
    """The estimate over the values within `radius`, at up to `points` places; windows are cut short at the ends."""
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
    """The median over the steps; the first is left out where there are others, for it pays for start-up."""
    by_step = step_events(events)
    rates = [by_step[step]["tokens_per_s"] for step in sorted(by_step) if by_step[step].get("tokens_per_s")]
    return statistics.median(rates[1:] or rates) if rates else None


def peak_bytes(events: Sequence[Event]) -> float | None:
    """The largest peak that a step recorded; None where none did, as zero means 'not measured'."""
    return max((event.get("peak_bytes") or 0 for event in step_events(events).values()), default=0) or None


def pair(run: float | None, reference: float | None, step: int) -> Pair | None:
    return None if run is None or reference is None else Pair(run=run, reference=reference, step=step)


def paired_validation(run: Sequence[Event], reference: Sequence[Event]) -> Pair | None:
    """The validation losses at the last step where both runs were evaluated."""
    ours, theirs = dict(evaluations(run)), dict(evaluations(reference))
    step = max(ours.keys() & theirs.keys(), default=0)
    return pair(ours.get(step), theirs.get(step), step)
