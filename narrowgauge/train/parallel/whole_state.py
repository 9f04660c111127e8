"""The state of a sharded run as one process would have it: gathered for a checkpoint, and cut again when one is read.

The seam for checkpoints that each rank writes its part of: they replace `collect`, `newest_valid` and `placed`, and nothing else
knows of shards. Every rank calls; rank 0 alone keeps the whole, on the CPU, and holds one tensor more on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from narrowgauge.errors import CheckpointError
from narrowgauge.optim import shards
from narrowgauge.optim.base import NarrowOptimizer
from narrowgauge.train.checkpoint import state, store
from narrowgauge.train.checkpoint.store import Tensors
from narrowgauge.train.parallel.ranks import Ranks


def collect(model: nn.Module, optimizer: Any, scaler: Any, ranks: Ranks) -> tuple[Tensors, dict[str, Any]]:
    """`state.collect`, with whole tensors."""
    tensors, rest = state.collect(model, optimizer, scaler)
    return {group: gathered(members, ranks, model) for group, members in tensors.items()}, rest


def gathered(tensors: Mapping[str, Tensor], ranks: Ranks, model: nn.Module) -> dict[str, Tensor]:
    """Ordinary tensors by name, whole; on other ranks than 0 nothing. model: whose tied weights, of its state dict, are one tensor."""
    same = {name: id(each) for name, each in model.state_dict(keep_vars=True).items()}
    found: dict[str, Tensor] = {}
    known: dict[int, Tensor] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            key = same.get(name, id(tensor))
            tensor = known.get(key)  # type: ignore[assignment]
            if tensor is None:
                whole = shards.gathered(tensors[name].detach())
                tensor = known[key] = whole.cpu() if ranks.is_first else whole.new_empty(0)
        if ranks.is_first:
            found[name] = tensor
    return found


def newest_valid(folder: Path, ranks: Ranks) -> tuple[store.Checkpoint | None, list[tuple[Path, str]]]:
    """`store.newest_valid` by rank 0; the others read the same checkpoint."""
    own = ranks.first(lambda: store.newest_valid(folder))
    path = ranks.told_by_first(lambda: str(own[0].path) if own and own[0] else "")
    return own or (store.load(Path(path)) if path else None, [])


def placed(saved: Tensors, model: nn.Module, optimizer: Any) -> Tensors:
    """What `gathered` gave and a checkpoint kept, as the DTensors that model and optimizer take up."""
    if not any(isinstance(each, DTensor) for each in model.parameters()):
        return saved
    own = model.state_dict()
    weights = {name: _cut(each, own.get(name)) for name, each in saved.get("weights", {}).items()}
    moments = saved["optimizer"]
    if not isinstance(optimizer, NarrowOptimizer):  # which cuts by itself
        parameters = [each for group in optimizer.param_groups for each in group["params"]]
        moments = {name: _cut(each, _parameter_of(name, parameters)) for name, each in moments.items()}
    return {**saved, "weights": weights, "optimizer": moments}


def _parameter_of(name: str, parameters: list[Tensor]) -> Tensor | None:
    """Of a state of torch's optimizers: state.NUMBER.exp_avg."""
    number = name.split(".")[1]
    return parameters[int(number)] if number.isdecimal() and int(number) < len(parameters) else None


def _cut(x: Tensor, like: Tensor | None) -> Tensor:
    """What this rank holds of `like`, of x, if that is sharded and of the same shape: else something is told later."""
    if not isinstance(like, DTensor) or x.shape != like.shape:
        return x
    part = shards.local_part(x, like).to(like.device_mesh.device_type)
    return shards.wrapped(part.contiguous(), like, x.shape)


class Best(store.Best):
    """The best weights of a run: all ranks decide alike, and rank 0 alone writes and reads them."""

    def __init__(self, folder: Path, metric: str, ranks: Ranks, model: nn.Module) -> None:
        super().__init__(folder, metric)
        self.ranks, self.model = ranks, model

    def save(self, step: int, weights: dict[str, Tensor], facts: dict[str, Any]) -> None:
        whole = gathered(weights, self.ranks, self.model)
        self.ranks.first(lambda: super(Best, self).save(step, whole, facts))

    def verify(self, path: Path) -> None:
        if problem := self.ranks.told_by_first(lambda: self._problem(path)):
            raise CheckpointError(problem)

    def _problem(self, path: Path) -> str:
        try:
            super().verify(path)
        except CheckpointError as error:
            return str(error)
        return ""

    def clear(self) -> None:
        self.ranks.first(super().clear)
