"""Decide whether two continuations from one state have the same curve, judged by a control.

    difference    mean of run - reference, over the second half of their common steps
    control       BF16 against itself in another summation order: how far rounding alone drives two
                  continuations apart. Its second half is cut into BLOCKS; the largest block mean
                  counts
    equivalent    |difference| <= CONTROLS * control ("within control"); or above that and within
                  the margin, a share of the reference's loss or a number of nats ("within margin")
    worse         above both, with the higher loss
    better        above both, with the lower loss
    unknown       too few steps, no control, or a reference that could not have shown a difference
                  (`sensitivity`)

A verdict rests on one control, so it describes this pair of curves. It does not extend to other
seeds (`seeds`) or to repeated checks (`guard.evidence`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from narrowgauge.diagnose.format_text import decimals, loss_value, plural, signed
from narrowgauge.diagnose.guard_settings import LEAST_MARGIN, MARGIN
from narrowgauge.diagnose.verdict import (
    BETTER,
    CURVE,
    DIVERGED,
    EQUIVALENT,
    NOT_SENSITIVE,
    REFERENCE_DIVERGED,
    UNKNOWN,
    WITHIN_CONTROL,
    WITHIN_MARGIN,
    WORSE,
    Verdict,
    stored_word,
)

if TYPE_CHECKING:
    from narrowgauge.diagnose.sensitivity import Assay

BLOCKS = 4
# Times the largest control: two continuations that differ in rounding alone are about as far from a
# third as from each other.
CONTROLS = 2.0
FEWEST = 2 * BLOCKS  # least number of steps in the second half


@dataclass(frozen=True, kw_only=True)
class CurveComparison:
    """A curve against its reference, with numbers in nats.

    outcome     worse, better, equivalent or unknown
    detail      case within the outcome (`verdict`), or ''
    difference  mean difference; infinite if exactly one loss stopped being finite
    loss        mean loss of the reference
    control     largest block mean of the controls; None without a control
    margin      difference that counts as small
    steps       number of steps in the second half
    why         reason why the reference could not have shown a difference; '' if it could
    """

    outcome: str
    detail: str
    difference: float
    loss: float
    control: float | None
    margin: float
    steps: int
    why: str = ""

    def event(self) -> dict[str, Any]:
        """Fields for a file, with the word of earlier versions under `verdict`."""
        fields = asdict(self)
        detail = fields.pop("detail")
        return {"verdict": stored_word(CURVE, self.outcome, detail), **fields}

    @property
    def differs(self) -> bool:
        """True if the difference is shown to be above control and margin, in either direction."""
        return self.outcome in (WORSE, BETTER)

    @property
    def is_within_control(self) -> bool:
        """True if rounding alone explains the difference."""
        return self.outcome == EQUIVALENT and self.detail != WITHIN_MARGIN

    @property
    def is_within_margin(self) -> bool:
        """True if the difference is above control, but harmless."""
        return self.detail == WITHIN_MARGIN

    def verdict(self, change: str = "the number format") -> Verdict:
        """The verdict. change: difference between the runs, which may be the cause."""
        return Verdict(
            outcome=self.outcome,
            detail=self.detail,
            estimate=self.difference if self.steps else None,
            margin=self.margin if math.isfinite(self.margin) else None,
            evidence={} if self.control is None else {"control": self.control},
            sentence=self.sentence(change),
        )

    @property
    def numbers(self) -> str:
        """Numbers in words: "+0.0003 nats over the last 50 steps; control 0.0002"."""
        places = decimals(self.difference)
        control = (
            "no control"
            if self.control is None
            else f"control {self.control:.{decimals(self.control)}f}"
        )
        return f"{signed(self.difference, places)} nats over the last {plural(self.steps, 'step')}; {control}"

    def sentence(self, change: str = "the number format") -> str:
        """Verdict as a sentence. change: difference between the runs, which may be the cause."""
        if self.why:
            return f"Unknown: {self.why[0].lower()}{self.why[1:]}"
        if not self.steps:
            return "Not known: they have no step on the same batch in common."
        if not math.isfinite(self.loss) and self.is_within_control:
            return f"Both losses stop being finite: the cause is not {change}."
        if not math.isfinite(self.difference):
            which = "reference" if not math.isfinite(self.loss) else "run"
            return (
                f"The loss of the {which} alone stops being finite: {change} makes the difference."
            )
        if self.is_within_control:
            return (
                f"The curve is the same within control ({self.numbers}): the cause is not {change}."
            )
        if self.is_within_margin:
            return (
                f"The curve differs by more than control, but by less than the margin of {self.margin:.4f} nats ({self.numbers}): "
                f"{change} makes no more difference than that."
            )
        if self.differs:
            side = "higher" if self.difference > 0 else "lower"
            beside = f"{self.numbers}; margin {self.margin:.4f}; loss {loss_value(self.loss)}"
            return f"The curve is {side} ({beside}): {change} makes the difference."
        if self.control is None:
            return f"Not known ({self.numbers}): without a control nobody knows how far rounding alone drives two runs apart."
        return f"Not known: {plural(self.steps, 'step')} of the second half in common, and at least {FEWEST} are needed."


def judge(
    run: Sequence[float],
    reference: Sequence[float],
    controls: Sequence[tuple[Sequence[float], Sequence[float]]] = (),
    margin: float = MARGIN,
    least_margin: float = LEAST_MARGIN,
    assay_at: Callable[[float], Assay] | None = None,
) -> CurveComparison:
    """Judge the losses of two continuations at the same steps, in order.

    controls  pairs of losses of the same steps. A curve may end early, where its loss was not
              finite
    assay_at  assay_at(margin in nats) -> assay sensitivity of the reference (`sensitivity`). None
              skips this test, for steps that are searched for a cause and support no claim about
              recipes
    """
    shortest = min(len(run), len(reference))
    lost = [_is_lost(each) for each in (run, reference)]
    if any(lost):
        # Lost means not finite: a loss that only the run lost counts as +inf, one that only the
        # reference lost as -inf.
        loss = math.inf if lost[1] else statistics.fmean(reference[len(reference) // 2 :])
        gap = 0.0 if all(lost) else math.inf if lost[0] else -math.inf
        outcome, detail = (
            (EQUIVALENT, DIVERGED)
            if all(lost)
            else (WORSE, DIVERGED)
            if lost[0]
            else (BETTER, REFERENCE_DIVERGED)
        )
        # The margin is NaN: there is no mean loss of which it could be a share.
        return CurveComparison(
            outcome=outcome,
            detail=detail,
            difference=gap,
            loss=loss,
            control=None,
            margin=math.nan,
            steps=shortest,
        )
    half = slice(shortest // 2, shortest)
    count = shortest - shortest // 2
    if not shortest:
        return CurveComparison(
            outcome=UNKNOWN,
            detail="",
            difference=math.nan,
            loss=math.nan,
            control=None,
            margin=math.nan,
            steps=0,
        )
    # One number for all steps: neighbouring steps are correlated, so they are not independent
    # samples.
    difference = statistics.fmean(a - b for a, b in zip(run[half], reference[half], strict=True))
    loss = statistics.fmean(reference[half])
    allowed = max(margin * abs(loss), least_margin)
    assay = None if assay_at is None else assay_at(allowed)
    if assay is not None and assay.is_sensitive:
        allowed = assay.margin
    found = [size for pair in controls if (size := control_of(*pair)) is not None]
    # The largest of several controls, so that a verdict errs towards "within control".
    control = max(found, default=None)
    outcome, detail = UNKNOWN, ""
    if count >= FEWEST and control is not None:
        outcome, detail = (
            (EQUIVALENT, WITHIN_CONTROL)
            if abs(difference) <= CONTROLS * control
            else (EQUIVALENT, WITHIN_MARGIN)
            if abs(difference) <= allowed
            else (WORSE if difference > 0 else BETTER, "")
        )
    # Bit-identical curves need no control.
    if not any(a != b for a, b in zip(run, reference, strict=False)):
        outcome, detail, control = EQUIVALENT, WITHIN_CONTROL, control or 0.0
    # A difference that was shown proves that these runs could show one.
    why = "" if assay is None or outcome in (WORSE, BETTER) else assay.sentence
    if why:
        outcome, detail = UNKNOWN, NOT_SENSITIVE
    return CurveComparison(
        outcome=outcome,
        detail=detail,
        difference=difference,
        loss=loss,
        control=control,
        margin=allowed,
        steps=count,
        why=why,
    )


def control_of(one: Sequence[float], other: Sequence[float]) -> float | None:
    """Largest mean difference of a block in the second half.

    None if there are too few steps or a loss is not finite.
    """
    shortest = min(len(one), len(other))
    first = shortest // 2
    length = (shortest - first) // BLOCKS
    if shortest - first < FEWEST or _is_lost(one) or _is_lost(other):
        return None
    gaps = [a - b for a, b in zip(one[first:shortest], other[first:shortest], strict=True)]
    return max(
        abs(statistics.fmean(gaps[place * length : (place + 1) * length]))
        for place in range(BLOCKS)
    )


def _is_lost(losses: Sequence[float]) -> bool:
    return any(not math.isfinite(each) for each in losses)
