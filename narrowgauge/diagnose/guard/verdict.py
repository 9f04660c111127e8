"""What is known of a run after a check, as numbers and as a sentence."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from narrowgauge.diagnose.format_text import count, loss_value, plural, signed
from narrowgauge.diagnose.guard.unlike import Unlike
from narrowgauge.diagnose.guard.unlike import sentence as unlike_sentence
from narrowgauge.diagnose.sensitivity import SHARE

WORSE, WITHIN, UNKNOWN, REFERENCE = "worse", "within", "unknown", "reference"
STRETCH, SAME_WEIGHTS, GRADIENT, NUMBERS = "stretch", "same weights", "gradient", "numbers"  # what "worse" was seen on
PLATEAU = 0.02  # of the first check's loss: a run whose loss fell by less since then has hardly moved
FORESIGHT = 100  # checks ahead
NAMED = 3  # weights in a sentence
WIDE = 0.02  # of the loss: a larger margin is told


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is known after the newest check, with the numbers behind it; differences in nats."""

    name: str  # worse, within, unknown, reference
    direction: str  # of what is worse: "higher", "lower", "gradient", "numbers", "not finite"; else ""
    seen_on: str  # of what is worse: "stretch", "same weights", "gradient", "numbers"; else ""
    checks: int
    difference: float  # of the newest check
    control: float | None  # of the newest check
    same: float | None  # of the newest check: the difference of its first step, on the same weights
    loss: float  # the reference's at the newest check
    usual: float | None  # the reference's median loss over the RECENT checks before, None without two
    since: int  # the check that the means begin with, from 1
    mean: float  # of the differences that count; NaN without any
    same_mean: float | None  # the same on the same weights
    margin: float
    certified: float  # the margin of "within": at most a share of what the run learnt
    learnt: float | None  # how far the reference's loss has fallen, as far as that is shown; None: not known
    trivial: float | None  # the loss of the trivial predictor; None: not known
    scale: float  # of one check's noise
    e_worse: float  # the mean of the next two
    e_worse_stretch: float
    e_worse_same: float | None
    e_within: float
    sick: tuple[str, ...]  # weights whose gradient was another at this check and the one before
    more_checks: (
        int | None
    )  # until a verdict if the next differences are like the mean; 0 with a verdict; None: beyond FORESIGHT

    unlike: Unlike = field(default_factory=dict)  # products whose numbers at this check are not those of their recipe
    first_loss: float | None = None  # the reference's at the first check; None at that one

    def event(self) -> dict[str, Any]:
        """The fields by name; `name` is called `verdict`."""
        fields = asdict(self)
        return {"verdict": fields.pop("name"), **fields, "plateau": self.is_plateau}

    @property
    def is_plateau(self) -> bool:
        """Whether the loss has hardly moved since the first check."""
        return self.first_loss is not None and self.first_loss - self.loss < PLATEAU * abs(self.first_loss)

    @property
    def sentence(self) -> str:
        """The verdict in words; then, where it applies, that the loss stands still, and the products whose numbers are wrong."""
        said = [self._verdict()] if self.seen_on != NUMBERS else ["The run does not compute what its recipe says."]
        if self.unlike:
            said.append(unlike_sentence(self.unlike))
        if self.first_loss is not None and self.is_plateau and self.name in (WITHIN, UNKNOWN):
            first, now = loss_value(self.first_loss), loss_value(self.loss)
            said.append(
                f"The loss has hardly moved since the first check ({first}, now {now}): what holds a run on a plateau does not show "
                "from the same state. Compare it with a short run in BF16 from the start: narrowgauge study."
            )
        return " ".join(said)

    def _verdict(self) -> str:
        if self.name == REFERENCE:
            was = "" if self.usual is None else f", it was {self.usual:.4f} before"
            return (
                f"The BF16 reference itself diverges (loss {loss_value(self.loss)}{was}): the format of this stretch is not the cause, "
                "and nothing can be judged here."
            )
        if self.direction == "not finite":
            return "The loss in narrow numbers is not finite, and that of BF16 from the same state is."
        if self.direction == GRADIENT:
            return self._of_gradients()
        margin = f"the margin of {self.margin:.4f} nats"
        if self.name == WORSE:
            return self._worse(margin)
        mean = f"{signed(self.mean)} nats {self._over()}"
        if self.cannot_tell:
            return self._of_too_little(mean)
        if self.name == WITHIN:
            margin = f"the margin of {self.certified:.4f} nats"
            same = "" if self.same_mean is None else f", {signed(self.same_mean)} on the same weights"
            wide = f", {self.margin / abs(self.loss):.0%} of the loss" if self.margin > WIDE * abs(self.loss) else ""
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
    def cannot_tell(self) -> bool:
        """Whether it is unknown because the run has not learnt enough to tell (`sensitivity`)."""
        return self.name == UNKNOWN and self.certified < self.margin

    def _of_too_little(self, mean: str) -> str:
        fell = (
            ""
            if self.learnt is None
            else f" The loss of BF16 has fallen by {self.learnt:.4f} nats since the first steps,"
        )
        share = f" and the margin of {self.margin:.4f} nats is more than {100 * SHARE:g} % of that." if fell else ""
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
        begin = "On the same weights and batch the loss" if is_same else "From the same state the loss"
        mean = f"{signed(self.same_mean if is_same else self.mean)} nats {self._over()}"
        lower = " A lower loss is a departure too: values that saturate lower it at first, and weights may have grown used to a fault."
        hint = lower if self.direction == "lower" else ""
        return f"{begin} is {self.direction} than that of BF16 by more than {margin}: {mean}, E = {self.e_worse:,.0f}.{hint}"

    def _of_gradients(self) -> str:
        named = ", ".join(self.sick[:NAMED])
        others = len(self.sick) - NAMED
        return (
            f"The gradient of {plural(len(self.sick), 'weight')} is not that of BF16 on the same weights and batch, at two checks in a "
            f"row: {named}{f' and {others} more' if others > 0 else ''}."
        )
