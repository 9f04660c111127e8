"""What a step is made of, for a run (`trainer`) and for the plan of one (`planning`): objective, gradient, update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.optim import Precision
from narrowgauge.optim.clipping import clip_gradients
from narrowgauge.optim.held_gradients import HeldGradients
from narrowgauge.train.attention import use_attention_of_whole_rows
from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.loss import Batch, Objective, inputs_of
from narrowgauge.train.optimizer import apply_memory_options
from narrowgauge.train.pending import Decision
from narrowgauge.train.tasks import TrainTask

Call = Callable[..., Any]  # call(compute, *given) is compute(*given), inside a forward pass of the model


def ready(
    config: TrainConfig, task: TrainTask, model: Any, precision: Precision, device: torch.device, probe: Callable[[], Batch], on_gpu: bool
) -> tuple[list[str], Objective]:  # fmt: skip
    """What saves memory, in place, with a sentence on each, and the loss. Call it before the optimizer is built: it holds what trains.

    probe  a micro-batch of the first step, which has the largest shape
    """
    if on_gpu:
        use_attention_of_whole_rows(model, probe())
    notes = apply_memory_options(config, model, precision, lambda: inputs_of(probe(), device, task.options))
    return notes, task.objective(model, precision.computes_in)


def loss_of(
    call: Call, objective: Objective, batch: Batch, device: torch.device, precision: Precision, targets: int | Tensor, checked: bool
) -> Tensor:  # fmt: skip
    """The part of a micro-batch in the loss of a step with so many targets. checked: its labels were looked at."""
    with precision.context(device.type):
        loss: Tensor = call(objective, batch, device, checked=checked) / targets
    return loss


def clipped(config: TrainConfig, model: nn.Module, stages: Any = None, held: HeldGradients | None = None) -> Tensor:
    """Clips the gradients of a step; their norm before. held: where they wait in FP8, and the step clips them."""
    if held is not None:
        return held.measure()
    return clip_gradients(model.parameters(), config.clip or None, wide=True, stages=stages)


def update(
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    advance: Callable[[], None],
    decision: Decision | None = None,
) -> None:
    """The optimizer's step, and what follows it. advance: `narrowgauge.advance` of the model.

    decision: the device leaves it out, if it is to be left out, and nothing waits; None: the host has looked, or a GradScaler looks
    """
    if decision is not None:
        decision.tell(optimizer)
        optimizer.step()
        if scaler:
            scaler.update()
    elif scaler:
        scaler.step(optimizer)
        scaler.update()
    else:
        optimizer.step()
    advance()
    optimizer.zero_grad()
