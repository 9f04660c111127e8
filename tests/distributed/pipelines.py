"""A model in stages on torch's own schedules, and the same on one process."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

import narrowgauge as ng
from narrowgauge.train.parallel.pipeline import SCHEDULES
from tests.distributed.models import TOKENS, WIDTH, build, micro_batch, state


def loss_of(count: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Of one of `count` micro-batches: divided by the targets of all of them."""
    return lambda y, target: (y - target).square().sum() / (count * target.numel())


def places(schedule: str, rank: int, ranks: int) -> list[int]:
    """The stages of a rank."""
    _, per_rank, is_v = SCHEDULES[schedule]
    if is_v:
        return [rank, 2 * ranks - 1 - rank]
    return [rank + ranks * turn for turn in range(per_rank)]


def piece(model: nn.Sequential, number: int, count: int) -> nn.Sequential:
    """Stage `number` of `count`; its layers keep the names that they have in the whole model."""
    blocks = list(model.named_children())
    per_stage = len(blocks) // count
    return nn.Sequential(OrderedDict(blocks[number * per_stage : (number + 1) * per_stage]))


def stages_of(
    schedule: str,
    make: Callable[[], nn.Sequential],
    group: dist.ProcessGroup | None = None,
    wrap: Any = None,
    message: Callable[[Tensor], Tensor] | None = None,
) -> list[PipelineStage]:
    """Those of this rank, not distributed yet. message: of a tensor that travels, where torch is told the shapes of all."""
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    count = ranks * SCHEDULES[schedule][1]
    found = []
    for number in places(schedule, rank, ranks):
        module: nn.Module = piece(make(), number, count)
        told: dict[str, Tensor] = {}
        if message is not None:
            x = torch.empty(TOKENS, WIDTH, device="meta")
            sent = message(x.requires_grad_())
            told = {
                "input_args": sent if number else x,
                "output_args": sent if number < count - 1 else x,
            }
        module = module if wrap is None else wrap(module)
        found.append(PipelineStage(module, number, count, torch.device("cpu"), group=group, **told))
    return found


def run_pipeline(
    stages: list[PipelineStage],
    schedule: str,
    steps: int,
    numbers: Iterable[int],
    count: int,
    **options: Any,
) -> tuple[list[float], dict[str, Tensor], list[dict[str, Tensor]]]:
    """(losses, of the rank with the last stage; all tensors of this rank; its gradients at each step)."""
    kind, per_rank, _ = SCHEDULES[schedule]
    numbers = list(numbers)
    loss = loss_of(count)
    engine = kind(
        stages if per_rank > 1 else stages[0], len(numbers), loss_fn=loss, scale_grads=False
    )
    modules = [each.submod for each in stages]
    optimizer = torch.optim.SGD(
        [p for each in modules for p in each.parameters() if p.requires_grad], lr=0.05, momentum=0.9
    )
    has_first = any(each.is_first for each in stages)
    has_last = any(each.is_last for each in stages)
    losses: list[float] = []
    gradients = []
    for step in range(steps):
        x, y = (
            torch.cat(parts)
            for parts in zip(
                *(micro_batch(step, number, **options) for number in numbers), strict=True
            )
        )
        own: list[Tensor] = []
        engine.step(
            *([x] if has_first else []),
            target=y if has_last else None,
            losses=own if has_last else None,
        )
        losses += [each.item() for each in own]
        gradients.append(
            {
                name: p.grad.clone()
                for each in modules
                for name, p in each.named_parameters()
                if p.grad is not None
            }
        )
        optimizer.step()
        for each in modules:
            ng.advance(each)
        optimizer.zero_grad()
    return (
        losses,
        {name: tensor for each in modules for name, tensor in state(each).items()},
        gradients,
    )


def run_alone(
    model: nn.Module, steps: int, count: int, **options: Any
) -> tuple[list[float], dict[str, Tensor], list[dict[str, Tensor]]]:
    """The same in one process."""
    optimizer = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=0.05, momentum=0.9
    )
    loss, losses, gradients = loss_of(count), [], []
    for step in range(steps):
        for number in range(count):
            x, y = micro_batch(step, number, **options)
            each = loss(model(x), y)
            each.backward()
            losses.append(each.item())
        gradients.append(
            {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        )
        optimizer.step()
        ng.advance(model)
        optimizer.zero_grad()
    return losses, state(model), gradients


__all__ = [
    "SCHEDULES",
    "build",
    "loss_of",
    "piece",
    "places",
    "run_alone",
    "run_pipeline",
    "stages_of",
]
