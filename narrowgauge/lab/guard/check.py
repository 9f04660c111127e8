"""One guard check: replays from one state on the same batches become numbers and a result.

difference   mean loss of the run minus mean loss of BF16, over the second half of the probe; in the
             first half the two have hardly diverged
control      the same for two BF16 probes that differ in rounding alone, if a control was run
same         run minus BF16 at the first step, where both have the same weights
noise        random part of `same` from a single batch: steps between neighbouring differences soon
             after the first step, over sqrt(2). The two have hardly diverged there, and divergence
             makes the noise seem larger, not smaller
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from narrowgauge.diagnose.sensitivity import progress_between
from narrowgauge.lab.guard import same_weights
from narrowgauge.lab.guard.audit import Audited
from narrowgauge.nn.coded_weight import CodedWeight
from narrowgauge.optim import shards

if TYPE_CHECKING:
    from narrowgauge.lab.guard.evidence import Evidence
    from narrowgauge.lab.guard.result import GuardResult

CONTROL_EVERY = 4  # every fourth check runs a control
PAIRS = 3  # pairs of steps after the first step


def late_mean(losses: Sequence[float], steps: int) -> float:
    """Mean over the second half of a probe of `steps` steps; NaN if it ended early."""
    return statistics.fmean(losses[steps // 2 :]) if len(losses) == steps else math.nan


def noise(narrow: Sequence[float], wide: Sequence[float]) -> list[float]:
    """Noise values from PAIRS pairs of steps after the first one; fewer for a shorter probe."""
    # Disjoint pairs: a shared difference would make the values dependent.
    apart = [ours - theirs for ours, theirs in zip(narrow, wide, strict=False)][1 : 1 + 2 * PAIRS]
    return [
        abs(one - other) / math.sqrt(2) for one, other in zip(apart[::2], apart[1::2], strict=False)
    ]


def wants_control(evidence: Evidence) -> bool:
    """True if the next check runs a control: the first check and every fourth one after it."""
    return len(evidence.checks) % CONTROL_EVERY == 0


@torch.no_grad()
def nudge(model: nn.Module) -> None:
    """Move every second float32 weight, or every 64th 16-bit weight, by one unit in the last place.

    This is the control's other rounding. Reversed rows are no control under dropout, because the
    masks then fall on other rows: their differences of 0.0005 to 0.0031 nats hide the differences
    of a recipe (decisions/trust.md). Ranks that hold copies of a weight make identical changes.
    """
    for parameter in model.parameters():
        if isinstance(parameter, CodedWeight):  # stored as codes: there is no last bit to move
            continue
        part = shards.local(parameter)
        if part.is_floating_point() and part.itemsize > 1 and part.untyped_storage().nbytes():
            # The last bit of a 16-bit weight is a far larger step, so fewer of them are moved.
            some = part[..., :: 2 if part.itemsize > 2 else 64] if part.ndim else part
            some.copy_(torch.nextafter(some, torch.full_like(some, torch.inf)))


def judged(
    evidence: Evidence, begun: int, steps: int,
    narrow: Sequence[float], wide: Sequence[float], control: Sequence[float] | None = None, slopes: Mapping[str, float] | None = None,
    audited: Audited | None = None,
) -> tuple[GuardResult, dict[str, Any]]:  # fmt: skip
    """Add one check; returns the result and the event for the log.

    begun                  step after which the probe started
    narrow, wide, control  losses of the run, of BF16 and of BF16 with other rounding, one per step;
                           fewer if a loss was not finite
    slopes                 slopes of the first step's gradients (`same_weights.slopes`); None: not
                           compared
    audited                audit of the run's last steps (`audit`)
    """
    audited = audited or Audited()
    lost = next((begun + place for place, loss in enumerate(wide, 1) if not math.isfinite(loss)), 0)
    # NaN if a probe ended early, which the evidence reads as "worse" or "reference".
    of_narrow, of_wide = late_mean(narrow, steps), late_mean(wide, steps)
    apart = None if control is None else late_mean(control, steps) - of_wide
    same = narrow[0] - wide[0] if narrow and wide else None
    outside = same_weights.outside(slopes) if slopes else None
    around = noise(narrow, wide)
    progress = progress_between(evidence.first, wide[steps // 2 :]) if evidence.first else None
    # None: the first losses are unknown (a resumed older state). 0: known, but no progress is
    # shown.
    learnt = progress.shown if progress else (0.0 if evidence.first else None)
    result = evidence.add(
        of_narrow - of_wide,
        loss=of_wide,
        control=apart,
        same=same,
        noise=around,
        outside=outside,
        unlike=audited.unlike,
        learnt=learnt,
    )
    ends = [min(slopes.values()), max(slopes.values())] if slopes else None
    said = {
        "begun": begun,
        "steps": steps,
        "wide": of_wide,
        "narrow": of_narrow,
        "lost": lost,
        "weights": len(slopes or ()),
        "slopes": ends,
        "outside": outside,
        "noise": around,
        "sentence": result.sentence,
    }
    return result, {**said, **result.event(), **audited.event()}
