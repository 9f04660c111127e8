"""Online detection of loss spikes: a robust rule on the loss and the gradient norm of each step.

A value is compared with the WINDOW values before it. A robust line runs through the medians of
their older and newer halves and is extrapolated to the present step, so that a falling loss does
not hide a spike and a rising one does not look like a spike. The scale is 1.4826 times the median
distance from that line (MAD), which equals the standard deviation of a Gaussian; a few outliers
move neither line nor scale. The gradient norm is compared by its logarithm, since norms vary by
factors.

    spike      the loss lies LOSS scales above its line; or LOSS_WITH_NORM scales, while the norm
               lies NORM scales above its own line; or loss or norm is not finite
    begin      the first step of a spike is an event. The spike ends with the first loss below
               LOSS_WITH_NORM, and no further event comes before that
    shift      a lasting shift moves the line within half a window: a new level is not a spike

A single threshold on the loss is not enough: losses of small batches have heavy tails, and a norm
may jump without harm. `benchmarks.closed spike_rates` measures the false alarms on curves of sound
runs, and the smallest spike that is detected.

Known limit: in a steeply falling loss the extrapolated line is low. 46 steps into a run it expected
2.5 where 3.0 came, and a jump of 0.5 from saturating amax histories was not reported.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

WINDOW = 64  # previous steps that a value is compared with
LEAST = 32  # with fewer values only non-finite numbers are events
LOSS = 10.0
LOSS_WITH_NORM = 5.0
NORM = 10.0
NORMAL = 1.4826  # standard deviation of a Gaussian divided by its median absolute deviation


@dataclass(frozen=True, kw_only=True)
class Spike:
    """The step at which a spike begins.

    expected_loss, expected_grad_norm  value of the line at this step
    loss_scales, grad_norm_scales      distance above the line in scales; None if not finite or not
                                       judged
    """

    step: int
    loss: float
    grad_norm: float
    expected_loss: float | None
    loss_scales: float | None
    expected_grad_norm: float | None
    grad_norm_scales: float | None

    def event(self) -> dict[str, Any]:
        """Fields by name."""
        return asdict(self)


class Spikes:
    """Spike detector of one run. Call `add` once per step, in order."""

    def __init__(self) -> None:
        self._losses: list[float] = []
        self._norms: list[float] = []
        self.inside = False  # True until a spike has ended

    def add(self, step: int, loss: float, grad_norm: float) -> Spike | None:
        """Return the spike that begins with this step, or None.

        loss       mean nats of the training batch
        grad_norm  norm before clipping

        Do not call it for steps that float16 loss scaling skipped. Costs a few sorts of WINDOW
        numbers, about 50 us.
        """
        logarithm = math.log(grad_norm) if grad_norm > 0 and math.isfinite(grad_norm) else math.nan
        line, scales = measured(self._losses, loss)
        norm_line, norm_scales = measured(self._norms, logarithm)
        with_norm = norm_scales is not None and norm_scales > NORM
        # Hysteresis: a spike begins above LOSS and lasts until the loss is below LOSS_WITH_NORM.
        enough = LOSS_WITH_NORM if with_norm or self.inside else LOSS
        is_high = scales is not None and scales > enough
        is_high = is_high or not (math.isfinite(loss) and math.isfinite(grad_norm))
        begins, self.inside = is_high and not self.inside, is_high
        for values, value in ((self._losses, loss), (self._norms, logarithm)):
            if math.isfinite(value):
                # A non-finite value would poison the medians of the next WINDOW steps.
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
        """State as JSON: at most 2 * WINDOW numbers."""
        return {"losses": list(self._losses), "norms": list(self._norms), "inside": self.inside}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        self._losses, self._norms, self.inside = (
            list(state["losses"]),
            list(state["norms"]),
            state["inside"],
        )


def measured(before: Sequence[float], value: float) -> tuple[float | None, float | None]:
    """(value of the line at the present step, distance of `value` above it in scales).

    None for fewer than LEAST values; the distance is also None if `value` is not finite.
    """
    if len(before) < LEAST:
        return None, None
    half = len(before) // 2
    older, newer = statistics.median(before[:half]), statistics.median(before[-half:])
    slope = (newer - older) / (len(before) - half)
    middle = len(before) - (half + 1) / 2  # position of the newer half's median
    line = newer + slope * (len(before) - middle)
    distances = [abs(each - newer - slope * (place - middle)) for place, each in enumerate(before)]
    scale = NORMAL * statistics.median(distances)
    if not math.isfinite(value):
        return line, None
    # A floor on the scale: equal losses would otherwise make any change an infinite spike.
    return line, (value - line) / max(scale, 1e-6 * abs(line), 1e-12)
