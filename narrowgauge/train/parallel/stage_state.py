"""The state of a run in stages under the names of one process: of each rank its part, of all together the whole.

Weights and what recipes remember have the names of the whole model anyway. An optimizer numbers its parameters, so a rank's state gets
the numbers that the whole model's optimizer would give: `state.17.exp_avg`, with the groups of the whole.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from narrowgauge.train.checkpoint import state
from narrowgauge.train.checkpoint.store import Tensors


class WholeNumbers:
    """Of the parameters of a model that is about to be cut, in an optimizer of all of them, which has no state yet."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        names = {parameter: name for name, parameter in model.named_parameters()}
        self.names = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
        self.numbers = {name: number for number, name in enumerate(self.names)}
        self.groups: list[dict[str, Any]] = optimizer.state_dict()["param_groups"]

    def own(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[int]:
        """Number of a parameter in this rank's optimizer -> its number in the whole."""
        names = {parameter: name for name, parameter in model.named_parameters()}
        return [self.numbers[names[parameter]] for group in optimizer.param_groups for parameter in group["params"]]

    def collect(self, model: nn.Module, optimizer: Any, scaler: Any) -> tuple[Tensors, dict[str, Any]]:
        """As `checkpoint.state.collect`: of tensors this rank's part, of the rest the whole, on all ranks, which call together."""
        tensors, rest = state.collect(model, optimizer, scaler)
        numbers = self.own(model, optimizer)
        tensors["optimizer"] = {_renumbered(name, numbers): each for name, each in tensors["optimizer"].items()}
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, list(tensors["optimizer"]))
        lr = optimizer.param_groups[0]["lr"]
        groups = [{**group, "lr": lr} for group in self.groups]
        names = sorted((name for each in told for name in each), key=lambda name: int(name.split(".")[1]))
        rest["optimizer"] = _tree(dict.fromkeys(names, torch.empty(0)), groups)[1]
        return tensors, rest

    def own_part(
        self, saved: Tensors, rest: dict[str, Any], model: nn.Module, optimizer: Any
    ) -> tuple[Tensors, dict[str, Any]]:
        """What this rank's model and optimizer take up of a whole state. Raises ValueError for one that is another optimizer's."""
        names, numbers = model.state_dict().keys(), self.own(model, optimizer)
        places = {number: place for place, number in enumerate(numbers)}
        groups = state.unflatten(rest["optimizer"], saved["optimizer"])["param_groups"]
        if [group["params"] for group in groups] != [group["params"] for group in self.groups]:
            raise ValueError("its optimizer has other groups of parameters")
        of_number = {number: group for group in groups for number in group["params"]}
        own_groups, first = [], 0
        for group in optimizer.state_dict()["param_groups"]:
            theirs = of_number[numbers[first]]
            own_groups.append({**theirs, **{key: group[key] for key in ("params", "param_names") if key in group}})
            first += len(group["params"])
        own = {name: each for name, each in saved["optimizer"].items() if int(name.split(".")[1]) in places}
        moments = {_renumbered(name, places): each for name, each in own.items()}
        moments, tree = _tree(moments, own_groups)
        found = {group: {name: each for name, each in saved.get(group, {}).items() if name in names or group == "rng"}
                 for group in saved if group != "optimizer"}  # fmt: skip
        return {**found, "optimizer": moments}, {**rest, "optimizer": tree}


def _renumbered(name: str, numbers: Any) -> str:
    kind, number, rest = name.split(".", 2)
    return f"{kind}.{numbers[int(number)]}.{rest}"


def _tree(tensors: dict[str, Tensor], groups: list[dict[str, Any]]) -> tuple[dict[str, Tensor], Any]:
    """`flatten` of an optimizer's state with these tensors, by their names."""
    found: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        _, number, key = name.split(".", 2)
        found.setdefault(int(number), {})[key] = tensor
    return state.flatten({"state": found, "param_groups": groups})


def whole(tensors: dict[str, Tensor], senders: Collection[int]) -> dict[str, Tensor]:
    """On rank 0 what these ranks have, by name, one tensor after the other; {} on the others. Every rank calls, with ordinary tensors."""
    own, rank = dict(tensors), dist.get_rank()
    forms: list[Any] = [None] * dist.get_world_size() if rank == 0 else []
    told = {name: (each.dtype, each.shape) for name, each in own.items()}
    dist.gather_object(told, forms if rank == 0 else None)
    if rank == 0:
        for sender in senders:
            for name, (dtype, shape) in forms[sender].items() if sender else ():
                own[name] = torch.empty(shape, dtype=dtype)
                dist.recv(_bytes(own[name]), sender)
        return own
    for each in own.values() if rank in senders else ():
        dist.send(_bytes(each.detach().cpu().contiguous()), 0)
    return {}


def _bytes(x: Tensor) -> Tensor:
    return x.reshape(-1).view(torch.uint8)
