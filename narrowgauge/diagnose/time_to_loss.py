"""Seconds of training until two runs reach the same validation loss.

Tokens per second do not show a gain if the faster run learns less. The time to one loss counts both.
That loss is the higher of the two last ones, so both runs reach it. Evaluations and checkpoints do
not count: `elapsed_s` of the events holds training steps alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from narrowgauge.diagnose.format_text import loss_value

# Two evaluations are one straight line, which says nothing about the curve of the loss.
LEAST_EVALUATIONS = 3


@dataclass(frozen=True, kw_only=True)
class TimeToLoss:
    """Seconds of training of a run and its reference to one validation loss.

    losses   last validation losses of both, in `loss_unit` of the run
    """

    losses: tuple[float, float]
    run_s: float
    reference_s: float

    @property
    def loss(self) -> float:
        """The loss that both reach: the higher of the last ones."""
        return max(self.losses)

    @property
    def gain(self) -> float:
        """Times as fast as the reference; below 1 the run is slower."""
        return self.reference_s / self.run_s

    def words(self) -> str:
        """Say both times, as '31 s against 59 s to a validation loss of 3.95; the last ones are 3.95 and 3.94'."""
        run, reference = (seconds(each) for each in (self.run_s, self.reference_s))
        last = " and ".join(loss_value(each) for each in self.losses)
        return f"{run} against {reference} to a validation loss of {loss_value(self.loss)}; the last ones are {last}"


def seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 10 else f"{value:.1f} s"


def time_to_loss(
    run: Sequence[dict[str, Any]], reference: Sequence[dict[str, Any]]
) -> TimeToLoss | None:
    """Compare two lists of events as returned by `runs.read_metrics`.

    Returns None if a run has fewer than LEAST_EVALUATIONS, ends in a loss that is not finite, or
    lacks its seconds. Also None if the runs began at different steps: a branch's seconds include
    its parent's.
    """
    begun = [
        min((event["step"] for event in events if event["event"] == "step"), default=0)
        for events in (run, reference)
    ]
    if begun[0] != begun[1]:
        return None
    curves = [
        sorted(
            (event["step"], event["elapsed_s"], event["loss"])
            for event in events
            if event["event"] == "eval" and event.get("elapsed_s")
        )
        for events in (run, reference)
    ]
    if min(map(len, curves)) < LEAST_EVALUATIONS:
        return None
    losses = curves[0][-1][2], curves[1][-1][2]
    loss = max(losses)
    run_s, reference_s = (reached_s([each[1:] for each in curve], loss) for curve in curves)
    if not all(map(math.isfinite, losses)) or run_s is None or reference_s is None:
        return None
    return TimeToLoss(losses=losses, run_s=run_s, reference_s=reference_s)


def reached_s(curve: Sequence[Sequence[float]], loss: float) -> float | None:
    """Seconds at which a loss is reached for good; None if the last loss is above it.

    curve  [seconds, validation loss] of each evaluation, sorted. A straight line joins two of them;
           a loss below the first one counts from the first one's seconds
    """
    above = [place for place, (_, value) in enumerate(curve) if not value <= loss]
    if not above:
        return float(curve[0][0])
    if above[-1] == len(curve) - 1:
        return None
    (begin_s, higher), (end_s, lower) = curve[above[-1]], curve[above[-1] + 1]
    # An evaluation that is not finite has no line to the next one.
    share = (higher - loss) / (higher - lower) if math.isfinite(higher) else 1.0
    return float(begin_s + (end_s - begin_s) * share)
