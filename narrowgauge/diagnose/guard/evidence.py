"""Sequential evidence over the checks of a run: is it worse than BF16, certified as near as the margin, or not known yet?

A check gives one number: the difference of the mean loss of two continuations from one state on the same batches, narrow minus
wide, over the second half of a stretch (steps within a stretch depend on each other, so they do not count one by one). Some
checks give a control as well: the same difference between two BF16 continuations that differ in rounding alone.

    worse      E >= 20 against "the expected difference lies within the margin". Both signs are judged, since values that saturate
               lower the loss at first: against "not above", "not below", and "neither above nor below at any check"; E is their mean.
    within     E >= 20 against "above the margin" and against "below minus the margin"; E is the smaller one.
    unknown    neither.
    reference  the BF16 continuation diverges itself: its loss is not finite, or more than twice that of the checks before (their
               median). Nothing can be judged there, and the check does not count.

The margin is a share of the reference's loss, and at least so many nats: "different" is not yet "worse". The scale of the noise is
that of controls and of steps between neighbouring differences (bets.py), and not below a part of the margin, which shrinks as they
become more. The verdict holds at every look: a healthy run is called worse in at most 5 % of runs, over all its checks together.
Checks belong after warm-up: while the loss falls steeply, sound recipes lag by more than the margin and catch up later.
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from narrowgauge.diagnose.format_text import count, loss_value, plural, signed
from narrowgauge.diagnose.guard.bets import Money, Scale, factors
from narrowgauge.errors import ConfigError

WORSE, WITHIN, UNKNOWN, REFERENCE = "worse", "within", "unknown", "reference"
ENOUGH = 20.0  # 1 / 5 %
MARGIN = 0.0025  # of the loss: differences of sound FP8 runs are of the order of 1e-3
LEAST_MARGIN = 0.003  # nats
LEAST_SCALE = 1 / 3  # of the margin, before any noise was seen: a gap of twice the margin is found by the third check
LEAST_SCALE_WITHIN = 1 / 4  # the same for what is bet on "within"
WILD = 2  # margins: jumps between checks by more are no noise, unless controls jump as well
WEARS_OFF = 4  # noise values after which both are smaller by sqrt(2)
FORESIGHT = 100  # checks ahead
RECENT = 8  # checks


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check: difference, the reference's mean loss, and the control difference or None; nats."""

    difference: float
    loss: float
    control: float | None


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What is known after the newest check, with the numbers behind it; differences in nats."""

    name: str  # worse, within, unknown, reference
    direction: str  # of what is worse: "higher", "lower", "not finite"; else ""
    checks: int
    difference: float  # of the newest check
    control: float | None  # of the newest check
    loss: float  # the reference's at the newest check
    usual: float | None  # the reference's median loss over the RECENT checks before, None without two
    since: int  # the check that `mean` begins with, from 1
    mean: float  # of the differences that count; NaN without any
    margin: float
    scale: float  # of one check's noise
    e_worse: float
    e_within: float
    more_checks: (
        int | None
    )  # until a verdict if the next differences are like the mean; 0 with a verdict; None: beyond FORESIGHT

    def event(self) -> dict[str, Any]:
        """The fields by name; `name` is called `verdict`."""
        fields = asdict(self)
        return {"verdict": fields.pop("name"), **fields}

    @property
    def sentence(self) -> str:
        """The verdict in words."""
        over = plural(self.checks - self.since + 1, "check")
        mean = f"{signed(self.mean)} nats on average over {'the last ' if self.since > 1 else ''}{over}"
        margin = f"the margin of {self.margin:.4f} nats"
        if self.name == REFERENCE:
            was = "" if self.usual is None else f", it was {self.usual:.4f} before"
            return (
                f"The BF16 reference itself diverges (loss {loss_value(self.loss)}{was}): the format of this stretch is not the cause, "
                "and nothing can be judged here."
            )
        if self.direction == "not finite":
            return "The loss in narrow numbers is not finite, and that of BF16 from the same state is."
        if self.name == WORSE:
            lower = " A lower loss is a departure too: values that saturate lower it at first, and weights may have grown used to a fault."
            hint = lower if self.direction == "lower" else ""
            return f"The loss is {self.direction} than that of BF16 by more than {margin}: {mean}, E = {self.e_worse:.3g}.{hint}"
        if self.name == WITHIN:
            return f"The loss is within {margin} of that of BF16: {mean}, E = {self.e_within:.3g}."
        more = (
            f"about {plural(self.more_checks, 'more check')} like these would tell"
            if self.more_checks
            else f"more than {count(FORESIGHT)} checks like these would not tell, since the mean lies at the margin"
        )
        return f"Not known yet: {mean}, {margin}; {more}."


class Evidence:
    """Collects checks and judges them.

    margin        largest harmless difference, as a share of the reference's loss
    least_margin  the same in nats, where the share is smaller
    Raises ConfigError if a margin is no positive number.
    """

    def __init__(self, margin: float = MARGIN, least_margin: float = LEAST_MARGIN) -> None:
        for name, value in (("margin", margin), ("least_margin", least_margin)):
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(f"Evidence: {name} = {value} is not a positive number. Choose for example 0.0025.")
        self.margin, self.least_margin = margin, least_margin
        self.checks: list[Check] = []
        self._bets = Bets()

    def add(self, difference: float, *, loss: float, control: float | None = None) -> Verdict:
        """The verdict after one more check.

        difference  mean loss of narrow minus wide over the second half of the stretch, nats
        loss        mean loss of wide there
        control     the same difference between two wide continuations that round differently, if this check has one
        NaN and infinity may be passed.
        """
        self._take(Check(difference=difference, loss=loss, control=control))
        return self.verdict()

    def _take(self, check: Check) -> None:
        self.checks.append(check)
        if self._counts(len(self.checks)):
            self._bets.add(check, self.margin_at(check.loss))

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
        return max(self.margin * abs(loss), self.least_margin) if math.isfinite(loss) else self.least_margin

    def verdict(self) -> Verdict:
        """What is known after the newest check. Raises ConfigError before the first one."""
        if not self.checks:
            raise ConfigError("Evidence: there is no check yet. Call add first.")
        newest, checks = self.checks[-1], len(self.checks)
        name, direction = self._bets.verdict()
        since = self._since(name, direction)
        counted = [self.checks[number - 1].difference for number in range(since, checks + 1) if self._counts(number)]
        mean = statistics.fmean(counted) if counted else math.nan
        if self._diverged(checks):
            name, direction = REFERENCE, ""
        elif not math.isfinite(newest.difference):
            name, direction = WORSE, "not finite"
        return Verdict(
            name=name,
            direction=direction,
            checks=checks,
            difference=newest.difference,
            control=newest.control,
            loss=newest.loss,
            usual=self._usual(checks),
            since=since,
            mean=mean,
            margin=self.margin_at(newest.loss),
            scale=self._bets.scale_at(self.margin_at(newest.loss)),
            e_worse=self._bets.e_worse,
            e_within=self._bets.e_within,
            more_checks=self._more_checks(newest, mean) if name == UNKNOWN else 0,
        )

    def _since(self, name: str, direction: str) -> int:
        """The check from which on the checks say most for the verdict; of `unknown` the last RECENT. For words alone."""
        if name == UNKNOWN:
            return max(1, len(self.checks) - RECENT + 1)
        total, best, since = 0.0, -math.inf, 1
        for number in range(len(self.checks), 0, -1):
            check = self.checks[number - 1]
            if self._counts(number):
                away, margin = check.difference, self.margin_at(check.loss)
                total += margin - abs(away) if name == WITHIN else (away if direction == "higher" else -away) - margin
            if total >= best:
                best, since = total, number
        return since

    def _more_checks(self, newest: Check, mean: float) -> int | None:
        ahead, margin = copy.deepcopy(self._bets), self.margin_at(newest.loss)
        for more in range(1, FORESIGHT + 1):
            ahead.add(Check(difference=mean, loss=newest.loss, control=None), margin, grow=False)
            if ahead.verdict()[0] != UNKNOWN:
                return more
        return None

    def state_dict(self) -> dict[str, Any]:
        """The checks as JSON, which may need `runs.encode` for what is not finite."""
        return {"checks": [asdict(check) for check in self.checks]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replaces the checks and judges them again, by the margins of this object."""
        self.checks, self._bets = [], Bets()
        for check in state["checks"]:
            self._take(Check(**check))


class Bets:
    """Everything that is bet on the differences of one run."""

    def __init__(self) -> None:
        self._scale = Scale()
        self._above, self._below, self._either = Money(), Money(), Money()
        self._not_above, self._not_below = Money(), Money()
        self._newest = 0.0

    def add(self, check: Check, margin: float, *, grow: bool = True) -> None:
        """grow=False leaves the scale as it is."""
        if check.control is not None and math.isfinite(check.control):
            self._scale.control(check.control)
        scale = self.scale_at(margin)
        above, below = factors((check.difference - margin) / scale), factors((-check.difference - margin) / scale)
        self._above.bet(above)
        self._below.bet(below)
        self._either.bet([(up + down) / 2 for up, down in zip(above, below, strict=True)])
        scale = max(self._scale.value, self._least(margin, LEAST_SCALE_WITHIN))
        self._not_above.bet(factors((margin - check.difference) / scale))
        self._not_below.bet(factors((margin + check.difference) / scale))
        self._newest = check.difference
        if grow:
            self._scale.difference(check.difference)

    def scale_at(self, margin: float) -> float:
        """The noise that is assumed of the next check, against "within"."""
        return max(self._scale.limited(WILD * margin), self._least(margin, LEAST_SCALE))

    def _least(self, margin: float, part: float) -> float:
        return part * margin / math.sqrt(1 + self._scale.count / WEARS_OFF)

    @property
    def e_worse(self) -> float:
        return statistics.fmean((self._above.value, self._below.value, self._either.value))

    @property
    def e_within(self) -> float:
        return min(self._not_above.value, self._not_below.value)

    def verdict(self) -> tuple[str, str]:
        """Name and direction."""
        if self.e_worse >= ENOUGH:
            above, below = self._above.value, self._below.value
            up = above > below if max(above, below) >= ENOUGH else self._newest > 0
            return WORSE, "higher" if up else "lower"
        return (WITHIN if self.e_within >= ENOUGH else UNKNOWN), ""
