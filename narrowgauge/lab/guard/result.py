"""Result of a guard after its newest check, as numbers and as sentences.

GEMMs of a step whose numbers do not follow their recipe (`audit`) are a table:

    Unlike = {"layers.1.up_proj:output": (kind, detail)}       by layer and GEMM

    stale    weight codes that are not a cast of the current weight
    uncast   codes of x or gy that are not its cast: another scale, another factor, missing rows
    kernel   a result further from the product of its own codes than rounding explains
    stuck    stochastic rounding repeats the random numbers of the previous step

Imports no torch, as `evidence`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from narrowgauge.diagnose.format_text import count, loss_value, plural, signed
from narrowgauge.diagnose.sensitivity import SHARE
from narrowgauge.diagnose.verdict import (
    EQUIVALENT,
    GUARD,
    NOT_SENSITIVE,
    REFERENCE_DIVERGED,
    UNKNOWN,
    WORSE,
    Verdict,
    stored_word,
)

# Evidence on which "worse" rests; "stretch" stands for the mean losses of the probes.
STRETCH, SAME_WEIGHTS, GRADIENT, NUMBERS = "stretch", "same weights", "gradient", "numbers"
# Details of "worse", beside GRADIENT and NUMBERS. A lower loss is an alarm too.
HIGHER, LOWER, NOT_FINITE = "higher", "lower", "not finite"
STALE, UNCAST, KERNEL, STUCK = "stale", "uncast", "kernel", "stuck"  # kinds of `Unlike`
# Of the first check's loss: a loss that has fallen by less since then is on a plateau.
PLATEAU = 0.02
FORESIGHT = 100  # number of future checks that are simulated
NAMED = 3  # weights or layers named in a sentence
WIDE = 0.02  # of the loss: a larger margin is mentioned in the sentence

Unlike = Mapping[str, Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class GuardResult:
    """Outcome after the newest check, with the numbers behind it; differences in nats."""

    outcome: str  # worse, equivalent or unknown; a lower loss counts as worse
    detail: str  # of worse: HIGHER, LOWER, GRADIENT, NUMBERS, NOT_FINITE; or see `verdict`
    seen_on: str  # evidence for "worse": "stretch", "same weights", "gradient", "numbers"; else ""
    checks: int
    difference: float  # of the newest check
    control: float | None  # of the newest check
    same: float | None  # of the newest check: the difference at its first step, on the same weights
    loss: float  # the reference's loss at the newest check
    usual: (
        float | None
    )  # the reference's median loss over the RECENT checks before, None without two
    since: int  # first check, from 1, that the means include
    mean: float  # mean of the differences that count; NaN without any
    same_mean: float | None  # mean of the differences on the same weights
    margin: float
    certified: float  # margin of "within": at most a share of the run's progress
    learnt: float | None  # progress: how far the reference's loss has fallen; None: not known
    trivial: float | None  # loss of the trivial predictor; None: not known
    scale: float  # scale of one check's noise
    e_worse: float  # mean of the next two
    e_worse_stretch: float
    e_worse_same: float | None
    e_within: float
    sick: tuple[str, ...]  # weights with a deviating gradient at this check and the previous one
    more_checks: (
        int | None
        # Checks until a verdict if further differences equal the mean; 0 with a verdict; None:
        # beyond FORESIGHT.
    )

    # GEMMs whose numbers at this check do not follow their recipe.
    unlike: Unlike = field(default_factory=dict)
    first_loss: float | None = None  # the reference's loss at the first check; None at that check

    def event(self) -> dict[str, Any]:
        """Fields of the `guard` event; `verdict` has the word of all versions."""
        fields = asdict(self)
        detail = fields.pop("detail")
        return {
            "verdict": self.name,
            "direction": detail if self.outcome == WORSE else "",
            **fields,
            "plateau": self.is_plateau,
        }

    @property
    def name(self) -> str:
        """The outcome in the word of `guard` events: worse, within, unknown or reference."""
        return stored_word(GUARD, self.outcome, self.detail)

    @property
    def verdict(self) -> Verdict:
        evidence = {"e_worse": self.e_worse, "e_within": self.e_within}
        return Verdict(
            outcome=self.outcome,
            detail=self.detail,
            estimate=self.mean,
            margin=self.certified if self.outcome == EQUIVALENT else self.margin,
            evidence=evidence,
            sentence=self.sentence,
        )

    @property
    def is_plateau(self) -> bool:
        """True if the loss has hardly moved since the first check."""
        return self.first_loss is not None and self.first_loss - self.loss < PLATEAU * abs(
            self.first_loss
        )

    @property
    def sentence(self) -> str:
        """The verdict in words.

        Followed, if so, by sentences on GEMMs with wrong numbers and on a loss that stands still.
        """
        said = (
            [self._judged()]
            if self.seen_on != NUMBERS
            else ["The run does not compute what its recipe says."]
        )
        if self.unlike:
            said.append(sentence_on_unlike(self.unlike))
        if self.first_loss is not None and self.is_plateau and self._is_open:
            first, now = loss_value(self.first_loss), loss_value(self.loss)
            said.append(
                f"The loss has hardly moved since the first check ({first}, now {now}): what holds a run on a plateau does not show "
                "from the same state. Compare it with a short run in BF16 from the start: narrowgauge study."
            )
        return " ".join(said)

    def _judged(self) -> str:
        if self.detail == REFERENCE_DIVERGED:
            was = "" if self.usual is None else f", it was {self.usual:.4f} before"
            return (
                f"The BF16 reference itself diverges (loss {loss_value(self.loss)}{was}): the format of this stretch is not the cause, "
                "and nothing can be judged here."
            )
        if self.detail == NOT_FINITE:
            return (
                "The loss in narrow numbers is not finite, and that of BF16 from the same state is."
            )
        if self.detail == GRADIENT:
            return self._of_gradients()
        margin = f"the margin of {self.margin:.4f} nats"
        if self.outcome == WORSE:
            return self._worse(margin)
        mean = f"{signed(self.mean)} nats {self._over()}"
        if self.detail == NOT_SENSITIVE:
            return self._of_too_little(mean)
        if self.outcome == EQUIVALENT:
            margin = f"the margin of {self.certified:.4f} nats"
            same = (
                "" if self.same_mean is None else f", {signed(self.same_mean)} on the same weights"
            )
            wide = (
                f", {self.margin / abs(self.loss):.0%} of the loss"
                if self.margin > WIDE * abs(self.loss)
                else ""
            )
            return (
                f"From the same state BF16 is no more than {margin}{wide} away: {mean}{same}, E = {self.e_within:,.0f}. "
                "What was lost before the checks is not seen."
            )
        margin = f"the margin of {self.certified:.4f} nats"
        more = (
            f"about {plural(self.more_checks, 'more check')} like these would tell"
            if self.more_checks
            else f"more than {count(FORESIGHT)} checks like these would not tell, since the mean lies at the margin"
        )
        return f"Not known yet: {mean}, {margin}; {more}."

    @property
    def _is_open(self) -> bool:
        """True if no alarm was raised and the reference can judge."""
        return self.outcome in (EQUIVALENT, UNKNOWN) and self.detail != REFERENCE_DIVERGED

    def _of_too_little(self, mean: str) -> str:
        fell = (
            ""
            if self.learnt is None
            else f" The loss of BF16 has fallen by {self.learnt:.4f} nats since the first steps,"
        )
        share = (
            f" and the margin of {self.margin:.4f} nats is more than {100 * SHARE:g} % of that."
            if fell
            else ""
        )
        trivial = ""
        if self.trivial is not None and not self.loss < self.trivial:
            trivial = f" It is {self.loss:.4f}, not below the {self.trivial:.4f} of the trivial predictor."
        return (
            f"Unknown: this run has not learnt enough to tell: {mean}.{fell}{share}{trivial} Train longer, with a larger learning rate, "
            "or name a smaller margin."
        )

    def _over(self) -> str:
        over = plural(self.checks - self.since + 1, "check")
        return f"on average over {'the last ' if self.since > 1 else ''}{over}"

    def _worse(self, margin: str) -> str:
        is_same = self.seen_on == SAME_WEIGHTS
        begin = (
            "On the same weights and batch the loss" if is_same else "From the same state the loss"
        )
        mean = f"{signed(self.same_mean if is_same else self.mean)} nats {self._over()}"
        lower = " A lower loss is a departure too: values that saturate lower it at first, and weights may have grown used to a fault."
        hint = lower if self.detail == LOWER else ""
        return f"{begin} is {self.detail} than that of BF16 by more than {margin}: {mean}, E = {self.e_worse:,.0f}.{hint}"

    def _of_gradients(self) -> str:
        named = ", ".join(self.sick[:NAMED])
        others = len(self.sick) - NAMED
        return (
            f"The gradient of {plural(len(self.sick), 'weight')} is not that of BF16 on the same weights and batch, at two checks in a "
            f"row: {named}{f' and {others} more' if others > 0 else ''}."
        )


_SAID = {
    STALE: "the weight codes in use are not a cast of the weights as they are",
    UNCAST: "the codes of an input or a gradient are not a cast of it",
    KERNEL: "the kernel's result is not the product of its own operands",
    STUCK: "stochastic rounding has the same random numbers at every step",
}
_REMEDY = {
    STALE: "Call narrowgauge.advance(model) after each optimizer step, and write weights with torch's in-place operations, not through "
    ".data.",
    UNCAST: "`narrowgauge info` checks the casts on this machine, narrowgauge.lab.blame those of the model.",
    KERNEL: "`narrowgauge info` checks the kernels on this machine, narrowgauge.lab.blame those of the model.",
    STUCK: "Remove the call that seeds torch's generator, or sets its state, at each step.",
}


def sentence_on_unlike(unlike: Unlike) -> str:
    """Sentences for each kind with its layers and the next step; '' for none."""
    said = []
    for kind, words in _SAID.items():
        own = {name: detail for name, (each, detail) in unlike.items() if each == kind}
        if not own:
            continue
        named = "; ".join(
            f"{name}, {detail}" if detail else name for name, detail in list(own.items())[:NAMED]
        )
        more = f"; and {len(own) - NAMED} more" if len(own) > NAMED else ""
        said.append(f"In {plural(len(own), 'product')} {words} ({named}{more}). {_REMEDY[kind]}")
    return " ".join(said)
