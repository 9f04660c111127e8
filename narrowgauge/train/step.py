"""Parts of an optimizer step: memory options, objective, clipping and update.

A run (`trainer`) and its memory plan (`planning`) share these functions, so the plan traces the
same code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from narrowgauge.optim.base import LowPrecisionOptimizer
from narrowgauge.optim.clipping import clip_gradients
from narrowgauge.train.attention import use_attention_of_whole_rows
from narrowgauge.train.loss import Batch, Objective, inputs_of
from narrowgauge.train.optimizer import apply_memory_options

if TYPE_CHECKING:
    from narrowgauge.optim import Precision
    from narrowgauge.optim.held_gradients import HeldGradients
    from narrowgauge.train.config.settings import TrainConfig
    from narrowgauge.train.deferred import SkipFlags
    from narrowgauge.train.tasks import TrainTask

# call(compute, *args) returns compute(*args), run inside a forward pass of the (wrapped) model
Call = Callable[..., Any]


def ready(
    config: TrainConfig, task: TrainTask, model: Any, precision: Precision, device: torch.device, probe: Callable[[], Batch], on_gpu: bool
) -> tuple[list[str], Objective]:  # fmt: skip
    """Applies the memory options to the model in place.

    Returns (one sentence per option, the objective).

    probe   returns a micro-batch of the first step, which has the largest shape
    on_gpu  replace the attention implementation where its masks allow (`attention`)

    Call it before the optimizer is built: freezing decides which parameters the optimizer gets.
    """
    if on_gpu:
        use_attention_of_whole_rows(model, probe())
    notes = apply_memory_options(
        config, model, precision, lambda: inputs_of(probe(), device, task.options)
    )
    return notes, task.objective(model, precision.computes_in)


def loss_of(
    call: Call, objective: Objective, batch: Batch, device: torch.device, precision: Precision, targets: int | Tensor, checked: bool
) -> Tensor:  # fmt: skip
    """Loss of one micro-batch, divided by the number of targets of the whole step.

    call     runs the objective inside the model's forward pass
    checked  the labels were validated on the host already
    """
    with precision.context(device.type):
        loss: Tensor = call(objective, batch, device, checked=checked) / targets
    return loss


def clipped(
    config: TrainConfig, model: nn.Module, stages: Any = None, held: HeldGradients | None = None
) -> Tensor:
    """Clips the gradients of a step in place. Returns their norm before clipping.

    stages  process group of the pipeline stages, which share one norm
    held    FP8 gradient storage; its gradients are only measured here, and the optimizer step clips
            them
    """
    if held is not None:
        return held.measure()
    # Wide: float64 sums of squares give one process the same norm as its shards on several ranks.
    return clip_gradients(model.parameters(), config.clip or None, wide=True, stages=stages)


def update(
    optimizer: torch.optim.Optimizer,
    scaler: torch.amp.GradScaler | None,
    advance: Callable[[], None],
    flags: SkipFlags | None = None,
) -> None:
    """Runs the optimizer step, updates the loss scale and calls `advance`.

    advance   `narrowgauge.advance` of the model
    flags  device-side flags that skip the update without a host sync; None: the host has checked
              the numbers, or GradScaler checks them
    """
    if flags is not None:
        # Not scaler.step(): it reads found_inf with .item(), which waits for the device.
        flags.tell(optimizer)
        optimizer.step()
        if scaler:
            scaler.update()
    elif scaler:
        scaler.step(optimizer)
        # A step that the scaler skipped is no call of the optimizer, but its learning rate counts, as
        # it does where the device skips the step.
        if isinstance(optimizer, LowPrecisionOptimizer):
            optimizer.record_learning_rates()
        scaler.update()
    else:
        optimizer.step()
    advance()
    optimizer.zero_grad()
