"""Tensor and sequence parallelism of a converted model, with torch's own styles, against one process (bounded, with a control)."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import narrowgauge as ng
from narrowgauge import recipes
from tests.distributed.llama import Llama, loss_of, parallelize

PATTERN = "layers.*"
STEPS = 3


def _full(x: Tensor) -> Tensor:
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()


def _agree_on_windows(model: nn.Module) -> None:
    windows = [each for layer in model.modules() for each in (getattr(layer, "scaling", None) or {}).values()]
    for window in windows:
        dist.all_reduce(window.live, dist.ReduceOp.MAX)


def _train(model: nn.Module, agrees: bool = False) -> dict[str, object]:
    """The losses of a few steps, and the gradient of each parameter in the first."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    losses, gradients = [], {}
    for step in range(STEPS):
        torch.manual_seed(step)
        loss = loss_of(model, step)
        loss.backward()
        losses.append(float(loss))
        if not gradients:
            gradients = {name: _full(each.grad) for name, each in model.named_parameters() if each.grad is not None}
        if agrees:
            _agree_on_windows(model)
        optimizer.step()
        optimizer.zero_grad()
        ng.advance(model)
    return {"losses": losses, "gradients": gradients}


def _alone(recipe: str, noise: float = 0.0, seed: int = 0) -> dict[str, object]:
    model = Llama()
    if noise:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for each in model.parameters():
                each.mul_(1 + noise * torch.randn(each.shape, generator=generator))
    return _train(ng.convert(model, {PATTERN: recipe}))


def _parallel(recipe: str, sequence: bool, before: bool, shards: int) -> dict[str, object]:
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (shards, world // shards), mesh_dim_names=("dp", "tp"))
    model = Llama()
    if before:
        ng.convert(model, {PATTERN: recipe})
    parallelize(model, mesh["tp"], sequence)
    if not before:
        ng.convert(model, {PATTERN: recipe})
    if shards > 1:
        for layer in model.layers:
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    return _train(model, agrees=True)
