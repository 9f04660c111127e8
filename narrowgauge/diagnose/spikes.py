"""Notices loss spikes as they come: a robust rule on the loss and the gradient norm of each step.

A value is measured against the WINDOW values before it. Through them goes a robust line: the medians of its older and of its newer
half, drawn on to the present step, so that a falling loss does not look calm and a rising one not like a spike. The scale is 1.4826
times the median distance from that line (MAD), which a Gaussian has as its deviation; a few wild values move neither. The same is
done with the logarithm of the gradient norm, since norms vary by factors.

    spike      the loss lies LOSS scales above its line; or LOSS_WITH_NORM scales, and the norm NORM scales above its own;
               or one of them is not finite
    begun      the first step of a spike is an event. It ends with the first loss below LOSS_WITH_NORM, and no event comes
               before that
    a shift    that stays becomes the line's own after half a window: a new level is no spike

One number alone would not do. Batches differ: losses of small ones scatter with heavy tails, and a norm may jump without harm.
`benchmarks/spike_rates.py` measures how often the rule errs on curves of sound runs, and how small a spike it finds.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

WINDOW = 64  # steps before the present one
LEAST = 32  # of them; before, nothing but a number that is not finite is an event
LOSS = 10.0
LOSS_WITH_NORM = 5.0
NORM = 10.0
NORMAL = 1.4826  # the deviation of a Gaussian over its median distance


@dataclass(frozen=True, kw_only=True)
class Spike:
    """The step at which a spike begins; `expected`: where the line is; `scales`: how far above it, None if not finite or not judged."""

    step: int
    loss: float
    grad_norm: float
    expected_loss: float | None
    loss_scales: float | None
    expected_grad_norm: float | None
    grad_norm_scales: float | None

    def event(self) -> dict[str, Any]:
        """The fields by name."""
        return asdict(self)


class Spikes:
    """Watches one run. Call `add` once a step, in order."""

    def __init__(self) -> None:
        self._losses: list[float] = []
        self._norms: list[float] = []
        self.inside = False  # a spike that has not ended

    def add(self, step: int, loss: float, grad_norm: float) -> Spike | None:
        """The spike that begins with this step, or None. Leave out steps that a loss scale of float16 skipped.

        loss       mean nats of the training batch
        grad_norm  before clipping
        Cost: a few sorts of WINDOW numbers, some 50 us.
        """
        logarithm = math.log(grad_norm) if grad_norm > 0 and math.isfinite(grad_norm) else math.nan
        line, scales = measured(self._losses, loss)
        norm_line, norm_scales = measured(self._norms, logarithm)
        with_norm = norm_scales is not None and norm_scales > NORM
        enough = LOSS_WITH_NORM if with_norm or self.inside else LOSS
        is_high = scales is not None and scales > enough
        is_high = is_high or not (math.isfinite(loss) and math.isfinite(grad_norm))
        begins, self.inside = is_high and not self.inside, is_high
        for values, value in ((self._losses, loss), (self._norms, logarithm)):
            if math.isfinite(value):
                values.append(value)
                del values[:-WINDOW]
        if not begins:
            return None
        return Spike(
            step=step,
            loss=loss,
            grad_norm=grad_norm,
            expected_loss=line,
            loss_scales=scales,
            expected_grad_norm=None if norm_line is None else math.exp(norm_line),
            grad_norm_scales=norm_scales,
        )

    def state_dict(self) -> dict[str, Any]:
        """As JSON: at most 2 * WINDOW numbers."""
        return {"losses": list(self._losses), "norms": list(self._norms), "inside": self.inside}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on where `state_dict` was taken."""
        self._losses, self._norms, self.inside = list(state["losses"]), list(state["norms"]), state["inside"]


def measured(before: Sequence[float], value: float) -> tuple[float | None, float | None]:
    """Where the line through the values before is now, and how many scales above it the value lies; None if too few, or not finite."""
    if len(before) < LEAST:
        return None, None
    half = len(before) // 2
    older, newer = statistics.median(before[:half]), statistics.median(before[-half:])
    slope = (newer - older) / (len(before) - half)
    middle = len(before) - (half + 1) / 2  # of the newer half
    line = newer + slope * (len(before) - middle)
    distances = [abs(each - newer - slope * (place - middle)) for place, each in enumerate(before)]
    scale = NORMAL * statistics.median(distances)
    if not math.isfinite(value):
        return line, None
    return line, (value - line) / max(scale, 1e-6 * abs(line), 1e-12)
