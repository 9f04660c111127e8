"""Deferred loss readback: the host copies the losses of several queued GPU steps at once.

Calling .item() after every step would drain the launch queue. Losses and gradient norms stay on the
device instead, and the host reads up to MOST steps with one copy and one wait. Two device flags
decide about updates that the host has not seen:

    found_inf   float16 overflow: the optimizer skips this update, as with GradScaler
    halted      a fatal loss or norm: this update and all updates after it are skipped

Deferring never changes a result. The weights are still at the last good step when the host reads
a fatal step. `QueuedStep` keeps the micro-batches and a snapshot of low-precision state and
generators, so that Trainer can repeat the step and name the first non-finite module.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from narrowgauge.optim.base import LowPrecisionOptimizer
from narrowgauge.snapshot import Scope, Snapshot, Training

if TYPE_CHECKING:
    from narrowgauge.train.tasks.task import StepBatch

# Limits the micro-batches held in host memory, and the unsettled step counts of the optimizer
# (`optim.skipped_steps`)
MOST = 64


def waits(device: torch.device) -> bool:
    """True if reading a number from this device blocks the host."""
    return device.type == "cuda"


class SkipFlags:
    """Device-side flags that skip or halt optimizer updates; identical on all ranks.

    halted     0-d float32, 0 or 1: the run ends, and no further update is applied
    found_inf  0-d float32, 0 or 1: float16 overflow in the current step; it skips one update

    scales   the run scales its loss. A non-finite norm then skips one update. More than `most`
             skips in a row, or a non-finite loss, halt.
    skipped  consecutive updates skipped before this object was created
    """

    def __init__(
        self, device: torch.device, ranks: int, scales: bool, most: int, skipped: int
    ) -> None:
        self.ranks, self.scales, self.most = ranks, scales, most
        self.halted = torch.zeros((), device=device)
        self.found_inf = torch.zeros((), device=device)
        self._skipped = torch.full((), skipped, dtype=torch.int64, device=device)

    @torch.no_grad()
    def see(self, readings: Tensor) -> None:
        """Updates the flags from the results of a step.

        readings  [micro-batches + 1]: the losses, then the gradient norm
        """
        finite = readings.isfinite()
        bad = torch.stack((~finite[:-1].all(), ~finite[-1])).to(torch.float32)
        if self.ranks > 1:
            # A NaN on one rank must skip the update on all of them, or replicas diverge.
            dist.all_reduce(bad, dist.ReduceOp.MAX)
        loss, norm = bad.unbind()
        if self.scales:
            self.found_inf = norm
            self._skipped = torch.where(bad.any(), self._skipped + 1, 0)
            ends = loss.bool() | (self._skipped > self.most)
        else:
            ends = bad.any()
        self.halted = torch.maximum(self.halted, ends.to(torch.float32))

    def tell(self, optimizer: torch.optim.Optimizer) -> None:
        """Hands the flags to the optimizer, whose next step reads them on the device.

        Optimizers of torch must be fused.
        """
        asked: Any = optimizer
        # torch's fused optimizers know only found_inf, so `halted` is merged into it.
        if isinstance(optimizer, LowPrecisionOptimizer):
            asked.halted, asked.found_inf = self.halted, self.found_inf if self.scales else None
        else:
            asked.found_inf = torch.maximum(self.halted, self.found_inf)


@dataclass
class QueuedStep:
    """A step that was queued on the device and not read yet.

    readings       1-d tensor on the device: losses of the micro-batches, then the gradient norm
    numbers        further fields of its step event
    drawn          its batches, on the host
    before         snapshot from before the step, for repeating it (scope REPLAY)
    """

    number: int
    readings: Tensor
    numbers: dict[str, Any]
    drawn: StepBatch
    before: Snapshot


@dataclass
class StepQueue:
    """Queue of unread steps.

    Each step has a snapshot from before its forward pass. All snapshots copy the same tensors. The
    first snapshot searches the model for these tensors, and so does the first after `forget`.
    """

    steps: list[QueuedStep] = field(default_factory=list)
    started_at_s: float = 0.0
    _newest: Snapshot | None = None

    def begin(self) -> None:
        if not self.steps:
            self.started_at_s = time.monotonic()

    def forget(self) -> None:
        """Drops the list of low-precision tensors: layers have other recipes now."""
        self._newest = None

    def snapshot(self, training: Training) -> Snapshot:
        """Copies on the device what a repetition of the next step needs."""
        newest = self._newest
        self._newest = Snapshot.take(training, Scope.REPLAY) if newest is None else newest.retake()
        return self._newest

    def read(self) -> list[list[float]]:
        """Waits for the device.

        Returns the results of each queued step: losses, then gradient norm.
        """
        numbers = iter(fetched(torch.cat([each.readings for each in self.steps])))
        return [list(islice(numbers, len(each.readings))) for each in self.steps]


def fetched(readings: Tensor) -> list[float]:
    """Copies numbers from the device with one transfer to pinned memory and one wait."""
    if not readings.is_cuda:
        return list(readings.tolist())
    # Copy to pinned memory: a copy to pageable memory makes the driver wait as well.
    here = torch.empty(readings.shape, dtype=readings.dtype, pin_memory=True)
    here.copy_(readings, non_blocking=True)
    torch.cuda.current_stream(readings.device).synchronize()
    return list(here.tolist())
