"""Guard: judges any training loop on narrow numbers against BF16, which no twin of the run has to be trained for.

    guard = ng.Guard("every=2000,steps=100,margin=0.25%,then=warn", model, optimizer, step, also=[scheduler])
    for batch in batches:
        loss = guard(batch)          # step(batch): forward, backward, optimizer.step(), scheduler.step(), zero_grad()

A check copies the state apart from the run (`fork`). The run takes `steps` steps as usual, and their
batches are kept. Then copy and present state are exchanged, and the same batches are taken in BF16.
Nothing is drawn ahead, so the loop keeps its iterator, workers and sampler. The difference of the
losses is judged (`check`, `evidence`). Every fourth check takes a control too: BF16 once more from
weights that differ in their last bit, with the same dropout masks, so that rounding alone separates
the two (`nudge`).
In the last steps of a check the numbers of the run are compared with its recipe (`audit`).

Afterwards the run continues from its narrow end. Without an alarm it has the bits of the unguarded
run. After an alarm, `then` may let it continue from the BF16 end instead.

    cost     of `every` steps `steps` more, at a control twice as many
    memory   a copy of the state in host memory or on a disk during a check, two copies during a
             control; and `steps` batches on the device where the loop has them
    kill     the copy is gone. A check that was cut off begins anew with the first step after the resume

Each of several ranks has a guard and copies its own part. Losses are averaged over the default
process group, so all ranks reach the same verdict.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from narrowgauge.conversion import suspended
from narrowgauge.conversion.switching import switch
from narrowgauge.diagnose.format_text import size
from narrowgauge.diagnose.guard.audit import STEPS as AUDITED
from narrowgauge.diagnose.guard.audit import Audit
from narrowgauge.diagnose.guard.batches import Kept
from narrowgauge.diagnose.guard.check import judged, wants_control
from narrowgauge.diagnose.guard.fork import Fork, fork_bytes
from narrowgauge.diagnose.guard.grown import GROWN, grows_into_steps
from narrowgauge.diagnose.guard.nudge import nudge
from narrowgauge.diagnose.guard.refusals import refuse, refuse_no_loss, refuse_state
from narrowgauge.diagnose.guard.same_weights import FirstGradients, Samples, slopes, words
from narrowgauge.diagnose.guard.settings import GuardSettings, chosen, refuse_counts
from narrowgauge.diagnose.guard.verdict import WORSE, Verdict
from narrowgauge.diagnose.sensitivity import ENDS
from narrowgauge.errors import ConfigError
from narrowgauge.nn.linear import QLinear
from narrowgauge.ops.rng import generators, set_generators
from narrowgauge.snapshot.bytes_apart import refuse_room
from narrowgauge.structure import require_module

Step = Callable[[Any], Any]
SEQUEL = "Which product it is: narrowgauge.diagnose.blame.blame(model, batch)."
COPIES = 2  # of the state, at most: that of the begin and that of the end, while a control is taken


@dataclass
class _Check:
    """One that is under way.

    begun  the steps of the run before it
    fork   the state of then
    first  the gradients of its first step
    audit  what its last steps compute
    """

    begun: int
    fork: Fork
    first: FirstGradients
    audit: Audit
    batches: list[Kept] = field(default_factory=list)
    generators: list[dict[str, Any]] = field(default_factory=list)  # before each step: a data set may draw between two
    losses: list[Any] = field(default_factory=list)


class Guard:
    """See the module.

    events        one for each check, with the numbers behind the verdict; also given to `tell`
    is_reference  True during BF16 steps, which are not the run's: print and log nothing of them
    """

    def __init__(
        self, settings: str | GuardSettings, model: nn.Module, optimizer: Any, step: Step, *, scaler: Any = None,
        also: Iterable[Any] = (), warmup_steps: int = 0, total_steps: int = 0, steps_done: int = 0, where: str | Path = "host",
        tell: Callable[[dict[str, Any]], None] | None = None,
    ) -> None:  # fmt: skip
        """A guard for the loop whose step is `step`; call it with each batch.

        settings         as `narrowgauge train --guard`: "every=2000,steps=100,margin=0.25%,then=stay"
        step             takes a batch, whatever that is, makes one optimizer step of it and returns the mean loss
        optimizer        one, or a list
        also             what else a step changes: schedulers, averaged models, torch.Generators
        warmup_steps     no check begins before
        total_steps      no check begins that the run would cut; 0: not known
        steps_done       of the run before, where no state of a guard is loaded
        where            of the copy: "host", or a folder on a disk
        tell             is called with each event; without it, a verdict "worse" is a warning

        Raises ConfigError for settings that cannot work, OutOfMemoryError or StorageError where the copy has no room.
        """
        require_module(model, "Guard")
        found = chosen(settings)
        refuse_counts(warmup_steps=warmup_steps, total_steps=total_steps, steps_done=steps_done)
        self.settings, self.model, self.optimizer, self.scaler = found, model, optimizer, scaler
        self.also, self.where, self.events = list(also), where, list[dict[str, Any]]()
        self.evidence = found.evidence()
        self.is_reference = False
        self._step, self._tell = step, tell
        self._taken = steps_done
        self._first: list[Any] = []  # losses of the first steps that it saw, this rank's: nothing waits for them
        self._last_begin = total_steps - found.steps if total_steps else None
        self._next = max(found.begins(warmup_steps, 2**62)[0], self._multiple(steps_done))
        self._check: _Check | None = None
        self._wide = ExitStack()  # not empty: the run is in BF16 until the next check
        self._is_wide, self._given = False, ""
        refuse(model, self._optimizers, self.also, found.recipe)
        self.nbytes = fork_bytes(model, optimizer, self.also)
        refuse_room(COPIES * self.nbytes, where, "a check of the guard")

    def __call__(self, batch: Any) -> Any:
        """`step(batch)`, what it returns, and what is due of a check before and after it."""
        self.before_step()
        try:
            loss = self._step(batch)
        except BaseException:
            self._drop()  # which steps were taken is not known
            raise
        self.after_step(batch, loss)
        return loss

    def before_step(self) -> None:
        """For loops that cannot hand their step over as one call: before each optimizer step. Begins a check that is due."""
        is_cut = self._last_begin is not None and self._taken > self._last_begin
        if self._check is None and self._taken >= self._next and not is_cut and self._given != "bf16":
            self._wide.close()
            self._is_wide = False
            fork = Fork.take(self.model, self.optimizer, self.scaler, self.where, self.also)
            first, audit = FirstGradients(self.model, self.optimizer), Audit(self.model, len(self.evidence.checks))
            self._check = _Check(self._taken, fork, first, audit)
        if self._check is not None:
            self._check.generators.append(generators())
            if len(self._check.batches) >= self.settings.steps - AUDITED:
                self._check.audit.begin()

    def after_step(self, batch: Any, loss: Any) -> None:
        """And after it, with its batch and mean loss. Ends a check that has its steps."""
        refuse_no_loss(loss)
        self._taken += 1
        if len(self._first) < ENDS:
            self._first.append(loss.detach().clone() if isinstance(loss, torch.Tensor) else loss)
        if self._check is None:
            return
        self._check.first.close()
        self._check.audit.end()
        self._check.batches.append(Kept(batch))
        self._check.losses.append(loss.detach().clone() if isinstance(loss, torch.Tensor) else loss)
        if len(self._check.batches) == self.settings.steps:
            check, self._check = self._check, None
            self._judge(check)
            self._next = self._multiple(self._taken)

    def _drop(self) -> None:
        if self._check is not None:
            self._check.first.close()
            self._check.audit.end()
        self._check = None

    def _multiple(self, step: int) -> int:
        """The first step from there on after which a check begins."""
        return -(-step // self.settings.every) * self.settings.every

    @property
    def is_checking(self) -> bool:
        """Whether a check is under way: a kill now takes its steps in BF16 once more."""
        return self._check is not None

    def words(self) -> str:
        """What it does and costs, for whoever starts the run."""
        settings = self.settings
        place = "the host's memory" if self.where == "host" else str(self.where)
        return (
            f"Guard: every {settings.every} steps, {settings.steps} in BF16 on the same batches; harmless is {settings.margin_words()}. "
            f"A check keeps {settings.steps} batches, and up to {size(COPIES * self.nbytes)} in {place}. "
            f"{words(self.model, self.optimizer)}"
        )

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint of the loop: numbers and strings alone."""
        return {
            "taken": self._taken, "next": self._next, "is_wide": self._is_wide, "given": self._given,
            "settings": repr(self.settings), "evidence": self.evidence.state_dict(), "first": list(map(float, self._first)),
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from what `state_dict` gave. Call it before the model's, which may have got another recipe since.

        Raises ConfigError for a guard with other settings, and for what no guard gave.
        """
        refuse_state(state, repr(self.settings))
        self._drop()
        self._taken, self._next, self._given = state["taken"], state["next"], state["given"]
        self.evidence.load_state_dict(state["evidence"])
        self._first = list(state.get("first", ()))  # without them: of the steps from here on
        if self._given:
            self._widen(self._given)
        self._stay_wide(state["is_wide"])

    # A check

    def _judge(self, check: _Check) -> None:
        """Takes the steps of a check in BF16, and leaves the state from which the run goes on."""
        began_at_s = time.monotonic()
        narrow, rates = self._read(check.losses), self._rates()
        self.evidence.first = self._read(self._first)
        control, end = None, None
        if wants_control(self.evidence):
            end = Fork.take(self.model, self.optimizer, self.scaler, self.where, self.also)
            check.fork.restore()
            nudge(self.model)
            control, _ = self._in_bf16(check, end, rates)
        if end is None:
            check.fork.swap()
            end = check.fork
        else:
            check.fork.restore()
        wide, gradients = self._in_bf16(check, end, rates)
        found = slopes(check.first.samples, gradients)
        audited = check.audit.found()
        verdict, numbers = judged(
            self.evidence, check.begun, self.settings.steps, narrow, wide, control, found, audited
        )
        action = self._follow(verdict, end)
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
        elif verdict.name == WORSE:
            warnings.warn(
                f"narrowgauge.Guard: steps {check.begun + 1} to {self._taken}: {verdict.sentence} "
                f"{GROWN if grows_into_steps(self.model, verdict) else SEQUEL}",
                stacklevel=4,
            )

    def _in_bf16(self, check: _Check, end: Fork, rates: list[float]) -> tuple[list[float], Samples]:
        """Of the steps of a check from the state of now the losses, and the gradients of the first.

        end: put back if they fail. rates: with which they have to end.
        """
        losses = []
        try:
            with (
                self._as_reference(),
                suspended(self.model),
                FirstGradients(self.model, self.optimizer) as first,
            ):
                for kept, states in zip(check.batches, check.generators, strict=True):
                    set_generators(states)
                    loss = self._step(kept.given())
                    losses.append(loss.detach().clone() if isinstance(loss, torch.Tensor) else loss)
            if self._rates() != rates:
                raise ConfigError(
                    f"Guard: the same steps ended with the learning rates {rates}, and {self._rates()} when they were taken again: "
                    "something counts them that was not put back. Hand it over: Guard(..., also=[...])."
                )
            return self._read(losses), first.samples
        except BaseException as error:
            end.restore()
            error.add_note(
                "It was raised while a guard took the steps of its check in BF16; the run is at its narrow end again."
            )
            raise

    def _rates(self) -> list[float]:
        """The learning rates of now."""
        return [float(group["lr"]) for each in self._optimizers for group in each.param_groups]

    @property
    def _optimizers(self) -> list[Any]:
        return list(self.optimizer) if isinstance(self.optimizer, list | tuple) else [self.optimizer]

    @contextmanager
    def _as_reference(self) -> Iterator[None]:
        self.is_reference = True
        try:
            yield
        finally:
            self.is_reference = False

    def _follow(self, verdict: Verdict, end: Fork) -> str:
        """Puts the run where it goes on after a verdict; says in a word what was done. The state of now is the BF16 end."""
        is_worse = verdict.name == WORSE
        if not is_worse or not self.settings.keeps_reference or self._given or grows_into_steps(self.model, verdict):
            end.restore()
            return "warn" if is_worse else ""
        if self.settings.recipe:
            self._widen(self.settings.recipe)
            first, self.evidence = self.evidence.first, self.settings.evidence()
            self._given, self.evidence.first = self.settings.recipe, first
            return self._given
        self._stay_wide(True)
        return "stay"

    def _widen(self, recipe: str) -> None:
        """For good; averaged copies of the model are to hold the same tensors as it does."""
        for model in (self.model, *self.also):
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
        """As numbers, the mean over ranks: one copy, one wait."""
        if not losses:
            return []
        device = next(self.model.parameters()).device
        found = torch.stack(
            [torch.as_tensor(each, dtype=torch.float64).detach().reshape(()).to(device) for each in losses]
        )
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            dist.all_reduce(found)
            found /= dist.get_world_size()
        return list(found.tolist())
