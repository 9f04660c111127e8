"""Guard: compare any low-precision training loop with BF16, without training a second run.

    settings = "every=2000,steps=100,margin=0.25%,then=warn"
    guard = ng.Guard(settings, model, optimizer, step, also=[scheduler])
    for batch in batches:
        loss = guard(batch)    # calls step(batch): forward, backward, optimizer.step(),
                               # scheduler.step(), zero_grad()

A check looks back, so the loop keeps its iterator, workers and sampler: the run takes `steps` steps
as usual, and their batches are stored. Then they are replayed in BF16 from a copy of the state
(`engine`). A control is BF16 from weights changed in their last bit, with the same dropout masks, so
that only rounding differs (`nudge`).

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

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn

from narrowgauge.conversion.switching import switch
from narrowgauge.diagnose.format_text import size
from narrowgauge.diagnose.guard_settings import COPIES, GuardSettings, chosen, refuse_counts
from narrowgauge.diagnose.verdict import WORSE
from narrowgauge.errors import ConfigError, warn
from narrowgauge.lab.guard.batches import Kept
from narrowgauge.lab.guard.check import nudge
from narrowgauge.lab.guard.engine import GROWN, GuardEngine, Replay, grows_into_steps
from narrowgauge.lab.guard.refusals import refuse, refuse_no_loss, refuse_state
from narrowgauge.lab.guard.same_weights import hooked, words
from narrowgauge.nn.converted_model import suspended
from narrowgauge.nn.linear import QLinear
from narrowgauge.ops.rng import generators, set_generators
from narrowgauge.snapshot import Snapshot, Training, snapshot_bytes
from narrowgauge.snapshot.block_storage import require_free_space
from narrowgauge.structure import require_module

if TYPE_CHECKING:
    from narrowgauge.lab.guard.evidence import Evidence
    from narrowgauge.lab.guard.result import GuardResult

Step = Callable[[Any], Any]
SEQUEL = "Which product it is: narrowgauge.lab.blame.blame(model, batch)."


class LoopSteps:
    """A user's loop as the engine sees it (`engine.Steps`).

    step          the loop's own optimizer step
    taken         optimizer steps of the run so far
    is_reference  a replay is in progress
    """

    def __init__(
        self,
        training: Training,
        step: Step,
        where: str | Path,
        taken: int,
    ) -> None:
        self.training, self.step, self.where, self.taken = training, step, where, taken
        self.is_reference = False
        # Of each step of the check in progress: the generators before it, and its batch
        self._generators: list[dict[str, Any]] = []
        self._batches: list[Kept] = []
        self._rates_after: list[float] = []  # learning rates after the newest one

    @property
    def model(self) -> nn.Module:
        return self.training.model

    @property
    def optimizer(self) -> Any:
        return self.training.optimizer

    def record_generators(self) -> None:
        """Records the generators before a step of a check.

        Before each one, not only the first: the loop's data pipeline may draw in between.
        """
        self._generators.append(generators())

    def record(self, batch: Any) -> None:
        """Records the batch of a step of a check, after it."""
        self._batches.append(Kept(batch))
        self._rates_after = self._rates()

    def forget(self) -> None:
        """Drops the records of a check."""
        self._generators, self._batches = [], []

    def may_check(self, steps: int) -> bool:
        return True

    def snapshot(self) -> Snapshot:
        return Snapshot.take(self.training, where=self.where)

    def restore(self, snapshot: Snapshot) -> None:
        snapshot.restore()

    def exchange(self, snapshot: Snapshot) -> None:
        snapshot.swap()

    def replay(self, steps: int, *, as_control: bool) -> Replay:
        assert len(self._batches) == len(self._generators) == steps
        if as_control:
            nudge(self.model)
        losses: list[Any] = []
        stepped: list[int] = []
        # A GradScaler that finds an overflow calls no optimizer. Gradients of a later step would
        # then be compared with those of the run's first one.
        hooks = [
            each.register_step_pre_hook(lambda *_: stepped.append(len(losses)))
            for each in hooked(self.optimizer)
        ]
        try:
            with self._as_reference(), suspended(self.model):
                for kept, states in zip(self._batches, self._generators, strict=True):
                    # The same dropout masks and stochastic rounding as in the run's own step.
                    set_generators(states)
                    losses.append(_kept_loss(self.step(kept.given())))
        finally:
            for hook in hooks:
                hook.remove()
        # An unregistered scheduler would have moved the learning rate of the real run during the
        # replay.
        if self._rates() != self._rates_after:
            raise ConfigError(
                f"Guard: the same steps ended with the learning rates {self._rates_after}, and {self._rates()} when they were taken again: "
                "something counts them that was not put back. Hand it over: Guard(..., also=[...]).",
                code="guard.learning-rates",
            )
        return Replay(losses=losses, has_gradients=0 in stepped)

    def read(self, losses: Sequence[Any]) -> list[float]:
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

    def tell(self, result: GuardResult, event: Mapping[str, Any]) -> None:
        """Nothing: `Guard.after_step` tells the loop of a check, after the engine has acted."""

    def adopt(self, begun: int) -> None:
        """Nothing: the loop has printed its own steps already."""

    def widen(self, recipe: str) -> None:
        """Switches to another recipe for good.

        Averaged copies switch too, because their tensors must match the model's.
        """
        for model in (self.model, *self.training.also):
            # Averaged copies without converted layers have no recipe to switch.
            if isinstance(model, nn.Module) and any(
                isinstance(each, QLinear) and each.recipe for each in model.modules()
            ):
                switch(model, recipe)

    def _rates(self) -> list[float]:
        """Current learning rates."""
        return [
            float(group["lr"]) for each in self.training.optimizers for group in each.param_groups
        ]

    @contextmanager
    def _as_reference(self) -> Iterator[None]:
        self.is_reference = True
        try:
            yield
        finally:
            self.is_reference = False


def _kept_loss(loss: Any) -> Any:
    # Cloned, because a CUDA graph or the loop may reuse the loss's memory. No .item(): it would
    # synchronize.
    return loss.detach().clone() if isinstance(loss, torch.Tensor) else loss


class Guard:
    """Judges a training loop; the module docstring shows its use.

    events  one event per check with the numbers behind the verdict; also passed to `tell`
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
        training = Training(model=model, optimizer=optimizer, scaler=scaler, also=tuple(also))
        self.settings, self.where, self.events = found, where, list[dict[str, Any]]()
        self._tell = tell
        self._steps = LoopSteps(training, step, where, steps_done)
        self._engine = GuardEngine(
            found, self._steps, warmup_steps=warmup_steps, total_steps=total_steps
        )
        self._engine.first_after = steps_done
        refuse(model, training.optimizers, training.also, found.recipe)
        self.nbytes = snapshot_bytes(model, optimizer, training.also)
        require_free_space(COPIES * self.nbytes, where, "a check of the guard")

    def __call__(self, batch: Any) -> Any:
        """Call `step(batch)` with the due parts of a check before and after it.

        Returns the step's result.
        """
        self.before_step()
        try:
            loss = self._steps.step(batch)
        except BaseException:
            self._drop()  # the number of optimizer steps taken is unknown after an exception
            raise
        self.after_step(batch, loss)
        return loss

    def before_step(self) -> None:
        """Call before each optimizer step, in loops that cannot pass their step as one call.

        Starts a check that is due.
        """
        self._engine.before_step()
        if self._engine.check is not None:
            self._steps.record_generators()

    def after_step(self, batch: Any, loss: Any) -> None:
        """Call after each optimizer step, with its batch and mean loss.

        Finishes a check that has its steps.
        """
        refuse_no_loss(loss)
        self._steps.taken += 1
        if self._engine.check is not None:
            self._steps.record(batch)
        self._engine.saw(self._steps.taken, _kept_loss(loss))
        event = self._engine.after_step()
        if self._engine.check is None:
            self._steps.forget()
        if event is not None:
            self._report({"event": "guard", "step": self._steps.taken, **event})

    def _report(self, event: dict[str, Any]) -> None:
        self.events.append(event)
        if self._tell is not None:
            self._tell(event)
        elif event["outcome"] == WORSE:
            is_grown = grows_into_steps(self.model, event["direction"])
            warn(
                f"narrowgauge.Guard: steps {event['begun'] + 1} to {event['step']}: {event['sentence']} "
                f"{GROWN if is_grown else SEQUEL}",
                code="guard.worse",
                stacklevel=4,
            )

    def _drop(self) -> None:
        self._engine.drop()
        self._steps.forget()

    @property
    def model(self) -> nn.Module:
        return self._steps.model

    @property
    def optimizer(self) -> Any:
        return self._steps.optimizer

    @property
    def evidence(self) -> Evidence:
        """Results of all checks under the present recipe."""
        return self._engine.evidence

    @property
    def is_reference(self) -> bool:
        """True during a BF16 replay, whose steps are not the run's: do not print or log them."""
        return self._steps.is_reference

    @property
    def is_checking(self) -> bool:
        """True during a check; after a kill now, the check begins anew."""
        return self._engine.check is not None

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
        engine = self._engine
        return {
            "taken": self._steps.taken, "next": engine.next, "is_wide": engine.stays_wide, "given": engine.given,
            "settings": repr(self.settings), "evidence": self.evidence.state_dict(), "first": list(map(float, engine.first)),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`.

        Call it before the model's load_state_dict: layers may have another recipe since.

        Raises ConfigError for a state of other settings, and for a malformed one.
        """
        refuse_state(state, repr(self.settings))
        self._drop()
        self._steps.taken = state["taken"]
        if state["given"]:
            self._steps.widen(state["given"])
        # Older states lack them: the first steps from here on then count.
        first = state.get("first", ())
        self._engine.first_after = state["taken"] - len(first)
        self._engine.load(
            state["evidence"],
            first,
            given=state["given"],
            stays_wide=state["is_wide"],
            due_after=state["next"],
        )
