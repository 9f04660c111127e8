"""The ladder of debugging: which changes a suspicious stretch of a run is repeated under, and what follows from how they go.

    again            the run's own recipe            does it repeat?
    bf16             every product in 16 bits        the same curve? then it is not the number format
    control          bf16 in another order of sums   how far rounding alone drives two continuations apart
    recipe:NAME      more conservative recipes       one after another, until one mends it
    product:NAME     one matrix product in 16 bits   which one mends it alone

The order is that of practice: what rules out most comes first, and what is ruled out is not computed. Each rung starts from one checkpoint
and sees the same batches, so they differ in their numbers alone. No torch here: `train.debug` takes the steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from narrowgauge.diagnose.format_text import count, decimals, loss_value, plural, signed
from narrowgauge.diagnose.forms import listed, number, record, refuse, table, text
from narrowgauge.diagnose.same_curve import DIFFERS, SAME, SMALL, UNKNOWN, SameCurve, judge

AGAIN, WIDE, CONTROL, RECIPE, PRODUCT = "again", "bf16", "control", "recipe:", "product:"
ELSEWHERE = "Look at the data of these steps, at the learning rate, and at modules that are no Linears."
PRODUCTS = ("output", "grad_input", "grad_weight")
REST = 0.5  # of a gap: what a change that mends it leaves at most

# Recipe -> the next that rounds less: scales of this step before those of earlier ones, of rows before whole tensors, 8 bits before 4.
# After the last comes bf16, which is a rung of its own.
MORE_CONSERVATIVE = {
    "fp8-delayed": "fp8-current", "fp8-current-fast": "fp8-current", "fp8-current": "fp8-row", "fp8-row": "mxfp8", "fp8-block": "mxfp8",
    "nvfp4": "mxfp8", "mxfp4": "mxfp8", "int4-lsq-luq": "int4-hq-bs", "int4-hq-lss": "int4-hq-bs", "int4-minmax-sr": "int4-hq-bs",
    "int4-row-sr": "int4-hq-bs", "int4-hq-bs": "int8",
}  # fmt: skip


def chain(recipe: str) -> list[str]:
    """The recipes below one on the ladder, the next one first; [] if bf16 comes next."""
    found = []
    while (recipe := MORE_CONSERVATIVE.get(recipe, "")) and recipe not in found:
        found.append(recipe)
    return found


TAKEN = record(
    {
        "rungs": listed(
            record(
                {"name": text},
                {
                    "losses": listed(number(finite=False)),
                    "lost": number(0, whole=True),
                    "refused": text,
                    "spent_s": number(0),
                },
            )
        ),
        "scores": table(table(number(finite=False))),
    }
)


@dataclass(frozen=True, kw_only=True)
class Rung:
    """One stretch. lost: the step whose loss or gradient norm was not finite, 0: none; refused: why it was not taken."""

    name: str
    losses: list[float] = field(default_factory=list)
    lost: int = 0
    refused: str = ""
    spent_s: float = 0.0

    @property
    def curve(self) -> list[float]:
        """With a loss that is not finite where it was lost, though a gradient may have been it."""
        return [*self.losses, math.nan] if self.lost and all(map(math.isfinite, self.losses)) else self.losses


@dataclass(kw_only=True)
class Ladder:
    """What is known of a run around a step.

    begun, steps  after which step the stretches begin, and how many steps they have; asked: the step in question
    logged        losses of the run itself at these steps, by step
    scores        of the validation set at `begun`: {"narrow": {...}, "wide": {...}}, wide only where that differs
    """

    recipe: str
    begun: int
    steps: int
    asked: int
    logged: Mapping[int, float] = field(default_factory=dict)
    rungs: dict[str, Rung] = field(default_factory=dict)
    scores: Mapping[str, Mapping[str, float]] = field(default_factory=dict)

    def next(self) -> str:
        """The name of the rung to take now; '' if the ladder has ended."""
        for name in (AGAIN, *((WIDE, CONTROL) if self.recipe else (CONTROL,))):
            if name not in self.rungs:
                return name
        if not self.recipe or not self.is_behind():
            return ""
        for name in chain(self.recipe):
            if RECIPE + name not in self.rungs:
                return RECIPE + name
            if self.mends(RECIPE + name):
                break
        return next((PRODUCT + each for each in PRODUCTS if PRODUCT + each not in self.rungs), "")

    def most(self) -> int:
        """Rungs, at most."""
        return 3 + len(chain(self.recipe)) + len(PRODUCTS) if self.recipe else 2

    def against_bf16(self, name: str = AGAIN) -> SameCurve:
        wide, control = self.rungs[WIDE].curve, self.rungs[CONTROL].curve
        return judge(self.rungs[name].curve, wide, [(control, wide)])

    def is_behind(self) -> bool:
        """Whether the run's own recipe has something to mend: a curve above that of BF16, or far from it on either side."""
        own = self.against_bf16()
        return own.name == DIFFERS or (own.name == SMALL and own.difference > 0)

    def mends(self, name: str) -> bool:
        """Whether a rung brings the curve back to that of BF16: within control or the margin, with less than REST of the gap left.

        Within the margin or control alone would not do: a gap that is hardly above them is brought below by chance. Within control would
        be too much: what is left is what the sound products of the recipe cost.
        """
        if self.rungs[name].refused:
            return False
        found, own = self.against_bf16(name), self.against_bf16()
        return found.name in (SAME, SMALL) and abs(found.difference) < REST * abs(own.difference)

    def mended(self) -> list[str]:
        """The rungs that mend it, recipes first."""
        return [name for name in self.rungs if name.startswith((RECIPE, PRODUCT)) and self.mends(name)]

    # --- in words

    def repeats(self) -> str:
        """Whether the run's own recipe gives the losses that the run has logged."""
        own = dict(enumerate(self.rungs[AGAIN].losses, self.begun + 1))
        common = sorted(own.keys() & self.logged.keys())
        if not common:
            return "The run has logged no loss of these steps."
        gap, step = max((abs(own[step] - self.logged[step]), step) for step in common)
        if gap == 0:
            return f"It repeats: the losses that the run has logged of {plural(len(common), 'step')}, to the bit."
        return (
            f"It does not repeat to the bit: the losses of the log and of the same steps again differ by up to {gap:.2g} nats, at step "
            f"{count(step)}. Sums in another order do that (several ranks, a GPU, compiled code); another machine or version too."
        )

    def conclusion(self) -> str:
        """The finding in a sentence or two."""
        if not self.recipe:
            return f"No product of the run is narrower than 16 bits, so it is not the number format. {ELSEWHERE}"
        own, wide = self.against_bf16(), self.rungs[WIDE]
        if own.name == UNKNOWN:
            return own.sentence()
        if own.name == SAME:
            return f"{own.sentence()} {ELSEWHERE}"
        found = self.mended()
        if wide.lost and not self.rungs[AGAIN].lost:
            return f"BF16 itself diverges, at step {count(wide.lost)}, and the run does not: it is no reference. {ELSEWHERE}"
        if not self.is_behind():
            return own.sentence()
        if own.name == SMALL:
            return f"{own.sentence()} {self._of_small(own, found)}"
        if not found:
            return f"{own.sentence()} No recipe and no single product mends it: only BF16 does."
        return f"{own.sentence()} The first change that mends it: {change_words(found[0])}."

    def _of_small(self, own: SameCurve, found: list[str]) -> str:
        if not found:
            return "No rung brings it within control, or halves it."
        name = min(found, key=lambda each: abs(self.against_bf16(each).difference))
        best, words = self.against_bf16(name), change_words(name)
        if best.name == SAME:
            return f"It comes within control with {words}."
        left, whole = (signed(each.difference, decimals(each.difference)) for each in (best, own))
        return f"Most of it goes with {words}: {left} of {whole} nats are left."

    def report(self) -> Iterator[str]:
        """Sentences and numbers, a line each."""
        yield (
            f"From the checkpoint of step {count(self.begun)}, {plural(self.steps, 'step')} to step {count(self.begun + self.steps)} "
            f"(asked: {count(self.asked)}), recipe {self.recipe or 'without narrow products'}."
        )
        yield self.repeats()
        for name, rung in self.rungs.items():
            yield f"{name}: {self._of_rung(rung)}"
        if self.scores:
            yield self._of_scores()
        yield self.conclusion()

    def _of_rung(self, rung: Rung) -> str:
        if rung.refused:
            return f"not taken: {rung.refused}"
        half = rung.losses[len(rung.losses) // 2 :]
        lost = f", not finite at step {count(rung.lost)}" if rung.lost else ""
        mean = f"loss {loss_value(sum(half) / len(half))}{lost}" if half else f"no loss{lost}"
        if rung.name == WIDE or not self.recipe:
            return mean
        return f"{mean}; against bf16 {self.against_bf16(rung.name).numbers}"

    def _of_scores(self) -> str:
        narrow, wide = self.scores["narrow"], self.scores.get("wide")
        words = ", ".join(
            f"{name} {value:.4f}" + (f" ({wide[name]:.4f} in 16 bits, {signed(value - wide[name])})" if wide else "")
            for name, value in narrow.items()
        )
        return f"Validation at step {count(self.begun)}: {words}."

    # --- as JSON

    def facts(self) -> dict[str, Any]:
        own = {key: getattr(self, key) for key in ("recipe", "begun", "steps", "asked")}
        rungs = [
            {key: getattr(rung, key) for key in ("name", "losses", "lost", "refused", "spent_s")}
            for rung in self.rungs.values()
        ]
        return {**own, "rungs": rungs, "scores": self.scores}

    def take_up(self, facts: Mapping[str, Any]) -> None:
        """The rungs and scores of `facts`. ValueError for what `facts` of a ladder cannot be."""
        if problem := refuse(facts, TAKEN):
            raise ValueError(problem)
        self.rungs = {each["name"]: Rung(**each) for each in facts["rungs"]}
        self.scores = facts["scores"]


def change_words(name: str) -> str:
    kind, _, what = name.partition(":")
    return f"recipe {what}" if kind == RECIPE[:-1] else f"{what} alone in 16 bits"
