"""Guard: compare any low-precision training loop with BF16, without training a second run.

    settings = "every=2000,steps=100,margin=0.25%,then=warn"
    guard = ng.Guard(settings, model, optimizer, step, also=[scheduler])
    for batch in batches:
        loss = guard(batch)    # calls step(batch): forward, backward, optimizer.step(),
                               # scheduler.step(), zero_grad()

A check runs as follows. The state is copied (`narrowgauge.snapshot`), the run takes `steps` steps as usual, and
their batches are stored. Then copy and current state are swapped, and the same batches are replayed
in BF16. The check only looks back, so the loop keeps its iterator, workers and sampler. The verdict
follows from the difference of the losses (`check`, `evidence`). Every fourth check also runs a
control: BF16 again from weights changed in their last bit, with the same dropout masks, so that
only rounding differs (`nudge`). In the last steps of a check the run's numbers are compared with
its recipe (`audit`).

Afterwards the run continues from its own end state: without an alarm it is bit-identical to the
unguarded run. If it is worse, `then` may make it continue from the BF16 end state, whose steps were
computed anyway.

    cost     `steps` more steps in `every` steps, twice as many with a control
    memory   a copy of the state in host memory or on a disk during a check, two copies during a
             control; and `steps` batches, wherever the loop stores them
    kill     the copy is lost. An interrupted check starts again with the first step after the
             resume

On several ranks each rank has a guard and copies its own shards. Losses are averaged over the
default process group, so all ranks get the same verdict.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from narrowgauge.conversion import suspended
from narrowgauge.conversion.switching import switch
from narrowgauge.diagnose.format_text import size
from narrowgauge.diagnose.guard_settings import GuardSettings, chosen, refuse_counts
from narrowgauge.diagnose.sensitivity import ENDS
from narrowgauge.diagnose.verdict import WORSE
from narrowgauge.errors import ConfigError, Reason, warn
from narrowgauge.lab.guard.audit import STEPS as AUDITED
from narrowgauge.lab.guard.audit import Audit
from narrowgauge.lab.guard.batches import Kept
from narrowgauge.lab.guard.check import judged, wants_control
from narrowgauge.lab.guard.evidence import Evidence
from narrowgauge.lab.guard.grown import GROWN, grows_into_steps
from narrowgauge.lab.guard.nudge import nudge
from narrowgauge.lab.guard.refusals import refuse, refuse_no_loss, refuse_state
from narrowgauge.lab.guard.same_weights import FirstGradients, Samples, slopes, words
from narrowgauge.nn.linear import QLinear
from narrowgauge.ops.rng import generators, set_generators
from narrowgauge.snapshot import Snapshot, Training, snapshot_bytes
from narrowgauge.snapshot.block_storage import require_free_space
from narrowgauge.structure import require_module

if TYPE_CHECKING:
    from narrowgauge.lab.guard.result import GuardResult

Step = Callable[[Any], Any]
SEQUEL = "Which product it is: narrowgauge.lab.blame.blame(model, batch)."
COPIES = 2  # largest number of state copies: start and end of a check, during a control


@dataclass
class _Check:
    """A check in progress.

    begun       number of the run's steps before the check
    fork        snapshot of that state
    first       gradients of the check's first step
    audit       audit of its last steps
    batches     stored batches
    generators  generator states before each step, because a data set may draw numbers between two
                steps
    losses      losses of the run
    """

    begun: int
    fork: Snapshot
    first: FirstGradients
    audit: Audit
    batches: list[Kept] = field(default_factory=list)
    generators: list[dict[str, Any]] = field(default_factory=list)
    losses: list[Any] = field(default_factory=list)


class Guard:
    """Judges a training loop; the module docstring shows its use.

    events        one event per check with the numbers behind the verdict; also passed to `tell`
    is_reference  True during a BF16 replay, whose steps are not the run's: do not print or log them
    """

    def __init__(
        self, settings: str | GuardSettings, model: nn.Module, optimizer: Any, step: Step, *, scaler: Any = None,
        also: Iterable[Any] = (), warmup_steps: int = 0, total_steps: int = 0, steps_done: int = 0, where: str | Path = "host",
        tell: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:  # fmt: skip
        """Create a guard for the loop whose step is `step`; call the guard with each batch.

        settings         as `narrowgauge train --guard`:
                         "every=2000,steps=100,margin=0.25%,then=stay"
        step             takes a batch of any kind, makes one optimizer step and returns the mean
                         loss
        optimizer        an optimizer, or a list
        also             other objects that a step changes: schedulers, averaged models,
                         torch.Generators
        warmup_steps     no check starts earlier
        total_steps      no check starts that the end of the run would cut; 0: not known
        steps_done       steps of the run so far, if no guard state is loaded
        where            location of the copy: "host", or a folder on a disk
        tell             called with each event; without it, a verdict "worse" is a warning

        Raises ConfigError for settings that cannot work, OutOfMemoryError or StorageError if the
        copy does not fit.
        """
        require_module(model, "Guard")
        found = chosen(settings)
        refuse_counts(warmup_steps=warmup_steps, total_steps=total_steps, steps_done=steps_done)
        self.settings, self.model, self.optimizer, self.scaler = found, model, optimizer, scaler
        self.also, self.where, self.events = list(also), where, list[dict[str, Any]]()
        self.evidence = Evidence.of(found)
        self.is_reference = False
        self._step, self._tell = step, tell
        self._taken = steps_done
        # Losses of the run's first steps on this rank; kept on the device, so nothing synchronizes.
        self._first: list[Any] = []
        self._last_begin = total_steps - found.steps if total_steps else None
        self._next = max(found.begins(warmup_steps, 2**62)[0], self._multiple(steps_done))
        self._check: _Check | None = None
        self._wide = ExitStack()  # not empty: the run stays in BF16 until the next check
        self._is_wide, self._given = False, ""
        refuse(model, self._optimizers, self.also, found.recipe)
        self.nbytes = snapshot_bytes(model, optimizer, self.also)
        require_free_space(COPIES * self.nbytes, where, "a check of the guard")

    def __call__(self, batch: Any) -> Any:
        """Call `step(batch)` with the due parts of a check before and after it.

        Returns the step's result.
        """
        self.before_step()
        try:
            loss = self._step(batch)
        except BaseException:
            self._drop()  # the number of optimizer steps taken is unknown after an exception
            raise
        self.after_step(batch, loss)
        return loss

    def before_step(self) -> None:
        """Call before each optimizer step, in loops that cannot pass their step as one call.

        Starts a check that is due.
        """
        is_cut = self._last_begin is not None and self._taken > self._last_begin
        # "bf16" for good leaves nothing to compare; any other recipe is checked on.
        if (
            self._check is None
            and self._taken >= self._next
            and not is_cut
            and self._given != "bf16"
        ):
            self._wide.close()
            self._is_wide = False
            fork = self._snapshot()
            first, audit = (
                FirstGradients(self.model, self.optimizer),
                Audit(self.model, len(self.evidence.checks)),
            )
            self._check = _Check(self._taken, fork, first, audit)
        if self._check is not None:
            # Recorded at each step, not only at the first: the loop's data pipeline may draw in
            # between.
            self._check.generators.append(generators())
            if len(self._check.batches) >= self.settings.steps - AUDITED:
                self._check.audit.begin()

    def after_step(self, batch: Any, loss: Any) -> None:
        """Call after each optimizer step, with its batch and mean loss.

        Finishes a check that has its steps.
        """
        refuse_no_loss(loss)
        self._taken += 1
        if len(self._first) < ENDS:
            self._first.append(loss.detach().clone() if isinstance(loss, torch.Tensor) else loss)
        if self._check is None:
            return
        self._check.first.close()
        self._check.audit.end()
        self._check.batches.append(Kept(batch))
        # Cloned, because a CUDA graph or the loop may reuse the loss's memory. No .item(): it would
        # synchronize.
        self._check.losses.append(loss.detach().clone() if isinstance(loss, torch.Tensor) else loss)
        if len(self._check.batches) == self.settings.steps:
            # Cleared first: an error in the judgement must not leave a check that is continued.
            check, self._check = self._check, None
            self._judge(check)
            self._next = self._multiple(self._taken)

    def _drop(self) -> None:
        if self._check is not None:
            self._check.first.close()
            self._check.audit.end()
        self._check = None

    def _multiple(self, step: int) -> int:
        """First step from `step` on after which a check starts."""
        return -(-step // self.settings.every) * self.settings.every

    @property
    def is_checking(self) -> bool:
        """True during a check; after a kill now, its BF16 steps are replayed again."""
        return self._check is not None

    def words(self) -> str:
        """Sentences on the guard's settings and costs, to print at the start of a run."""
        settings = self.settings
        place = "the host's memory" if self.where == "host" else str(self.where)
        return (
            f"Guard: every {settings.every} steps, {settings.steps} in BF16 on the same batches; harmless is {settings.margin_words()}. "
            f"A check keeps {settings.steps} batches, and up to {size(COPIES * self.nbytes)} in {place}. "
            f"{words(self.model, self.optimizer)}"
        )

    def state_dict(self) -> dict[str, Any]:
        """State for a checkpoint of the loop: numbers and strings only."""
        return {
            "taken": self._taken, "next": self._next, "is_wide": self._is_wide, "given": self._given,
            "settings": repr(self.settings), "evidence": self.evidence.state_dict(), "first": list(map(float, self._first)),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`.

        Call it before the model's load_state_dict: layers may have another recipe since.

        Raises ConfigError for a state of other settings, and for a malformed one.
        """
        refuse_state(state, repr(self.settings))
        self._drop()
        self._taken, self._next, self._given = state["taken"], state["next"], state["given"]
        self.evidence.load_state_dict(state["evidence"])
        # Older states lack them: the first steps from here on then count.
        self._first = list(state.get("first", ()))
        if self._given:
            self._widen(self._given)
        self._stay_wide(state["is_wide"])

    # Checks

    def _judge(self, check: _Check) -> None:
        """Replay the steps of a check in BF16 and judge them.

        Leaves the state for the next step.
        """
        began_at_s = time.monotonic()
        narrow, rates = self._read(check.losses), self._rates()
        self.evidence.first = self._read(self._first)
        control, end = None, None
        if wants_control(self.evidence):
            # With a control two replays start from the same state, so the end needs a copy of its
            # own.
            end = self._snapshot()
            check.fork.restore()
            nudge(self.model)
            # The control comes first, so that the BF16 end state of the second replay is in place
            # afterwards.
            control, _ = self._in_bf16(check, end, rates)
        if end is None:
            check.fork.swap()
            end = check.fork
        else:
            check.fork.restore()
        wide, gradients = self._in_bf16(check, end, rates)
        found = slopes(check.first.samples, gradients)
        audited = check.audit.found()
        result, numbers = judged(
            self.evidence, check.begun, self.settings.steps, narrow, wide, control, found, audited
        )
        action = self._follow(result, end)
        event = {
            "event": "guard",
            "step": self._taken,
            **numbers,
            "then": action,
            "spent_s": time.monotonic() - began_at_s,
        }
        self.events.append(event)
        if self._tell is not None:
            self._tell(event)
        elif result.outcome == WORSE:
            warn(
                f"narrowgauge.Guard: steps {check.begun + 1} to {self._taken}: {result.sentence} "
                f"{GROWN if grows_into_steps(self.model, result) else SEQUEL}",
                code="guard.worse",
                stacklevel=4,
            )

    def _snapshot(self) -> Snapshot:
        """Copy the state of the loop: model, optimizers, scaler and the objects in `also`."""
        training = Training(
            model=self.model,
            optimizer=self.optimizer,
            scaler=self.scaler,
            also=tuple(self.also),
        )
        return Snapshot.take(training, where=self.where)

    def _in_bf16(
        self, check: _Check, end: Snapshot, rates: list[float]
    ) -> tuple[list[float], Samples]:
        """Replay the steps of a check in BF16 from the current state.

        end    snapshot that is restored if a step fails
        rates  learning rates expected at the end

        Returns the losses, and gradient samples of the first step.
        """
        losses = []
        try:
            with (
                self._as_reference(),
                suspended(self.model),
                FirstGradients(self.model, self.optimizer) as first,
            ):
                for kept, states in zip(check.batches, check.generators, strict=True):
                    # The same dropout masks and stochastic rounding as in the run's own step.
                    set_generators(states)
                    loss = self._step(kept.given())
                    losses.append(loss.detach().clone() if isinstance(loss, torch.Tensor) else loss)
            # An unregistered scheduler would have moved the learning rate of the real run during
            # the replay.
            if self._rates() != rates:
                raise ConfigError(
                    f"Guard: the same steps ended with the learning rates {rates}, and {self._rates()} when they were taken again: "
                    "something counts them that was not put back. Hand it over: Guard(..., also=[...]).",
                    code="guard.learning-rates",
                )
            return self._read(losses), first.samples
        except BaseException as error:
            end.restore()
            error.add_note(
                Reason(
                    "guard.reference-failed",
                    "It was raised while a guard took the steps of its check in BF16; the run is at its narrow end again.",
                )
            )
            raise

    def _rates(self) -> list[float]:
        """Current learning rates."""
        return [float(group["lr"]) for each in self._optimizers for group in each.param_groups]

    @property
    def _optimizers(self) -> list[Any]:
        return (
            list(self.optimizer) if isinstance(self.optimizer, list | tuple) else [self.optimizer]
        )

    @contextmanager
    def _as_reference(self) -> Iterator[None]:
        self.is_reference = True
        try:
            yield
        finally:
            self.is_reference = False

    def _follow(self, result: GuardResult, end: Snapshot) -> str:
        """Choose the state from which the run continues; returns a word for the action taken.

        Called with the BF16 end state in place; `end` is the run's own end.
        """
        is_worse = result.outcome == WORSE
        if (
            not is_worse
            or not self.settings.keeps_reference
            or self._given
            or grows_into_steps(self.model, result)
        ):
            end.restore()
            return "warn" if is_worse else ""
        if self.settings.recipe:
            self._widen(self.settings.recipe)
            # Checks of the old recipe say nothing about the new one, so its evidence starts empty.
            first, self.evidence = self.evidence.first, Evidence.of(self.settings)
            self._given, self.evidence.first = self.settings.recipe, first
            return self._given
        self._stay_wide(True)
        return "stay"

    def _widen(self, recipe: str) -> None:
        """Switch to another recipe for good.

        Averaged copies switch too, because their tensors must match the model's.
        """
        for model in (self.model, *self.also):
            # Averaged copies without converted layers have no recipe to switch.
            if isinstance(model, nn.Module) and any(
                isinstance(each, QLinear) and each.recipe for each in model.modules()
            ):
                switch(model, recipe)

    def _stay_wide(self, is_wide: bool) -> None:
        self._wide.close()
        self._is_wide = is_wide
        if is_wide:
            self._wide.enter_context(suspended(self.model))

    def _read(self, losses: list[Any]) -> list[float]:
        """Losses as floats, averaged over ranks: one copy from the device, one synchronisation."""
        if not losses:
            return []
        device = next(self.model.parameters()).device
        found = torch.stack(
            [
                torch.as_tensor(each, dtype=torch.float64).detach().reshape(()).to(device)
                for each in losses
            ]
        )
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(found)
            found /= dist.get_world_size()
        return list(found.tolist())
