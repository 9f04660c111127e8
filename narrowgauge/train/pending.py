"""Steps that the host has launched and not read: on a GPU nobody waits for a loss but where it is printed.

    the device   of each step: found_inf (float16 overflowed) and halted (the run ends there) leave the update out
    the host     keeps what each step was made of, and reads the losses and norms of all of them at once: one copy, one wait

What the host makes of the numbers is what it would have made of each at once. A step that ends the run changed nothing, nor did one after
it, so when the host sees it the weights are those of the step before; what is kept here is enough to take it once more and say where.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from narrowgauge.nn.amax_history import AmaxHistory
from narrowgauge.optim.base import NarrowOptimizer
from narrowgauge.train.loss import Batch

MOST = 64  # steps: their micro-batches stay in the host's memory, and their counters uncertain (`optim.left_out`)


def waits(device: torch.device) -> bool:
    """Whether reading a number waits for the device."""
    return device.type == "cuda"


class Decision:
    """Whether the device leaves an update out. Float tensors 0 or 1, the same on all ranks.

    scales   the run scales its loss: a norm that is not finite leaves out one step, and `most` in a row, or a loss, end it
    skipped  steps in a row that were left out before
    """

    def __init__(self, device: torch.device, ranks: int, scales: bool, most: int, skipped: int) -> None:
        self.ranks, self.scales, self.most = ranks, scales, most
        self.halted = torch.zeros((), device=device)
        self.found_inf = torch.zeros((), device=device)
        self._skipped = torch.full((), skipped, dtype=torch.int64, device=device)

    @torch.no_grad()
    def see(self, readings: Tensor) -> None:
        """readings: the losses of a step's micro-batches, and its norm."""
        finite = readings.isfinite()
        bad = torch.stack((~finite[:-1].all(), ~finite[-1])).to(torch.float32)
        if self.ranks > 1:
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
        """The next step of the optimizer looks at it, on the device. Torch's own have to be fused."""
        asked: Any = optimizer
        if isinstance(optimizer, NarrowOptimizer):
            asked.halted, asked.found_inf = self.halted, self.found_inf if self.scales else None
        else:
            asked.found_inf = torch.maximum(self.halted, self.found_inf)


@dataclass
class Step:
    """A step that was launched.

    readings     on the device: the losses of its micro-batches, and its norm
    numbers      what else the log says of it; inputs: tokens that the model read
    windows      the amax states before it, and `agreements` the steps that agreements of ranks had counted: to take it again
    """

    number: int
    readings: Tensor
    numbers: dict[str, Any]
    inputs: int
    micro_batches: list[Batch]
    windows: Tensor | None
    agreements: list[int]


@dataclass
class Pending:
    """Those that were not read, and the amax states of the model's windows."""

    steps: list[Step] = field(default_factory=list)
    started_at_s: float = 0.0
    _live: list[Tensor] | None = None

    def begin(self) -> None:
        if not self.steps:
            self.started_at_s = time.monotonic()

    def forget_windows(self) -> None:
        """Layers have got other recipes."""
        self._live = None

    def windows(self, model: nn.Module) -> Tensor | None:
        """Their states now, one small copy on the device."""
        if self._live is None:
            self._live = [each.live for each in model.modules() if isinstance(each, AmaxHistory)]
        return torch.cat(self._live) if self._live else None

    @torch.no_grad()
    def put_back(self, step: Step, agreements: Iterable[Any]) -> None:
        """Windows and agreements are as they were before a step."""
        if step.windows is not None and self._live is not None:
            torch._foreach_copy_(self._live, list(step.windows.split(self._live[0].numel())))
        for each, before in zip(agreements, step.agreements, strict=True):
            each.step, each.micro_batch = before, 0

    def read(self) -> list[list[float]]:
        """The readings of all of them: waits for the device."""
        numbers = iter(fetched(torch.cat([each.readings for each in self.steps])))
        return [list(islice(numbers, len(each.readings))) for each in self.steps]


def fetched(readings: Tensor) -> list[float]:
    """Numbers of the device, by one copy to pinned memory and one wait."""
    if not readings.is_cuda:
        return list(readings.tolist())
    here = torch.empty(readings.shape, dtype=readings.dtype, pin_memory=True)
    here.copy_(readings, non_blocking=True)
    torch.cuda.current_stream(readings.device).synchronize()
    return list(here.tolist())
