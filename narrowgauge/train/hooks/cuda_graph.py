"""The steps of a run as CUDA graphs, if it asks for them: refused before training where they cannot be."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from narrowgauge.cuda_graphs import CudaRecorder, GraphedStep, make_capturable, refuse
from narrowgauge.errors import ConfigError
from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.loss import Batch, check_labels

TARGETS = "targets of the step"  # among the inputs of a micro-batch


def graphed_step(
    config: TrainConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: object | None,
    device: torch.device,
    backward: Callable[[Batch, Tensor], Tensor],
    recorder: CudaRecorder | None = None,
) -> GraphedStep | None:
    """The GraphedStep of a run with cuda_graph = true; else None, and the optimizer's capturable is switched off.

    backward  of a micro-batch on the device and the number of targets in its step, a scalar
    Raises ConfigError with every reason.
    """
    if not config.cuda_graph:
        for group in optimizer.param_groups:  # a checkpoint of a run with graphs sets it
            if group.get("capturable"):
                group["capturable"], group["lr"] = False, float(group["lr"])
        return None
    if device.type == "cuda":
        make_capturable(optimizer, device)
    reasons = [] if recorder is not None else refuse(model, optimizer, device, scaler)
    if reasons:
        raise ConfigError(f"cuda_graph = true: {'; '.join(reasons)}. Train without --cuda-graph, or change that.")

    def call(**inputs: Tensor) -> Tensor:
        targets = inputs.pop(TARGETS)
        return backward(inputs, targets)

    return GraphedStep(model, optimizer, call, clip=config.clip or None, recorder=recorder)


def accumulate(step: GraphedStep, batch: Batch, targets: int, head: nn.Linear | None) -> None:
    """One micro-batch. head: that of the chunked loss; its labels are checked here, on the host, without a synchronisation."""
    if head is not None:
        check_labels(batch["labels"], head.weight.shape[0])
    step.accumulate({**batch, TARGETS: torch.tensor(float(targets))})


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the learning rate of every group in place: a graph reads it from the device."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr
