"""Engine of a guard: decides when a check is due, takes its pair of probes, judges, and acts.

Two kinds of training use it, each through an adapter (`Steps`): the loop of a user (`loop`) and a
run of `narrowgauge train` (`lab.run_guard`). A check looks back:

    before step k + 1       copy the state
    steps k + 1 ... k + n   the run takes its own steps, undisturbed. In the first one its gradients
                            are sampled (`same_weights`), in the last ones its numbers are compared
                            with its recipe (`audit`)
    after step k + n        put the copy back and replay the same steps in BF16. Every fourth check
                            replays them before that with other rounding, as a control. Compare the
                            losses (`check`, `evidence`)
    then                    the run continues from its own end, or, if it is worse and the settings
                            say so, from the end of the BF16 reference, whose steps are taken already

A copy of the state does not survive the process. A check that a kill, a stop request or an error
cuts is therefore due again at once: it begins anew with the next step of the run.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from torch import nn

from narrowgauge.diagnose.guard_settings import STAY, WARN, GuardSettings
from narrowgauge.diagnose.sensitivity import ENDS
from narrowgauge.diagnose.verdict import WORSE
from narrowgauge.errors import Reason
from narrowgauge.lab.guard.audit import STEPS as AUDITED
from narrowgauge.lab.guard.audit import Audit
from narrowgauge.lab.guard.check import judged, wants_control
from narrowgauge.lab.guard.evidence import Evidence
from narrowgauge.lab.guard.refusals import has_narrow
from narrowgauge.lab.guard.result import LOWER
from narrowgauge.lab.guard.same_weights import FirstGradients, Samples, slopes
from narrowgauge.nn.converted_model import suspended
from narrowgauge.nn.learned_step import LearnedSteps

if TYPE_CHECKING:
    from narrowgauge.lab.guard.result import GuardResult
    from narrowgauge.snapshot import Snapshot

# Of recipes with learned steps, whose weights adapt to the quantizer: see `grows_into_steps`.
GROWN = (
    "Weights grow into the learned steps of this recipe, and BF16 from such a state begins worse: the guard leaves the run as it is. "
    "Only a run in BF16 from the start tells which ends better: narrowgauge study."
)
FOREVER = 2**62  # steps of a run whose end is not known


@dataclass(frozen=True, kw_only=True)
class Replay:
    """Result of a replay of a check's steps.

    losses         one per step, on this rank or over all (`Steps.read`); fewer if a step was lost
    lost           first step whose loss or gradient norm ended the replay; 0: none
    was_stopped    a stop request ended the replay
    has_gradients  False: the optimizer skipped the first step, so its gradients tell nothing
    """

    losses: Sequence[Any]
    lost: int = 0
    was_stopped: bool = False
    has_gradients: bool = True


class Steps(Protocol):
    """A training as the engine sees it. The state includes everything that steps change."""

    @property
    def model(self) -> nn.Module: ...

    @property
    def optimizer(self) -> Any: ...

    @property
    def taken(self) -> int:
        """Optimizer steps of the run so far."""

    def may_check(self, steps: int) -> bool:
        """False if something else than these coming steps would be compared, as a recipe switch."""

    def snapshot(self) -> Snapshot:
        """Copies the state."""

    def restore(self, snapshot: Snapshot) -> None:
        """Restores a copy."""

    def exchange(self, snapshot: Snapshot) -> None:
        """Exchanges a copy with the present state."""

    def replay(self, steps: int, *, as_control: bool) -> Replay:
        """Takes the steps of the check in BF16 from its first state, which is restored.

        as_control  round differently
        """

    def read(self, losses: Sequence[Any]) -> list[float]:
        """Losses as numbers, equal on all ranks, which all call this."""

    def tell(self, result: GuardResult, event: Mapping[str, Any]) -> None:
        """Takes note of a check before the engine acts. The state is the run's own end."""

    def adopt(self, begun: int) -> None:
        """The end of the newest replay is now the state of the run. begun: step before it."""

    def widen(self, recipe: str) -> None:
        """Switches the run to a recipe of higher precision for good."""


@dataclass
class CheckInProgress:
    """A check whose steps the run takes.

    begun   step of the run before the check
    copy    copy of the state there; while the check is judged, of the run's state after it
    first   gradients of the check's first step
    audit   audit of its last steps
    losses  losses of the run so far
    """

    begun: int
    copy: Snapshot
    first: FirstGradients
    audit: Audit
    losses: list[Any] = field(default_factory=list)

    def close(self) -> None:
        """Removes what the check has added to the optimizer and to layers."""
        self.first.close()
        self.audit.end()


class GuardEngine:
    """Runs the checks of one training.

    Call `before_step` and `after_step` around each optimizer step, and `saw` once per step and in
    order, as soon as its loss is known: before `after_step` of a check's last step.

    evidence     results of all checks under the present recipe
    first        losses of the first steps after step `first_after`, at most ENDS
    check        check in progress; None between checks
    given        recipe of higher precision that the run got from this guard, or ''
    stays_wide   the run is in BF16 until the next check
    total_steps  no check starts that this end of the run would cut
    """

    def __init__(
        self, settings: GuardSettings, steps: Steps, *, warmup_steps: int = 0, total_steps: int = 0
    ) -> None:
        """warmup_steps: no check starts earlier. total_steps: 0 if not known."""
        self.settings, self.steps = settings, steps
        self.evidence = Evidence.of(settings)
        self.first: list[Any] = []
        self.first_after = 0
        self.check: CheckInProgress | None = None
        self.given = ""
        self.stays_wide = False
        self.total_steps = total_steps or FOREVER
        self._earliest = settings.begins(warmup_steps, FOREVER)[0]
        # None before the first step, and after a state without it was loaded
        self._next: int | None = None
        self._wide = ExitStack()  # the open `suspended` context while the run stays in BF16

    # --- schedule

    @property
    def next(self) -> int:
        """Step after which the next check starts, unless something delays it."""
        return self._multiple(self.steps.taken) if self._next is None else self._next

    @property
    def is_due(self) -> bool:
        """True if a check is in progress or overdue: after a resume it begins with the next step."""
        return self._next is not None and self.steps.taken >= self._next

    def _multiple(self, step: int) -> int:
        """First step from `step` on after which a check starts by the settings."""
        return max(self._earliest, -(-step // self.settings.every) * self.settings.every)

    def begins_now(self) -> bool:
        """True if a check starts with the next step."""
        taken, steps = self.steps.taken, self.settings.steps
        return (
            self.check is None
            and taken >= self.next
            and taken + steps <= self.total_steps
            and self.steps.may_check(steps)
        )

    def ends_now(self) -> bool:
        """True if the run has taken all steps of a check."""
        return self.check is not None and self.steps.taken >= self.check.begun + self.settings.steps

    # --- around a step

    def before_step(self) -> None:
        """Starts a check that is due."""
        if self._next is None:
            self._next = self._multiple(self.steps.taken)
        if self.begins_now():
            self._begin()
        check = self.check
        if check is not None and self.steps.taken >= check.begun + self.settings.steps - AUDITED:
            check.audit.begin()

    def _begin(self) -> None:
        taken, model = self.steps.taken, self.steps.model
        if not has_narrow(model):  # after a switch to BF16 nothing is left to compare
            self._next = self._multiple(taken + 1)
            return
        self._next = taken
        self.stay_wide(False)  # a run that stayed in BF16 tries its own recipe again
        self.check = CheckInProgress(
            taken,
            self.steps.snapshot(),
            FirstGradients(model, self.steps.optimizer),
            Audit(model, len(self.evidence.checks)),
        )

    def saw(self, number: int, loss: Any) -> None:
        """Takes the loss of a step of the run."""
        if number == self.first_after + len(self.first) + 1 and len(self.first) < ENDS:
            self.first.append(loss)
        if self.check is not None and number > self.check.begun:
            self.check.losses.append(loss)

    def after_step(self) -> dict[str, Any] | None:
        """Ends a check that has its steps, and returns its event."""
        if self.check is None:
            return None
        self.check.close()
        if not self.ends_now():
            return None
        # Cleared first: an error in the judgement must not leave a check that is continued.
        check, self.check = self.check, None
        event = self._judge(check)
        # A judgement that was stopped is repeated: the check begins anew.
        if event is not None:
            self._next = self._multiple(self.steps.taken)
        return event

    def drop(self) -> None:
        """Forgets the check in progress, which is then due again."""
        if self.check is not None:
            self.check.close()
        self.check = None

    # --- judgement

    def _judge(self, check: CheckInProgress) -> dict[str, Any] | None:
        """Replays the steps of a check in BF16, judges and acts; None if a stop request came."""
        began_at_s = time.monotonic()
        steps = self.steps
        narrow = steps.read(check.losses)
        self.evidence.first = steps.read(self.first)
        control = None
        if wants_control(self.evidence):
            # Two replays start from the same state, so the end of the run needs its own copy.
            start, check.copy = check.copy, steps.snapshot()
            steps.restore(start)
            # First, so that the end of the reference is in place afterwards.
            control, _ = self._replayed(check, as_control=True)
            if control.was_stopped:
                steps.restore(check.copy)
                return None
            steps.restore(start)
            del start  # frees a copy: `tell` may take one
        else:
            steps.exchange(check.copy)
        wide, gradients = self._replayed(check)
        if wide.was_stopped:
            steps.restore(check.copy)
            return None
        result, numbers = judged(
            self.evidence,
            check.begun,
            self.settings.steps,
            narrow,
            steps.read(wide.losses),
            None if control is None or wide.lost else steps.read(control.losses),
            slopes(check.first.samples, gradients if wide.has_gradients else {}),
            check.audit.found(),
        )
        if wide.lost:
            numbers["lost"] = wide.lost
        then = self._choice(result)
        event = {**numbers, "then": then, "spent_s": time.monotonic() - began_at_s}
        self._act(check, result, event)
        return event

    def _replayed(
        self, check: CheckInProgress, *, as_control: bool = False
    ) -> tuple[Replay, Samples]:
        """Replays the steps of a check; returns also gradient samples of the first one.

        If a step fails, the state is the run's own end again.
        """
        steps = self.steps
        try:
            with FirstGradients(steps.model, steps.optimizer) as first:
                return steps.replay(self.settings.steps, as_control=as_control), first.samples
        except BaseException as error:
            steps.restore(check.copy)
            error.add_note(
                Reason(
                    "guard.reference-failed",
                    "It was raised while a guard took the steps of its check in BF16; the run is at its narrow end again.",
                )
            )
            raise

    def _choice(self, result: GuardResult) -> str:
        """Word for the action that follows a result: '', WARN, STAY or the name of a recipe."""
        if result.outcome != WORSE:
            return ""
        # A run that has a recipe of this guard already gets no other. A lower loss in BF16 may only
        # mean that the weights depend on their learned quantization steps.
        if (
            not self.settings.keeps_reference
            or self.given
            or grows_into_steps(self.steps.model, result.detail)
        ):
            return WARN
        return self.settings.then

    def _act(self, check: CheckInProgress, result: GuardResult, event: dict[str, Any]) -> None:
        """Chooses the state from which the run continues. The end of the reference is in place."""
        steps, then = self.steps, event["then"]
        if then in ("", WARN):
            steps.restore(check.copy)
            steps.tell(result, event)
            return
        # `tell` looks for the cause in the run's own state, whose amax histories are in use.
        steps.exchange(check.copy)
        steps.tell(result, event)
        steps.exchange(check.copy)
        steps.adopt(check.begun)
        if then == STAY:
            self.stay_wide(True)
            return
        steps.widen(then)
        self.given = then
        # Checks of the old recipe say nothing about the new one, so its evidence starts empty.
        before, self.evidence = self.evidence, Evidence.of(self.settings)
        self.evidence.first, self.evidence.trivial = before.first, before.trivial

    def stay_wide(self, is_wide: bool) -> None:
        """Puts the run into BF16, or back into its recipe."""
        self._wide.close()
        self.stays_wide = is_wide
        if is_wide:
            self._wide.enter_context(suspended(self.steps.model))

    # --- state

    def load(
        self,
        evidence: Mapping[str, Any],
        first: Sequence[float],
        *,
        given: str,
        stays_wide: bool,
        due_after: int | None,
    ) -> None:
        """Continues from the state of an earlier process.

        due_after  step after which the next check starts; None: by the settings, from here on

        The recipe `given` must be in place.
        """
        self.drop()
        self.evidence.load_state_dict(evidence)
        self.first, self.given, self._next = list(first), given, due_after
        self.stay_wide(stays_wide)


def grows_into_steps(model: nn.Module, detail: str) -> bool:
    """True if a result may reflect nothing but weights that are adapted to learned steps.

    BF16 then starts worse from such weights. A loss that is LOWER than BF16's shows that adaptation
    and no fault, so the guard does not act on it.

    detail  detail of the result (`GuardResult.detail`)
    """
    return detail == LOWER and any(isinstance(each, LearnedSteps) for each in model.modules())
