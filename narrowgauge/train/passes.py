"""Forward and backward passes of a run's optimizer steps, clipping and update.

    gradient     sum over micro-batches of d(loss)/d(weights), clipped; on the device
    update       optimizer.step(), loss scale, advance(model)

Steps in backward update each parameter inside the last backward pass. Captured steps replay CUDA
graphs. All other code of the loop reads the results as one tensor, [micro-batches + 1]: the losses,
then the gradient norm before clipping.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from narrowgauge.cuda_graphs import GraphedStep, refuse_run
from narrowgauge.optim.base import LowPrecisionOptimizer
from narrowgauge.optim.held_gradients import HeldGradients
from narrowgauge.optim.step_in_backward import InBackward
from narrowgauge.train import launches, step, stepping
from narrowgauge.train.optimizer import cast_in_step
from narrowgauge.train.parallel import digest
from narrowgauge.train.parallel.step import agreed, targets_of_ranks, where_nonfinite
from narrowgauge.train.schedule import learning_rate

if TYPE_CHECKING:
    from narrowgauge.errors import NumericsError
    from narrowgauge.optim import Precision
    from narrowgauge.train.config.settings import TrainConfig
    from narrowgauge.train.deferred import SkipFlags
    from narrowgauge.train.loss import Batch, Objective
    from narrowgauge.train.parallel.ranks import Ranks
    from narrowgauge.train.parallel.spread import Parallel
    from narrowgauge.train.signals import AgreedStop, StopRequest
    from narrowgauge.train.tasks.task import StepBatch


class Passes:
    """Computes steps of one run.

    objective       the loss; with pipeline stages of this rank's stages
    scaler          GradScaler of a float16 run, or None
    in_backward     hooks that update parameters inside backward, or None
    held            FP8 gradient storage, or None
    graphs          captured steps, or None
    no_cast_reason  reason why the optimizer step leaves casting weights to the forward pass; '' if
                    it casts
    """

    def __init__(
        self, config: TrainConfig, ranks: Ranks, device: torch.device, precision: Precision, model: nn.Module,
        objective: Objective, parallel: Parallel, optimizer: Any,
    ) -> None:  # fmt: skip
        self.config, self.ranks, self.device, self.precision = config, ranks, device, precision
        self.model, self.objective, self.parallel, self.optimizer = (
            model,
            objective,
            parallel,
            optimizer,
        )
        begun = stepping.begin(config, optimizer, config.micro_batches // ranks.layout.data)
        self.in_backward = begun if isinstance(begun, InBackward) else None
        self.held = begun if isinstance(begun, HeldGradients) else None
        self.notes = stepping.summary(config, begun)
        self.scaler = torch.amp.GradScaler(device.type) if precision.scales_loss else None
        self.graphs: GraphedStep | None = None
        self.no_cast_reason = ""

    def prepare(self) -> None:
        """Registers CUDA graphs and casts in the optimizer step, after a checkpoint was loaded."""
        backward = partial(self.backward, self.objective, checked=True)
        self.graphs = launches.graphed_step(
            self.config, self.model, self.optimizer, self.scaler, self.device, backward
        )
        self.no_cast_reason = cast_in_step(self.config, self.optimizer, self.model)

    @property
    def reads_every_step(self) -> bool:
        """True if the host reads each step before it computes the next one."""
        return self.graphs is not None or self.in_backward is not None

    def monitor(self) -> launches.LaunchMonitor:
        """Reports on captured graphs, recompilations and idle time."""
        refused = (
            "; ".join(refuse_run(self.model, self.optimizer, self.scaler))
            if self.graphs is None
            else ""
        )
        return launches.LaunchMonitor(self.config, self.device, self.graphs, refused)

    def recipes_changed(self) -> None:
        """Captures graphs anew: a captured graph replays the kernels of the old recipe."""
        if self.graphs is not None:
            self.graphs.renew()

    # --- before a step

    def targets(
        self, drawn: StepBatch, number: int, stop: StopRequest | AgreedStop
    ) -> tuple[int, dict[str, Any]]:
        """Returns (targets of the step on all ranks, fields of its event). Ranks exchange stop requests."""
        return targets_of_ranks(drawn, number, stop, self.ranks)

    def set_learning_rate(self, number: int) -> float:
        """Sets and returns the learning rate of a step."""
        lr = learning_rate(self.config, number)
        launches.set_learning_rate(self.optimizer, lr)
        return lr

    # --- gradient and update

    def gradient(self, micro_batches: list[Batch], targets: int) -> Tensor:
        """Computes and clips the gradient of a step. Returns losses and norm, on the device."""
        if self.graphs is not None:
            for batch in micro_batches:
                launches.accumulate(self.graphs, batch, targets, self.objective.head)
            return self.graphs.readings()
        losses: Any = []
        if self.parallel.pipeline is not None:
            losses = self.parallel.pipeline.step(micro_batches, targets)
            micro_batches = []
        for turn, batch in enumerate(micro_batches, 1):
            self.parallel.follows(turn == len(micro_batches))
            losses.append(self.backward(self.objective, batch, targets))
        if self.scaler:
            self.scaler.unscale_(self.optimizer)
        norm = step.clipped(self.config, self.model, self.parallel.stages_group, self.held)
        return torch.stack((*losses, norm.to(losses[0].dtype)))

    def step_in_backward(
        self,
        micro_batches: list[Batch],
        targets: int,
        check: Callable[[float, float], None] | None = None,
    ) -> Tensor:
        """Runs a step whose parameters are updated inside its last backward pass.

        check  gets loss and norm of the measuring pass, before any parameter changes

        Returns losses and norm, on the device.
        """
        inside = self.in_backward
        assert inside is not None

        def backward() -> Tensor:
            # Reduce gradients in each micro-batch: the FP8 sum must hold this rank's shard
            self.parallel.follows(True)
            return torch.stack(
                [self.backward(self.objective, batch, targets) for batch in micro_batches]
            )

        def between(losses: Tensor) -> None:
            if check is not None:
                assert inside is not None and inside.norm is not None
                check(*self.agreed(torch.cat((losses, inside.norm.to(losses.dtype)[None]))))
            self.repeat_draws()

        losses = stepping.take(inside, backward, between)
        inside.end_step()
        norm = losses.new_zeros(()) if inside.norm is None else inside.norm.to(losses.dtype)
        return torch.cat((losses, norm[None]))

    def update(self, flags: SkipFlags | None = None) -> None:
        """Updates weights, loss scale and low-precision state. flags: device-side, of an unread step."""
        if self.graphs is not None:
            self.graphs.update()
        else:
            step.update(
                self.optimizer, self.scaler, partial(self.parallel.advance, self.model), flags
            )

    def backward(
        self, objective: Objective, batch: Batch, targets: int | Tensor, *, checked: bool = False
    ) -> Tensor:
        """Accumulates the gradient of one micro-batch. Returns its detached loss.

        checked  the labels were validated on the host already
        """
        loss = step.loss_of(
            self.parallel, objective, batch, self.device, self.precision, targets, checked
        )
        (self.scaler.scale(loss) if self.scaler else loss).backward()
        return loss.detach()

    def repeat_draws(self) -> None:
        """Makes the next pass of this step repeat the random draws that all ranks share."""
        for agreement in self.parallel.agreements:
            agreement.micro_batch = 0

    # --- after a step

    def agreed(self, readings: Tensor | list[float]) -> tuple[float, float]:
        """Returns (loss, norm) of a step over all ranks.

        readings  losses and norm. Copying a tensor to the host is the only synchronisation of the
                  step.
        """
        losses, norm = (
            read(readings) if isinstance(readings, Tensor) else (readings[:-1], readings[-1])
        )
        return agreed(losses, norm, self.ranks)

    def settle(self, norms: Iterable[float]) -> None:
        """Corrects the optimizer's step counts for updates that the device skipped."""
        if isinstance(self.optimizer, LowPrecisionOptimizer):
            self.optimizer.settle([not math.isfinite(norm) for norm in norms])

    def take_norm_of(self, parent: Passes) -> None:
        """Copies the gradient norm of a branch's parent, by which `optimizer.clip_by = "previous"` clips."""
        if isinstance(parent.optimizer, LowPrecisionOptimizer) and isinstance(
            self.optimizer, LowPrecisionOptimizer
        ):
            self.optimizer.norm_before = parent.optimizer.norm_before

    def refuse_drift(self, place: str) -> None:
        """Raises DriftError if replicated tensors differ between ranks."""
        if self.ranks.layout.data * self.ranks.layout.tp > 1:
            held = digest.replicated(self.model, self.optimizer)
            digest.refuse_drift(held, place, self.device, self.parallel.mesh)

    def lost_in_backward(self, number: int, loss: float, norm: float) -> NumericsError | None:
        """The error of a step in backward that was not finite, or None."""
        return stepping.lost(number, loss, norm)

    def first_nonfinite(
        self, micro_batches: list[Batch], targets: int, loss: float, options: Any
    ) -> str:
        """Names the first non-finite module, by repeating the step from the current weights under hooks."""
        self.optimizer.zero_grad()
        # The whole, uncompiled model: compiled code and the chunked head run no hooks
        whole = replace(self.objective, forward=self.model, options=options, head=None)
        pipeline = self.parallel.pipeline
        self.parallel.follows(False)

        def repeat() -> None:
            self.repeat_draws()
            if pipeline is not None:
                pipeline.step(micro_batches, targets)
            for batch in micro_batches if pipeline is None else ():
                self.backward(whole, batch, targets)

        stages = (
            (None, None)
            if pipeline is None
            else (partial(pipeline.forward, micro_batches), pipeline.order)
        )
        again = repeat if self.in_backward is None else partial(self.in_backward.measure, repeat)
        where = where_nonfinite(self.model, again, loss, self.ranks, *stages)
        self.optimizer.zero_grad()
        return where


def read(readings: Tensor) -> tuple[list[float], float]:
    """Copies micro-batch losses and gradient norm to the host."""
    *losses, norm = readings.tolist()
    return losses, norm
