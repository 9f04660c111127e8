"""Sequential evidence over the checks of a run: is it worse than BF16, certified as near as the margin, or not known yet?

A check gives two numbers, narrow minus wide, of two continuations from one state on the same batches:

    stretch       the difference of their mean losses over the second half. Steps within a stretch depend on each other, so they do
                  not count one by one. Some checks have a control as well: the same of two BF16 continuations that differ in rounding alone
    same weights  that of their first losses. Weights, batch and draws are the same there, so it is the format's forward pass alone:
                  no drift, and no training that has grown used to a fault

and which weights have another gradient in that first step (same_weights.py).

    worse      E >= 20 against "the expected difference lies within the margin". Both signs are judged, since values that saturate
               lower the loss at first: against "not above", "not below", and "neither above nor below at any check"; their mean is the E of
               a number, and the mean of both numbers' the E of the run: a mean of e-values is one.
               Or a weight whose gradient is another at two checks in a row. That is a limit, not a bet: see same_weights.py.
                Or numbers that are not those of the recipe, at one check: see audit.py.
    within     (only of a run that has learnt, see `sensitivity`: the margin of this verdict is at most a share of what it learnt)
               E >= 20 against "above the margin" and against "below minus the margin", of both numbers; E is the smallest one.
               And no weight has another gradient at the newest check.
    unknown    neither.
    reference  the BF16 continuation diverges itself: its loss is not finite, or more than twice that of the checks before (their
               median). Nothing can be judged there, and the check does not count.

The margin is a share of the reference's loss, and at least so many nats: "different" is not yet "worse". The scale of the noise is
that of controls and of steps between neighbouring differences (bets.py), and not below a part of the margin, which shrinks as they become
more. On the same weights the steps that follow take the place of controls (check.py). The verdict holds at every look: a healthy run is
called worse in at most 5 % of runs, over all its checks together. Checks belong after warm-up: while the loss falls steeply, sound
recipes lag by more than the margin and catch up later.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from narrowgauge.diagnose.guard.bets import RunBets
from narrowgauge.diagnose.guard.unlike import Unlike
from narrowgauge.diagnose.guard.verdict import (
    FORESIGHT,
    GRADIENT,
    NUMBERS,
    REFERENCE,
    SAME_WEIGHTS,
    STRETCH,
    UNKNOWN,
    WITHIN,
    WORSE,
    Verdict,
)
from narrowgauge.diagnose.sensitivity import narrowed
from narrowgauge.errors import ConfigError

MARGIN = 0.0025  # of the loss: differences of sound FP8 runs are of the order of 1e-3
LEAST_MARGIN = 0.003  # nats
WIDEST = 0.01  # of the loss: so far the margin in nats reaches
SMALLEST = 1e-12  # where the loss is zero
RECENT = 8  # checks


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check, nats.

    difference  of the stretch
    loss        the reference's mean loss there
    control     of two stretches in BF16, or None
    same        the difference on the same weights, or None
    noise       values with the scale of its noise
    outside     weights whose gradient is another, with its slope; None: gradients were not seen
    learnt      how far the reference's loss has fallen since the first steps, as far as that is shown; None: not known
    unlike      products whose numbers are not those of their recipe, see `unlike`
    """

    difference: float
    loss: float
    control: float | None
    same: float | None = None
    noise: Sequence[float] = ()
    outside: Mapping[str, float] | None = None
    learnt: float | None = None
    unlike: Unlike = field(default_factory=dict)


class Evidence:
    """Collects checks and judges them.

    margin        largest harmless difference, as a share of the reference's loss
    least_margin  the same in nats, where the share is smaller; but at most WIDEST of the loss, which may be no cross-entropy
    is_in_nats    the margin is least_margin, whatever the loss is
    Raises ConfigError if a margin is no positive number.
    """

    def __init__(self, margin: float = MARGIN, least_margin: float = LEAST_MARGIN, *, is_in_nats: bool = False) -> None:
        for name, value in (("margin", margin), ("least_margin", least_margin)):
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"Evidence: {name} = {value} is not a positive number. Choose for example 0.0025.")
        self.margin, self.least_margin, self.is_in_nats = margin, least_margin, is_in_nats
        self.first: list[float] = []  # losses of the first steps of the run, ENDS at most
        self.trivial: float | None = None  # the loss of the trivial predictor of the run's data; None: not known
        self.checks: list[Check] = []
        self._bets = RunBets()

    def add(
        self, difference: float, *, loss: float, control: float | None = None, same: float | None = None,
        noise: Sequence[float] = (), outside: Mapping[str, float] | None = None, unlike: Unlike | None = None,
        learnt: float | None = None,
    ) -> Verdict:  # fmt: skip
        """The verdict after one more check.

        difference  mean loss of narrow minus wide over the second half of the stretch, nats
        loss        mean loss of wide there
        control     the same difference between two wide continuations that round differently, if this check has one
        same        loss of narrow minus wide at the first step, which both take from the same weights
        noise       how far such differences scatter from batch to batch: deviations of that size
        outside     weights whose gradient at that step is not that of wide, with their slopes, worst first; None: not seen
        unlike      products whose numbers are not those of their recipe (audit.py): one look suffices
        learnt      how far its loss has fallen since the first steps of the run (`sensitivity.progress_between`); None: not known
        NaN and infinity may be passed.
        """
        check = Check(
            difference=difference, loss=loss, control=control, same=same, noise=noise, outside=outside, unlike=unlike or {},
            learnt=learnt,
        )  # fmt: skip
        self._take(check)
        return self.verdict()

    def _take(self, check: Check) -> None:
        self.checks.append(check)
        if self._counts(len(self.checks)):
            margin = self.margin_at(check.loss)
            within = self._certified(check)
            self._bets.add(check.difference, _finite(check.same), margin, check.control, check.noise, within=within)

    def _certified(self, check: Check) -> float:
        """The margin that "within" is judged by: at most a share of what the run has learnt."""
        is_trivial = self.trivial is not None and not check.loss < self.trivial
        return narrowed(self.margin_at(check.loss), 0.0 if is_trivial else check.learnt)

    def _counts(self, number: int) -> bool:
        return math.isfinite(self.checks[number - 1].difference) and not self._diverged(number)

    def _diverged(self, number: int) -> bool:
        """Whether the reference did, at check `number` from 1."""
        loss, usual = self.checks[number - 1].loss, self._usual(number)
        return not math.isfinite(loss) or (usual is not None and loss > 2 * usual > 0)

    def _usual(self, number: int) -> float | None:
        before = [
            check.loss for check in self.checks[max(number - 1 - RECENT, 0) : number - 1] if math.isfinite(check.loss)
        ]
        return statistics.median(before) if len(before) > 1 else None

    def margin_at(self, loss: float) -> float:
        """The margin in nats where the reference has this loss."""
        if self.is_in_nats or not math.isfinite(loss):
            return self.least_margin
        return max(self.margin * abs(loss), min(self.least_margin, WIDEST * abs(loss)), SMALLEST)

    def verdict(self) -> Verdict:
        """What is known after the newest check. Raises ConfigError before the first one."""
        if not self.checks:
            raise ConfigError("Evidence: there is no check yet. Call add first.")
        newest, checks, bets = self.checks[-1], len(self.checks), self._bets
        name, seen_on, direction = bets.verdict()
        sick, since = self._sick(), self._since(name, seen_on, direction)
        if self._diverged(checks):
            name, seen_on, direction = REFERENCE, "", ""
        elif not math.isfinite(newest.difference):
            name, seen_on, direction = WORSE, STRETCH, "not finite"
        elif newest.unlike and name != WORSE:
            name, seen_on, direction = WORSE, NUMBERS, NUMBERS
        elif sick and name != WORSE:
            name, seen_on, direction = WORSE, GRADIENT, GRADIENT
        elif name == WITHIN and (newest.outside or not self._certified(newest) > 0):
            name = UNKNOWN
        means = [self._mean(since, place) for place in range(2)]
        return Verdict(
            name=name,
            direction=direction,
            seen_on=seen_on,
            checks=checks,
            difference=newest.difference,
            control=newest.control,
            same=newest.same,
            loss=newest.loss,
            usual=self._usual(checks),
            since=since,
            mean=math.nan if means[0] is None else means[0],
            same_mean=means[1],
            margin=self.margin_at(newest.loss),
            certified=self._certified(newest),
            learnt=newest.learnt,
            trivial=self.trivial,
            scale=bets.stretch.scale_at(self.margin_at(newest.loss)),
            e_worse=bets.e_worse,
            e_worse_stretch=bets.stretch.e_worse,
            e_worse_same=bets.same.e_worse if bets.same.checks else None,
            e_within=bets.e_within,
            sick=sick,
            unlike=newest.unlike,
            first_loss=self._first_loss(),
            more_checks=self._more_checks(newest, *means) if name == UNKNOWN else 0,
        )

    def _first_loss(self) -> float | None:
        """The reference's loss at the first check that counts, None without one before the newest."""
        numbers = (number for number in range(1, len(self.checks)) if self._counts(number))
        first = next(numbers, None)
        return None if first is None else self.checks[first - 1].loss

    def _sick(self) -> tuple[str, ...]:
        """The weights whose gradient is another at the newest check and was so at the one before."""
        if len(self.checks) < 2:
            return ()
        before = self.checks[-2].outside or {}
        return tuple(name for name in self.checks[-1].outside or () if name in before)

    def _numbers(self, number: int) -> tuple[float | None, float | None]:
        """Of check `number` from 1 what counts: stretch, same weights."""
        if not self._counts(number):
            return None, None
        check = self.checks[number - 1]
        return check.difference, _finite(check.same)

    def _mean(self, since: int, place: int) -> float | None:
        counted = [self._numbers(number)[place] for number in range(since, len(self.checks) + 1)]
        found = [each for each in counted if each is not None]
        return statistics.fmean(found) if found else None

    def _since(self, name: str, seen_on: str, direction: str) -> int:
        """The check from which on the checks say most for the verdict; of `unknown` the last RECENT. For words alone."""
        if name == UNKNOWN:
            return max(1, len(self.checks) - RECENT + 1)
        total, best, since = 0.0, -math.inf, 1
        for number in range(len(self.checks), 0, -1):
            difference = self._numbers(number)[seen_on == SAME_WEIGHTS]
            if difference is not None:
                away, margin = difference, self.margin_at(self.checks[number - 1].loss)
                total += margin - abs(away) if name == WITHIN else (away if direction == "higher" else -away) - margin
            if total >= best:
                best, since = total, number
        return since

    def _more_checks(self, newest: Check, mean: float | None, same: float | None) -> int | None:
        ahead, margin = copy.deepcopy(self._bets), self.margin_at(newest.loss)
        for more in range(1, FORESIGHT + 1):
            within = self._certified(newest)
            ahead.add(math.nan if mean is None else mean, same, margin, grow=False, within=within)
            if ahead.verdict()[0] != UNKNOWN:
                return more
        return None

    def state_dict(self) -> dict[str, Any]:
        """The checks as JSON, which may need `runs.encode` for what is not finite."""
        return {"checks": [asdict(check) for check in self.checks], "first": self.first}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces the checks and judges them again, by the margins of this object."""
        self.checks, self._bets, self.first = [], RunBets(), list(state.get("first", ()))
        for check in state["checks"]:
            self._take(Check(**check))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
