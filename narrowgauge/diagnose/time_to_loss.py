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


@dataclass(frozen=True, kw_only=True)
class TimeToLoss:
    """Seconds of training of a run and its reference to one validation loss.

    loss     the higher of their last validation losses, in `loss_unit` of the run
    """

    loss: float
    run_s: float
    reference_s: float

    @property
    def gain(self) -> float:
        """Times as fast as the reference; below 1 the run is slower."""
        return self.reference_s / self.run_s

    def words(self, reference_name: str) -> str:
        """Say both times, as '31 s, and 59 s of bf16, to a validation loss of 3.95'."""
        run, reference = (seconds(each) for each in (self.run_s, self.reference_s))
        return f"{run}, and {reference} of {reference_name}, to a validation loss of {loss_value(self.loss)}"


def seconds(value: float) -> str:
    return f"{value:,.0f} s" if value >= 10 else f"{value:.1f} s"


def time_to_loss(
    run: Sequence[dict[str, Any]], reference: Sequence[dict[str, Any]]
) -> TimeToLoss | None:
    """Compare two lists of events as returned by `runs.read_metrics`.

    Returns None if a run has no finite evaluation at its end, or did not record its seconds.
    """
    curves = [
        sorted(
            (event["step"], event["elapsed_s"], event["loss"])
            for event in events
            if event["event"] == "eval" and event.get("elapsed_s")
        )
        for events in (run, reference)
    ]
    if not all(curves):
        return None
    loss = max(curve[-1][2] for curve in curves)
    run_s, reference_s = (reached_s([each[1:] for each in curve], loss) for curve in curves)
    if not math.isfinite(loss) or run_s is None or reference_s is None:
        return None
    return TimeToLoss(loss=loss, run_s=run_s, reference_s=reference_s)


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
