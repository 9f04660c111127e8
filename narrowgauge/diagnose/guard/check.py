"""One check of a guard: continuations from one state on the same batches become one number, and that a verdict.

difference   mean loss of narrow minus that of wide (BF16), over the second half of the stretch: in the first they have hardly parted
control      the same of two wide continuations that differ in the order of their sums alone, where one was taken
same         narrow minus wide at the first step, where both have the same weights
noise        what one batch adds to that by chance: steps between neighbouring differences soon after it, over sqrt(2). They have hardly
             parted there; and what they have parted makes the noise seem larger, not smaller
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from narrowgauge.diagnose.guard import same_weights
from narrowgauge.diagnose.guard.audit import Audited
from narrowgauge.diagnose.guard.evidence import Evidence
from narrowgauge.diagnose.guard.verdict import Verdict
from narrowgauge.diagnose.sensitivity import progress_between

CONTROL_EVERY = 4  # checks
PAIRS = 3  # of steps, after the first


def late_mean(losses: Sequence[float], steps: int) -> float:
    """Over the second half of a stretch of so many steps; NaN if it ended before."""
    return statistics.fmean(losses[steps // 2 :]) if len(losses) == steps else math.nan


def noise(narrow: Sequence[float], wide: Sequence[float]) -> list[float]:
    """Of the PAIRS of steps after the first one; of a shorter stretch fewer."""
    apart = [ours - theirs for ours, theirs in zip(narrow, wide, strict=False)][1 : 1 + 2 * PAIRS]
    return [abs(one - other) / math.sqrt(2) for one, other in zip(apart[::2], apart[1::2], strict=False)]


def wants_control(evidence: Evidence) -> bool:
    """Whether the next check takes a control as well: the first one, and every fourth from there."""
    return len(evidence.checks) % CONTROL_EVERY == 0


def judged(
    evidence: Evidence, begun: int, steps: int,
    narrow: Sequence[float], wide: Sequence[float], control: Sequence[float] | None = None, slopes: Mapping[str, float] | None = None,
    audited: Audited | None = None,
) -> tuple[Verdict, dict[str, Any]]:  # fmt: skip
    """The verdict with one more check, and what the log says of it.

    begun                  the step after which the continuations parted
    narrow, wide, control  their losses, one for each of `steps` optimizer steps, fewer of one that was lost; control: wide once more
    slopes                 of the gradients of the first step (`same_weights.slopes`); none where they were not seen
    audited                of the last steps of narrow (`audit`)
    """
    audited = audited or Audited()
    lost = next((begun + place for place, loss in enumerate(wide, 1) if not math.isfinite(loss)), 0)
    of_narrow, of_wide = late_mean(narrow, steps), late_mean(wide, steps)
    apart = None if control is None else late_mean(control, steps) - of_wide
    same = narrow[0] - wide[0] if narrow and wide else None
    outside = same_weights.outside(slopes) if slopes else None
    around = noise(narrow, wide)
    progress = progress_between(evidence.first, wide[steps // 2 :]) if evidence.first else None
    learnt = progress.shown if progress else (0.0 if evidence.first else None)
    verdict = evidence.add(
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
        "sentence": verdict.sentence,
    }
    return verdict, {**said, **verdict.event(), **audited.event()}
