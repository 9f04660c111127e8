"""Steps of a run that do not count: taken from its present state on the batches that come next, and undone to the bit.

    with undone(trainer):                          what a step changes is put back at the end, whatever happens
        wide = taken(trainer, 100)                 in BF16 (`suspended`)
    with undone(trainer):
        again = taken(trainer, 100, other_order=True)          the same in another order of summation: a control
    found = stretch(trainer, 100, lambda model: switched(model, "bf16", "layers.1.down_proj", ["grad_weight"]))
                                                   both in one, under another change of the model (`conversion.switching`)

The other order is that of halves of the micro-batches. Where these cannot be had (compiled shapes, stages, steps in backward), or
would draw other masks of dropout, weights are moved by a last bit instead (`nudge`).

Nothing is logged. A step is the run's own: its batch, its learning rate, its clipping, its loss scale. Put back are weights, optimizer,
recipes' state, loss scale and generators (`Fork`), the position in the data, what ranks count together, and how many steps were skipped.
Steps that a GPU was given and the host has not read (`pending`) must be read before.

Where a number is not finite a stretch ends as a run would: `Stretch.lost` says at which step. A request to stop ends it too.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from narrowgauge.conversion import suspended
from narrowgauge.data import IGNORED
from narrowgauge.diagnose.guard.fork import Fork
from narrowgauge.diagnose.guard.nudge import nudge
from narrowgauge.errors import ConfigError
from narrowgauge.optim.base import NarrowOptimizer
from narrowgauge.train import launches, step, stepping
from narrowgauge.train.loss import Batch, learning_rate
from narrowgauge.train.parallel.step import agreed, targets_of_ranks
from narrowgauge.train.pending import MOST, fetched

if TYPE_CHECKING:
    from narrowgauge.train.trainer import Trainer

Change = Callable[[nn.Module], AbstractContextManager[Any]]  # what is different inside a stretch, as `suspended`


@dataclass
class Stretch:
    """What was seen.

    begun  the step after which it began
    steps  of each step what the log of a run says: `loss`, `grad_norm`, `lr`, `tokens`, ...; and `inputs`, tokens that the model read
    lost   the step at which loss or norm were not finite, and nothing went on; 0: none
    ended  '' or why it ended before its last step: a request to stop
    drawn  (number of the last step that was begun, numbers of the training examples in its batch)
    """

    begun: int
    steps: list[dict[str, Any]] = field(default_factory=list)
    lost: int = 0
    ended: str = ""
    spent_s: float = 0.0
    drawn: tuple[int, Sequence[int]] = (0, ())

    @property
    def losses(self) -> list[float]:
        return [each["loss"] for each in self.steps]

    @property
    def grad_norms(self) -> list[float]:
        return [each["grad_norm"] for each in self.steps]


def stretch(
    trainer: Trainer, steps: int, change: Change = suspended, *, other_order: bool = False, where: str | Path = "host"
) -> Stretch:
    """So many optimizer steps from the present state under a change of the model; afterwards all is as it was, to the bit."""
    with undone(trainer, where):
        return taken(trainer, steps, change, other_order=other_order)


def refuse(trainer: Trainer, steps: int) -> None:
    """ConfigError where a run cannot take such a stretch, in words."""
    config = trainer.config
    if config.cuda_graph:
        raise ConfigError(
            "a stretch of steps that do not count: cuda_graph = true replays the products of the recipe, and graphs of others would want "
            "memory of their own. Train without --cuda-graph."
        )
    if trainer.step + steps > config.steps:
        raise ConfigError(
            f"a stretch of {steps} steps from step {trainer.step}: the run has {config.steps} steps. Take a shorter one."
        )
    if trainer.pending is not None and trainer.pending.steps:
        raise ConfigError(
            f"a stretch from step {trainer.step}: {len(trainer.pending.steps)} steps were launched and not read. Read them first."
        )


@contextmanager
def undone(trainer: Trainer, where: str | Path = "host") -> Iterator[None]:
    """What steps change inside the block is put back at its end, also where it raises. where: as `Fork` keeps its copy meanwhile."""
    before = _Before.of(trainer, where)
    trainer.pending = None
    if trainer.decision is not None:
        trainer.decision = trainer.new_decision()
    try:
        yield
    finally:
        before.put_back(trainer)


def taken(trainer: Trainer, steps: int, change: Change = suspended, *, other_order: bool = False) -> Stretch:
    """The steps, which stay. Inside `undone`."""
    refuse(trainer, steps)
    began_at_s = time.monotonic()
    found, readings = Stretch(trainer.step), list[Tensor]()
    in_halves = other_order and _takes_halves(trainer)
    if other_order and not in_halves:
        nudge(trainer.model)
    with change(trainer.model):
        for number in range(trainer.step + 1, trainer.step + steps + 1):
            if trainer.stop.requested:
                found.ended = f"a request to stop ({trainer.stop.requested})"
                break
            readings.append(_step(trainer, number, in_halves, found))
            if len(readings) == MOST or trainer.decision is None or number == found.begun + steps:
                _read(trainer, readings, found)
            if found.lost:
                break
        _read(trainer, readings, found)
    trainer.optimizer.zero_grad()
    found.spent_s = time.monotonic() - began_at_s
    return found


def _step(trainer: Trainer, number: int, in_halves: bool, found: Stretch) -> Tensor:
    """One step; what it says but loss and norm goes to `found`, and the readings of these are returned."""
    trainer.ranks.place = f"step {number} of a stretch that does not count"
    drawn = trainer.feed.draw(trainer.step)
    found.drawn = number, drawn.examples
    targets, facts = targets_of_ranks(drawn, number, trainer.stop, trainer.ranks)
    batches = [half for batch in drawn.batches for half in _halves(batch)] if in_halves else drawn.batches
    lr = learning_rate(trainer.config, number)
    launches.set_learning_rate(trainer.optimizer, lr)
    take = trainer.gradient if trainer.stepping is None else partial(_in_backward, trainer)
    readings = take(batches, targets)
    found.steps.append({"lr": lr, "tokens": targets, **facts, "inputs": drawn.inputs})
    if trainer.decision is not None:
        trainer.decision.see(readings)
    elif not bool(readings.isfinite().all()) and trainer.scaler is None:
        return readings  # nothing has changed; the reading ends the stretch
    advance = partial(trainer.parallel.advance, trainer.model)
    step.update(trainer.optimizer, trainer.scaler, advance, trainer.decision)
    trainer.step = number
    return readings


def _read(trainer: Trainer, readings: list[Tensor], found: Stretch) -> None:
    """Losses and norms of the steps since the last reading; finds the one at which a run would have ended."""
    if not readings:
        return
    numbers, sizes = fetched(torch.cat(readings)), [len(each) for each in readings]
    first = len(found.steps) - len(readings)
    readings.clear()
    norms = []
    for place, size in enumerate(sizes, first):
        *losses, norm = (numbers.pop(0) for _ in range(size))
        trainer.ranks.place = f"step {found.begun + place + 1} of a stretch that does not count"
        loss, norm = agreed(losses, norm, trainer.ranks)
        norms.append(norm)
        found.steps[place] = {"loss": loss, "grad_norm": norm, **found.steps[place]}
        if not found.lost and not trainer.is_fine(loss, norm):
            found.lost = found.begun + place + 1
    if trainer.decision is not None and isinstance(trainer.optimizer, NarrowOptimizer):
        trainer.optimizer.settle([not math.isfinite(norm) for norm in norms])
    if found.lost:
        del found.steps[found.lost - found.begun :]


def _in_backward(trainer: Trainer, batches: list[Batch], targets: int) -> Tensor:
    """The readings of a step whose parameters step in its backward pass."""
    inside = trainer.stepping
    assert inside is not None

    def backward() -> Tensor:
        trainer.parallel.follows(True)
        return torch.stack([trainer.backward(trainer.objective, batch, targets) for batch in batches])

    losses = stepping.take(inside, backward, lambda _: trainer.repeat_draws())
    inside.end_step()
    norm = losses.new_zeros(()) if inside.norm is None else inside.norm.to(losses.dtype)
    return torch.cat((losses, norm[None]))


# Another order of summation


def _takes_halves(trainer: Trainer) -> bool:
    """Whether a step may have more micro-batches than the run's, and the halves of one draw no masks of dropout that are others'."""
    may_cut = trainer.parallel.pipeline is None and trainer.stepping is None and not trainer.config.compile
    return may_cut and not any(isinstance(each, _DropoutNd) and each.p > 0 for each in trainer.model.modules())


def _halves(batch: Batch) -> list[Batch]:
    """The rows in two parts; of one row a copy for each half of its targets, which learns from them alone."""
    labels = batch["labels"]
    if middle := len(labels) // 2:
        return [{name: each[part] for name, each in batch.items()} for part in (slice(middle), slice(middle, None))]
    is_first = torch.arange(labels.numel()).view(labels.shape) < labels.numel() // 2
    return [batch | {"labels": labels.where(mask, IGNORED)} for mask in (is_first, ~is_first)]


# What is put back


@dataclass
class _Before:
    """A run as it was."""

    fork: Fork
    step: int
    saved_step: int
    skipped_steps: int
    place: str
    position: dict[str, Any]
    agreements: list[tuple[dict[str, Any], int]]
    pending: Any
    decision: Any

    @classmethod
    def of(cls, trainer: Trainer, where: str | Path) -> _Before:
        return cls(
            Fork.take(trainer.model, trainer.optimizer, trainer.scaler, where),
            trainer.step, trainer.saved_step, trainer.skipped_steps, trainer.ranks.place, trainer.feed.state(),
            [(each.state_dict(), each.micro_batch) for each in trainer.parallel.agreements], trainer.pending, trainer.decision,
        )  # fmt: skip

    def put_back(self, trainer: Trainer) -> None:
        trainer.optimizer.zero_grad()
        self.fork.restore()
        trainer.step, trainer.saved_step, trainer.skipped_steps = self.step, self.saved_step, self.skipped_steps
        trainer.ranks.place = self.place
        trainer.feed.restore(self.position)
        for agreement, (counted, micro_batch) in zip(trainer.parallel.agreements, self.agreements, strict=True):
            agreement.load_state_dict(counted)
            agreement.micro_batch = micro_batch
        trainer.pending, trainer.decision = self.pending, self.decision
        if trainer.pending is not None:
            trainer.pending.forget_windows()
