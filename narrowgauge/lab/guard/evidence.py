"""Sequential evidence over the checks of a run: worse than BF16, within the margin, or unknown.

A check gives two numbers, run minus BF16, from two probes that start from one state on the same
batches:

    stretch       difference of the mean losses over the second half. Steps of a probe are
                  correlated, so they do not count one by one. Some checks have a control as well:
                  the same for two BF16 probes that differ in rounding alone
    same weights  difference of the first losses. Weights, batch and random draws are identical
                  there, so it measures the format's forward pass alone: no drift, and no training
                  that adapts to a fault

and the weights whose gradient deviates in that first step (same_weights.py). Verdicts:

    worse      E >= 20 against "the expected difference lies within the margin". Both signs count,
               since saturating values lower the loss at first: there are bets against "not above",
               "not below", and "neither above nor below at any check". Their mean is the E of a
               number, and the mean over both numbers is the E of the run: a mean of e-values is an
               e-value. Or a weight whose gradient deviates at two checks in a row; this is a limit,
               not a bet. Or GEMMs whose numbers do not follow their recipe at one check (audit.py).
    equivalent only for a run that has learnt (`sensitivity`): the margin of this verdict is at most
               a share of the run's progress. E >= 20 against "above the margin" and against "below
               minus the margin", for both numbers; E is the smallest one. And no weight deviates at
               the newest check.
    unknown    neither. With the detail "reference diverged", the BF16 probe itself diverges: its
               loss is not finite, or more than twice the median of the checks before. Nothing can
               be judged then, and the check does not count

The margin is a share of the reference's loss, and at least a number of nats: "different" is not yet
"worse". The noise scale comes from controls and from steps between neighbouring differences
(bets.py). It is not below a share of the margin, which shrinks as values accumulate. On the same
weights, the steps that follow replace controls (check.py). A verdict is valid at every look: at
most 5 % of sound runs are called worse, over all their checks together. Checks belong after
warm-up: while the loss falls steeply, sound recipes lag by more than the margin and catch up later.
"""

from __future__ import annotations

import copy
import math
import statistics
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from narrowgauge.diagnose.guard_settings import LEAST_MARGIN, MARGIN, WIDEST, GuardSettings
from narrowgauge.diagnose.sensitivity import narrowed
from narrowgauge.diagnose.verdict import (
    EQUIVALENT,
    NOT_SENSITIVE,
    REFERENCE_DIVERGED,
    UNKNOWN,
    WORSE,
)
from narrowgauge.errors import ConfigError
from narrowgauge.lab.guard.bets import RunBets
from narrowgauge.lab.guard.result import (
    FORESIGHT,
    GRADIENT,
    HIGHER,
    NOT_FINITE,
    NUMBERS,
    SAME_WEIGHTS,
    STRETCH,
    GuardResult,
)

if TYPE_CHECKING:
    from narrowgauge.lab.guard.result import Unlike

SMALLEST = 1e-12  # margin for a loss of zero
RECENT = 8  # number of checks


@dataclass(frozen=True, kw_only=True)
class Check:
    """One check, in nats.

    difference  difference of the probe
    loss        mean loss of the reference in it
    control     difference of two BF16 probes, or None
    same        difference on the same weights, or None
    noise       values with the noise scale of `same`
    outside     weights with a deviating gradient, and their slopes; None: gradients were not
                compared
    learnt      progress: how far the reference's loss has fallen since the first steps, as far as
                that is shown; None: not known
    unlike      GEMMs whose numbers do not follow their recipe, see `result.Unlike`
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
    least_margin  lower limit of the margin in nats; but at most WIDEST of the loss, which need not
                  be a cross-entropy
    is_in_nats    True: the margin is least_margin for any loss

    Raises ConfigError if a margin is not a positive number.
    """

    def __init__(
        self,
        margin: float = MARGIN,
        least_margin: float = LEAST_MARGIN,
        *,
        is_in_nats: bool = False,
    ) -> None:
        for name, value in (("margin", margin), ("least_margin", least_margin)):
            if not (math.isfinite(value) and value > 0):
                raise ConfigError(
                    f"Evidence: {name} = {value} is not a positive number. Choose for example 0.0025.",
                    code="evidence.not-positive",
                )
        self.margin, self.least_margin, self.is_in_nats = margin, least_margin, is_in_nats
        self.first: list[float] = []  # losses of the run's first steps, at most ENDS
        # Loss of the trivial predictor of the run's data; None: not known.
        self.trivial: float | None = None
        self.checks: list[Check] = []
        self._bets = RunBets()

    @classmethod
    def of(cls, settings: GuardSettings) -> Evidence:
        """Empty evidence with the margins of the settings."""
        return cls(settings.margin, settings.least_margin, is_in_nats=settings.is_in_nats)

    def add(
        self, difference: float, *, loss: float, control: float | None = None, same: float | None = None,
        noise: Sequence[float] = (), outside: Mapping[str, float] | None = None, unlike: Unlike | None = None,
        learnt: float | None = None,
    ) -> GuardResult:  # fmt: skip
        """Add a check and return the result.

        difference  mean loss of the run minus BF16 over the second half of the probe, nats
        loss        mean loss of BF16 there
        control     the same difference between two BF16 probes that round differently, if this
                    check has one
        same        loss of the run minus BF16 at the first step, which both take from the same
                    weights
        noise       deviations with the scale at which such differences scatter from batch to batch
        outside     weights with a deviating gradient at that step, with their slopes, worst first;
                    None: not compared
        unlike      GEMMs whose numbers do not follow their recipe (audit.py): one check is enough
        learnt      progress since the run's first steps (`sensitivity.progress_between`); None: not
                    known

        NaN and infinity are allowed.
        """
        check = Check(
            difference=difference, loss=loss, control=control, same=same, noise=noise, outside=outside, unlike=unlike or {},
            learnt=learnt,
        )  # fmt: skip
        self._take(check)
        return self.result()

    def _take(self, check: Check) -> None:
        self.checks.append(check)
        if self._counts(len(self.checks)):
            # The margin of each check is that of its own loss, also when a state is loaded and
            # judged again.
            margin = self.margin_at(check.loss)
            within = self._certified(check)
            self._bets.add(
                check.difference,
                _finite(check.same),
                margin,
                check.control,
                check.noise,
                within=within,
            )

    def _certified(self, check: Check) -> float:
        """Margin of the verdict "equivalent": at most a share of the run's progress."""
        is_trivial = self.trivial is not None and not check.loss < self.trivial
        return narrowed(self.margin_at(check.loss), 0.0 if is_trivial else check.learnt)

    def _counts(self, number: int) -> bool:
        return math.isfinite(self.checks[number - 1].difference) and not self._diverged(number)

    def _diverged(self, number: int) -> bool:
        """True if the reference diverged at check `number`, from 1."""
        loss, usual = self.checks[number - 1].loss, self._usual(number)
        return not math.isfinite(loss) or (usual is not None and loss > 2 * usual > 0)

    def _usual(self, number: int) -> float | None:
        before = [
            check.loss
            for check in self.checks[max(number - 1 - RECENT, 0) : number - 1]
            if math.isfinite(check.loss)
        ]
        return statistics.median(before) if len(before) > 1 else None

    def margin_at(self, loss: float) -> float:
        """Margin in nats for this loss of the reference."""
        if self.is_in_nats or not math.isfinite(loss):
            return self.least_margin
        return max(self.margin * abs(loss), min(self.least_margin, WIDEST * abs(loss)), SMALLEST)

    def result(self) -> GuardResult:
        """Result after the newest check. Raises ConfigError before the first one."""
        if not self.checks:
            raise ConfigError(
                "Evidence: there is no check yet. Call add first.", code="evidence.no-check"
            )
        newest, checks, bets = self.checks[-1], len(self.checks), self._bets
        outcome, seen_on, detail = bets.verdict()
        sick, since = self._sick(), self._since(outcome, seen_on, detail)
        # The order is a priority: a diverged reference cannot judge, and statistical evidence for
        # "worse" is reported before audit and gradients.
        if self._diverged(checks):
            outcome, seen_on, detail = UNKNOWN, "", REFERENCE_DIVERGED
        elif not math.isfinite(newest.difference):
            outcome, seen_on, detail = WORSE, STRETCH, NOT_FINITE
        elif newest.unlike and outcome != WORSE:
            outcome, seen_on, detail = WORSE, NUMBERS, NUMBERS
        elif sick and outcome != WORSE:
            outcome, seen_on, detail = WORSE, GRADIENT, GRADIENT
        elif outcome == EQUIVALENT and (newest.outside or not self._certified(newest) > 0):
            outcome = UNKNOWN
        if (
            outcome == UNKNOWN
            and not detail
            and self._certified(newest) < self.margin_at(newest.loss)
        ):
            detail = NOT_SENSITIVE
        is_open = outcome == UNKNOWN and detail != REFERENCE_DIVERGED
        means = [self._mean(since, place) for place in range(2)]
        return GuardResult(
            outcome=outcome,
            detail=detail,
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
            more_checks=self._more_checks(newest, *means) if is_open else 0,
        )

    def verdict(self) -> GuardResult:
        """Former name of `result`."""
        warnings.warn(
            "Evidence.verdict is Evidence.result, and its `name` is `outcome`, since 0.2.0.",
            DeprecationWarning,
            stacklevel=2,
        )
        return self.result()

    def _first_loss(self) -> float | None:
        """The reference's loss at the first check that counts.

        None if there is none before the newest.
        """
        numbers = (number for number in range(1, len(self.checks)) if self._counts(number))
        first = next(numbers, None)
        return None if first is None else self.checks[first - 1].loss

    def _sick(self) -> tuple[str, ...]:
        """Weights whose gradient deviates at the newest check and at the previous one."""
        if len(self.checks) < 2:
            return ()
        before = self.checks[-2].outside or {}
        return tuple(name for name in self.checks[-1].outside or () if name in before)

    def _numbers(self, number: int) -> tuple[float | None, float | None]:
        """Numbers of check `number` (from 1) that count: (stretch, same weights)."""
        if not self._counts(number):
            return None, None
        check = self.checks[number - 1]
        return check.difference, _finite(check.same)

    def _mean(self, since: int, place: int) -> float | None:
        counted = [self._numbers(number)[place] for number in range(since, len(self.checks) + 1)]
        found = [each for each in counted if each is not None]
        return statistics.fmean(found) if found else None

    def _since(self, outcome: str, seen_on: str, direction: str) -> int:
        """First check of the range that supports the verdict most. Only used in sentences.

        For "unknown" the last RECENT checks.
        """
        if outcome == UNKNOWN:
            return max(1, len(self.checks) - RECENT + 1)
        total, best, since = 0.0, -math.inf, 1
        for number in range(len(self.checks), 0, -1):
            difference = self._numbers(number)[seen_on == SAME_WEIGHTS]
            if difference is not None:
                away, margin = difference, self.margin_at(self.checks[number - 1].loss)
                total += (
                    margin - abs(away)
                    if outcome == EQUIVALENT
                    else (away if direction == HIGHER else -away) - margin
                )
            if total >= best:
                best, since = total, number
        return since

    def _more_checks(self, newest: Check, mean: float | None, same: float | None) -> int | None:
        # Simulates checks like the mean until the verdict changes; the real bets stay untouched.
        ahead, margin = copy.deepcopy(self._bets), self.margin_at(newest.loss)
        for more in range(1, FORESIGHT + 1):
            within = self._certified(newest)
            ahead.add(math.nan if mean is None else mean, same, margin, grow=False, within=within)
            if ahead.verdict()[0] != UNKNOWN:
                return more
        return None

    def state_dict(self) -> dict[str, Any]:
        """The checks as JSON; non-finite values need `runs.encode`."""
        return {"checks": [asdict(check) for check in self.checks], "first": self.first}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Replace the checks and judge them again, with the margins of this object."""
        self.checks, self._bets, self.first = [], RunBets(), list(state.get("first", ()))
        for check in state["checks"]:
            self._take(Check(**check))


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None
