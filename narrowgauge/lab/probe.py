"""Probe: N optimizer steps from the run's state on the coming batches, then an exact rollback.

    with rolled_back(trainer):                     saves the state, and restores it at the end, even
                                                   after an error
        wide = take_steps(trainer, 100)            N steps in BF16 (`suspended`)
    with rolled_back(trainer):
        again = take_steps(trainer, 100, other_order=True)
                                                   the same in another order of summation, as a
                                                   control
    change = lambda model: switched(model, "bf16", "layers.1.down_proj", ["grad_weight"])
    found = run_probe(trainer, 100, change)        save, N steps under another change of the model,
                                                   restore

Each step is a step of the run: same batch, learning rate, clipping and loss scale. Nothing is
logged. `Snapshot` copies and restores the state of the run. Unread steps of a GPU (`deferred`) must
be read before.

A probe ends early at a stop request, and at a non-finite loss or norm, as the run would
(`ProbeResult.lost`).

The control sums gradients over halves of the micro-batches. With compiled shapes, pipeline stages,
steps in backward or dropout, it moves weights by one unit in the last place instead (`nudge`).
Reversed rows were tried as a control and lost: sums over small batches were bit-identical, and
dropout masks fell on other rows, with losses up to 0.003 nats apart.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from narrowgauge.data import IGNORED
from narrowgauge.errors import ConfigError, OutOfMemoryError
from narrowgauge.lab.guard.check import nudge
from narrowgauge.nn.converted_model import suspended
from narrowgauge.snapshot import NAME
from narrowgauge.snapshot.block_storage import require_free_space
from narrowgauge.train.deferred import MOST, fetched

if TYPE_CHECKING:
    from narrowgauge.train.loss import Batch
    from narrowgauge.train.parallel.ranks import Ranks
    from narrowgauge.train.trainer import Trainer

# Context manager that changes the model during a probe, such as `suspended`
Change = Callable[[nn.Module], AbstractContextManager[Any]]


@dataclass
class ProbeResult:
    """Losses and other results of a probe.

    begun    step of the run before the probe
    steps    fields that each step's log event would have (`loss`, `grad_norm`, `lr`, `tokens`,
             ...), and `inputs`: tokens that the model read
    lost     first step with a non-finite loss or norm, after which the probe ended; 0: none
    ended    reason for which a stop request ended the probe, or ''
    spent_s  duration of the probe
    drawn    (number of the last step that was started, indices of the training examples in its
             batch)
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


def run_probe(
    trainer: Trainer,
    steps: int,
    change: Change = suspended,
    *,
    other_order: bool = False,
    where: str | Path = "host",
) -> ProbeResult:
    """Runs a probe of N optimizer steps under a change of the model.

    Afterwards the state is bit-identical to before.
    """
    with rolled_back(trainer, where):
        return take_steps(trainer, steps, change, other_order=other_order)


def place_of_copy(nbytes: int, folder: Path, ranks: Ranks) -> str | Path:
    """Chooses the place for a copy of the state: "host" or the folder of the run.

    Raises StorageError if neither has space.

    All ranks of a machine need their copies at the same time, so their sizes are added.
    """
    total = nbytes * (int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if ranks.world > 1 else 1)
    try:
        require_free_space(total, "host", NAME)
    except OutOfMemoryError:
        require_free_space(total, folder, NAME)
        return folder
    return "host"


def refuse(trainer: Trainer, steps: int) -> None:
    """Raises ConfigError if the run cannot take a probe of so many steps."""
    config = trainer.config
    if config.cuda_graph:
        raise ConfigError(
            "a stretch of steps that do not count: device.cuda_graph = true replays the products of the recipe, and graphs of "
            "others would want memory of their own. Train without --device.cuda-graph.",
            code="probe.cuda-graph",
        )
    if trainer.step + steps > config.steps:
        raise ConfigError(
            f"a stretch of {steps} steps from step {trainer.step}: the run has {config.steps} steps. Take a shorter one.",
            code="probe.past-end",
        )
    if trainer.queue is not None and trainer.queue.steps:
        raise ConfigError(
            f"a stretch from step {trainer.step}: {len(trainer.queue.steps)} steps were launched and not read. Read them first.",
            code="probe.pending",
        )


@contextmanager
def rolled_back(trainer: Trainer, where: str | Path = "host") -> Iterator[None]:
    """Restores, when the block ends or raises, everything that optimizer steps change.

    where  place of the state's copy, as for `Snapshot`: "host" or a folder
    """
    before = trainer.snapshot(where)
    with trainer.reading_alone():
        try:
            yield
        finally:
            trainer.restore(before)


def take_steps(
    trainer: Trainer, steps: int, change: Change = suspended, *, other_order: bool = False
) -> ProbeResult:
    """Runs the steps of a probe without restoring the state. Call it inside `rolled_back`."""
    refuse(trainer, steps)
    began_at_s = time.monotonic()
    found, readings = ProbeResult(trainer.step), list[Tensor]()
    in_halves = other_order and _takes_halves(trainer)
    if other_order and not in_halves:
        nudge(trainer.model)
    with change(trainer.model):
        for number in range(trainer.step + 1, trainer.step + steps + 1):
            if trainer.stop.requested:
                found.ended = f"a request to stop ({trainer.stop.requested})"
                break
            readings.append(_step(trainer, number, in_halves, found))
            # Without device flags, each step must be read before the next one: it may be the last.
            if len(readings) == MOST or trainer.flags is None or number == found.begun + steps:
                _read(trainer, readings, found)
            if found.lost:
                break
        _read(trainer, readings, found)
    trainer.optimizer.zero_grad()
    found.spent_s = time.monotonic() - began_at_s
    return found


def _step(trainer: Trainer, number: int, in_halves: bool, found: ProbeResult) -> Tensor:
    """Runs one step of a probe and returns its losses and norm.

    Appends the other fields of its log event to `found.steps`.
    """
    passes = trainer.passes
    trainer.locate(f"step {number} of a stretch that does not count")
    drawn = trainer.feed.draw(trainer.step)
    found.drawn = number, drawn.examples
    targets, facts = passes.targets(drawn, number, trainer.stop)
    batches = (
        [half for batch in drawn.batches for half in _halves(batch)] if in_halves else drawn.batches
    )
    lr = passes.set_learning_rate(number)
    take = passes.gradient if passes.in_backward is None else passes.step_in_backward
    readings = take(batches, targets)
    found.steps.append({"lr": lr, "tokens": targets, **facts, "inputs": drawn.inputs})
    # As in Trainer: the device decides, or the host does before the update.
    if trainer.flags is not None:
        trainer.flags.see(readings)
    elif not bool(readings.isfinite().all()) and passes.scaler is None:
        return readings  # the update is skipped here, and `_read` ends the probe at this step
    passes.update(trainer.flags)
    trainer.count_step(number)
    return readings


def _read(trainer: Trainer, readings: list[Tensor], found: ProbeResult) -> None:
    """Reads losses and norms of the steps since the last call.

    Records the first step that would have ended the run.
    """
    if not readings:
        return
    numbers, sizes = fetched(torch.cat(readings)), [len(each) for each in readings]
    first = len(found.steps) - len(readings)
    readings.clear()
    norms = []
    for place, size in enumerate(sizes, first):
        trainer.locate(f"step {found.begun + place + 1} of a stretch that does not count")
        loss, norm = trainer.passes.agreed([numbers.pop(0) for _ in range(size)])
        norms.append(norm)
        found.steps[place] = {"loss": loss, "grad_norm": norm, **found.steps[place]}
        if not found.lost and not trainer.is_fine(loss, norm):
            found.lost = found.begun + place + 1
    if trainer.flags is not None:
        # The device may have skipped updates that the optimizer counted: correct its step counts.
        trainer.passes.settle(norms)
    if found.lost:
        del found.steps[found.lost - found.begun :]


# Another order of summation


def _takes_halves(trainer: Trainer) -> bool:
    """True if gradients may be summed over halves of micro-batches.

    Not with pipeline stages, steps in backward, torch.compile or dropout.

    Under torch.compile, halves would make Dynamo mark shapes as dynamic, which changes the rounding
    of a later evaluation. With dropout, halves would draw other masks.
    """
    may_cut = (
        trainer.parallel.pipeline is None
        and trainer.passes.in_backward is None
        and not trainer.config.compile
    )
    return may_cut and not any(
        isinstance(each, _DropoutNd) and each.p > 0 for each in trainer.model.modules()
    )


def _halves(batch: Batch) -> list[Batch]:
    """Splits a micro-batch by rows.

    A single row yields two copies, each with half of the targets masked out.
    """
    labels = batch["labels"]
    # The halves keep the step's count of targets, so their summed gradient is the batch's in
    # another order.
    if middle := len(labels) // 2:
        return [
            {name: each[part] for name, each in batch.items()}
            for part in (slice(middle), slice(middle, None))
        ]
    is_first = torch.arange(labels.numel()).view(labels.shape) < labels.numel() // 2
    return [batch | {"labels": labels.where(mask, IGNORED)} for mask in (is_first, ~is_first)]
