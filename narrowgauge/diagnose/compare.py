"""Compare two runs on the same batches: the difference of their losses, and its noise.

Both runs saw the same batch at step t, so its difficulty cancels in d[t] = run loss - reference
loss.

The mean of d over the last steps has a 95 % band (band.py), valid for one look at a finished pair.
The band covers the scatter of the steps only. One pair of runs with one seed cannot separate the
recipe from chance: two BF16 runs that round differently also drift apart. The verdict of a pair is
therefore "unknown", with the finding as its detail, except where every loss is bit-identical or a
loss is not finite. A control (`lineage`, `same_curve`) or more seeds (`seeds`) are needed for more.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from narrowgauge.diagnose.band import Estimate, estimate, moving, spread, window_radius
from narrowgauge.diagnose.format_text import PERCENT, count, decimals, loss_value, plural, signed
from narrowgauge.diagnose.left_out import other_steps, words
from narrowgauge.diagnose.sensitivity import NOT_LEARNT, Assay
from narrowgauge.diagnose.time_to_loss import TimeToLoss, time_to_loss
from narrowgauge.diagnose.verdict import (
    DIVERGED,
    EQUIVALENT,
    IDENTICAL,
    NOT_SENSITIVE,
    REFERENCE_DIVERGED,
    UNKNOWN,
    WORSE,
    Case,
    Verdict,
)

# Details of "unknown", in which a pair differs from other comparisons.
NOISE, HIGHER, LOWER, UNPAIRED = "noise", "higher", "lower", "unpaired"
Event = dict[str, Any]


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
        """run / reference; None if the reference is zero or either value is not finite."""
        fine = self.reference != 0 and math.isfinite(self.run) and math.isfinite(self.reference)
        return self.run / self.reference if fine else None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Result of `compare`. A field is None if a run did not record the quantity."""

    run_name: str
    reference_name: str
    steps: list[int]  # steps at which both runs have a finite loss
    unpaired: int  # number of these steps with different batches, by data position or token count
    identical: bool  # every common loss is bit-identical
    window: int  # steps in the moving window; upper limit for `tail`
    curve: list[tuple[int, Estimate]]  # moving mean of the difference of the training losses
    tail: Estimate | None  # mean difference over the last `window` common steps
    validation: Pair | None  # at the last step where both were evaluated
    tokens_per_s: Pair | None
    peak_bytes: Pair | None
    time_to_loss: TimeToLoss | None
    run_nonfinite: int | None  # first step whose loss is not finite
    reference_nonfinite: int | None
    left_out: tuple[int, ...] = ()  # batches that the run skipped at loss spikes
    reference_left_out: tuple[int, ...] = ()
    assay: Assay | None = None  # assay sensitivity of the reference; None: not requested
    loss_unit: str = "nats per token"

    @property
    def is_insensitive(self) -> bool:
        """True if the steps show no difference and could not have shown one (`sensitivity`)."""
        return (
            self.assay is not None
            and not self.assay.is_sensitive
            and self.training_finding in (NOISE, IDENTICAL)
        )

    @property
    def case(self) -> Case:
        """(outcome, detail) of the verdict."""
        # Tested first: if both losses are lost, the format is not shown to be the cause either.
        if self.reference_nonfinite is not None:
            return UNKNOWN, REFERENCE_DIVERGED
        if self.run_nonfinite is not None:
            return WORSE, DIVERGED
        if self.unpaired:
            return UNKNOWN, UNPAIRED
        if self.is_insensitive:
            return UNKNOWN, NOT_SENSITIVE
        # HIGHER and LOWER stay "unknown": the band excludes the scatter of these steps, but not the
        # drift that rounding alone causes between two runs.
        found = self.training_finding
        return EQUIVALENT if found == IDENTICAL else UNKNOWN, found

    @property
    def training_finding(self) -> str:
        """Result at the end of the paired training losses, for this pair alone.

        '' (too few steps), IDENTICAL, NOISE (zero lies within the band of the mean), or, with zero
        outside the band, HIGHER or LOWER.
        """
        if self.tail is None or self.tail.half_width is None:
            return ""
        if self.identical:
            return IDENTICAL
        if abs(self.tail.mean) <= self.tail.half_width:
            return NOISE
        return HIGHER if self.tail.mean > 0 else LOWER

    @property
    def verdict(self) -> Verdict:
        outcome, detail = self.case
        tail = self.tail
        interval = (
            None
            if tail is None or tail.half_width is None
            else (tail.mean - tail.half_width, tail.mean + tail.half_width)
        )
        return Verdict(
            outcome=outcome,
            detail=detail,
            estimate=None if tail is None else tail.mean,
            interval=interval,
            margin=None if self.assay is None else self.assay.margin,
            heading=self._heading(detail),
            sentence=self._sentences(),
        )

    def _heading(self, detail: str) -> str:
        reference = self.reference_name
        return {
            NOISE: f"These steps show no difference from {reference}",
            IDENTICAL: f"The same losses as {reference}",
            HIGHER: f"In this pair, above {reference} by more than its scatter",
            LOWER: f"In this pair, below {reference} by more than its scatter",
            NOT_SENSITIVE: f"Unknown: {NOT_LEARNT}",
            "": f"Too little to compare with {reference}",
            UNPAIRED: f"Not the same batches as {reference}",
            DIVERGED: "A loss is not finite",
            REFERENCE_DIVERGED: "A loss is not finite",
        }[detail]

    def _sentences(self) -> str:
        """The verdict as sentences, with its numbers and its limits."""
        stops = (
            (self.run_name, self.run_nonfinite),
            (self.reference_name, self.reference_nonfinite),
        )
        sentences = [
            f"The loss of {name} is not finite at step {count(step)}."
            for name, step in stops
            if step is not None
        ]
        if sentences and self.steps:
            sentences.append("The rest compares the steps before.")
        sentences.append(self._about_training())
        if self.case[1] == NOT_SENSITIVE and self.assay is not None:
            sentences.append(f"Unknown: {self.assay.sentence[0].lower()}{self.assay.sentence[1:]}")
        if self.validation is not None:
            sentences.append(self._about_validation(self.validation))
        if self.tail is not None:
            sentences.append(
                "This is one pair of runs with one seed: it cannot show how much another seed, or rounding alone, would change. "
                "`narrowgauge study` tells it over seeds."
            )
        if self.training_finding in (NOISE, HIGHER, LOWER) and not self.unpaired:
            sentences.append(
                "The band holds for one look at the end; looked at again and again while a run goes on, it finds differences that are none."
            )
        return " ".join(sentences)

    def _about_training(self) -> str:
        run, reference, tail = self.run_name, self.reference_name, self.tail
        if tail is None:
            return f"{run} and {reference} have no step with a finite loss in common, so nothing can be compared."
        others = other_steps(self.steps, self.left_out, self.reference_left_out)
        if others:
            both = f"{words(run, self.left_out)} and {words(reference, self.reference_left_out)}"
            return (
                f"Of the data {both} (on_spike = skip): at {count(len(others))} of {plural(len(self.steps), 'common step')}, from step "
                f"{count(others[0])} on, they have learnt from different batches, so their training losses are no pairs there and cannot "
                "be compared batch by batch."
            )
        if self.unpaired:
            return (
                f"At {count(self.unpaired)} of {plural(len(self.steps), 'common step')} {run} and {reference} did not see the "
                "same number of tokens, so their training losses cannot be compared batch by batch."
            )
        if self.identical:
            return f"The training losses of {run} and {reference} are identical at {plural(len(self.steps), 'common step')}."
        places = decimals(tail.half_width or tail.mean)
        gap = (
            f"Over the last {plural(tail.count, 'common step')} the training loss of {run} minus that of {reference} is "
            f"{signed(tail.mean, places)} {self.loss_unit} on average"
        )
        if tail.half_width is None:
            return f"{gap}: too few steps to tell a difference from noise."
        low, high = (signed(tail.mean + side * tail.half_width, places) for side in (-1, 1))
        band = f"95{PERCENT} band from {low} to {high}"
        if self.training_finding == NOISE:
            return f"{gap} ({band}): zero lies within the band, so these steps show no difference, nor that there is none."
        return f"{gap} ({band}): zero lies outside the band, so the scatter and drift of these steps do not explain it."

    def _about_validation(self, pair: Pair) -> str:
        said = f"At step {count(pair.step)} the validation loss is {loss_value(pair.run)} against {loss_value(pair.reference)}"
        if not pair.ratio:
            return f"{said}."
        difference = f"{signed(pair.difference, decimals(pair.difference))} {self.loss_unit.partition(' per ')[0]}"
        return (
            f"{said} ({difference}, {signed(100 * pair.difference / pair.reference, 2)}{PERCENT})."
        )


def compare(
    run: Sequence[Event],
    reference: Sequence[Event],
    run_name: str,
    reference_name: str,
    left_out: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
    assay: Assay | None = None,
    loss_unit: str = "nats/token",
) -> Comparison:
    """Compare two lists of events as returned by `runs.read_metrics`.

    left_out   batches that each of the two runs skipped (`left_out`)
    assay      assay sensitivity of the reference (`sensitivity`); None: not requested
    loss_unit  unit of both losses (`metrics_table.loss_unit_of`)
    """
    ours, theirs = step_events(run), step_events(reference)
    common = sorted(ours.keys() & theirs.keys())
    steps = [step for step in common if finite_loss(ours[step]) and finite_loss(theirs[step])]
    differences = [ours[step]["loss"] - theirs[step]["loss"] for step in steps]
    other = {*other_steps(steps, *left_out)}
    radius = window_radius(len(steps))
    window = 2 * radius + 1
    evaluated, reference_evaluated = dict(evaluations(run)), dict(evaluations(reference))
    # The last common evaluation, not each run's last one: runs may have stopped at different steps.
    last_evaluated = max(evaluated.keys() & reference_evaluated.keys(), default=0)

    def pair(
        ours: float | None, theirs: float | None, step: int = max(common, default=0)
    ) -> Pair | None:
        return (
            None if ours is None or theirs is None else Pair(run=ours, reference=theirs, step=step)
        )

    return Comparison(
        run_name=run_name,
        reference_name=reference_name,
        steps=steps,
        # Equal token counts do not prove equal batches, but different counts prove different ones.
        unpaired=sum(
            ours[step].get("tokens") != theirs[step].get("tokens") or step in other
            for step in steps
        ),
        identical=not any(differences),
        window=window,
        curve=moving(steps, differences, radius),
        tail=estimate(differences[-window:]) if steps else None,
        validation=pair(
            evaluated.get(last_evaluated), reference_evaluated.get(last_evaluated), last_evaluated
        ),
        tokens_per_s=pair(tokens_per_s(run), tokens_per_s(reference)),
        peak_bytes=pair(peak_bytes(run), peak_bytes(reference)),
        time_to_loss=time_to_loss(run, reference),
        run_nonfinite=first_nonfinite(run),
        reference_nonfinite=first_nonfinite(reference),
        left_out=left_out[0],
        reference_left_out=left_out[1],
        assay=assay,
        loss_unit=loss_unit.replace("/", " per "),
    )


def smooth(
    curve: Sequence[tuple[int, float]], radius: int, points: int = 600
) -> list[tuple[int, float]]:
    """Smooth a curve by a local linear fit; returns (step, value) at up to `points` places.

    The fit is a least-squares line through the finite values within `radius` places, evaluated at
    the place. Unlike a moving mean it neither lags nor flattens at the ends. NaN where the curve
    itself is not finite.
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


def step_events(events: Sequence[Event]) -> dict[int, Event]:
    """`step` events by step."""
    return {event["step"]: event for event in events if event["event"] == "step"}


def finite_loss(event: Event) -> bool:
    return math.isfinite(event["loss"])


def first_nonfinite(events: Sequence[Event]) -> int | None:
    """First step whose training loss is NaN or infinite."""
    return min(
        (step for step, event in step_events(events).items() if not finite_loss(event)),
        default=None,
    )


def evaluations(events: Sequence[Event]) -> list[tuple[int, float]]:
    """(step, validation loss) pairs, sorted."""
    return sorted((event["step"], event["loss"]) for event in events if event["event"] == "eval")


def speeds(events: Sequence[Event]) -> list[float]:
    """Tokens per second of each step, without the first step, which includes start-up."""
    by_step = step_events(events)
    rates = [
        by_step[step]["tokens_per_s"]
        for step in sorted(by_step)
        if by_step[step].get("tokens_per_s")
    ]
    # The first step includes compilation and allocation; a run of one step has no other.
    return rates[1:] or rates


def tokens_per_s(events: Sequence[Event]) -> float | None:
    """Median of `speeds`; None if no step recorded one."""
    rates = speeds(events)
    return statistics.median(rates) if rates else None


def speed_quartiles(*runs: Sequence[Event]) -> tuple[float, float] | None:
    """First and third quartile of the `speeds` of all runs; None with fewer than four steps."""
    rates = [rate for events in runs for rate in speeds(events)]
    if len(rates) < 4:
        return None
    low, _, high = statistics.quantiles(rates, n=4, method="inclusive")
    return low, high


def peak_bytes(events: Sequence[Event]) -> float | None:
    """Largest peak of all steps; None if none was measured (zero means not measured)."""
    return (
        max((event.get("peak_bytes") or 0 for event in step_events(events).values()), default=0)
        or None
    )
