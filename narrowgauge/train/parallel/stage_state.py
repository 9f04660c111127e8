"""The state of a run in stages under the names of one process: of each rank its part, of all together the whole.

Weights and what recipes remember have the names of the whole model anyway. An optimizer numbers its parameters, so in a checkpoint a
rank's state has the numbers that the optimizer of the whole model would give: `state.17.exp_avg`, with the groups of the whole. Each
rank writes its part, and reads its part of what any number of ranks wrote.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from narrowgauge.structure import is_weight
from narrowgauge.train.checkpoint import state
from narrowgauge.train.checkpoint.store import Tensors


class WholeNumbers:
    """Of the parameters of a model that is about to be cut, in an optimizer of all of them, which has no state yet."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        names = {parameter: name for name, parameter in model.named_parameters()}
        found = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
        self.numbers = {name: number for number, name in enumerate(found)}
        self.groups: list[dict[str, Any]] = optimizer.state_dict()["param_groups"]
        self.weights = {name for name in model.state_dict() if is_weight(name)}

    def of_rank(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[int]:
        """Number of a parameter in this rank's optimizer -> its number in the whole."""
        names = {parameter: name for name, parameter in model.named_parameters()}
        return [self.numbers[names[parameter]] for group in optimizer.param_groups for parameter in group["params"]]

    def collect(self, model: nn.Module, optimizer: Any, scaler: Any) -> tuple[Tensors, dict[str, Any]]:
        """As `checkpoint.state.collect`: of tensors this rank's part, of the rest the whole, on all ranks, which call together."""
        tensors, rest = state.collect(model, optimizer, scaler)
        tensors = self.in_whole(tensors, model, optimizer)
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, list(tensors["optimizer"]))
        names = sorted((name for each in told for name in each), key=_number)
        groups = [{**group, "lr": optimizer.param_groups[0]["lr"]} for group in self.groups]
        rest["optimizer"] = _flat(dict.fromkeys(names, torch.empty(0)), groups)[1]
        # An empty group is an entry of its own, which other stages have tensors below: recipes may add to the layers of one stage alone.
        return {group: members for group, members in tensors.items() if members}, rest

    def in_whole(self, tensors: Tensors, model: nn.Module, optimizer: Any) -> Tensors:
        """With the numbers of the whole."""
        numbers = dict(enumerate(self.of_rank(model, optimizer)))
        return {**tensors, "optimizer": _renumbered(tensors["optimizer"], numbers)}

    def own_tensors(self, saved: Tensors, model: nn.Module, optimizer: Any, is_whole: bool = False) -> Tensors:
        """Of a checkpoint's tensors what this rank has, with its optimizer's own numbers.

        is_whole: these are those of all stages. Raises ValueError if they are another model's.
        """
        others = saved.get("weights", {}).keys() ^ self.weights if is_whole else set()
        if others:
            raise ValueError(f"it holds other weights than this model, {min(others)!r} for example")
        own = model.state_dict().keys()
        found = {group: {name: each for name, each in members.items() if group == "rng" or name in own}
                 for group, members in saved.items()}  # fmt: skip
        numbers = {number: place for place, number in enumerate(self.of_rank(model, optimizer))}
        moments = saved.get("optimizer", {})
        mine = {name: each for name, each in moments.items() if _number(name) in numbers}
        return {**found, "optimizer": _renumbered(mine, numbers)}

    def own_part(self, saved: Tensors, rest: dict[str, Any], model: nn.Module, optimizer: Any) -> tuple[Tensors, Any]:
        """As `own_tensors`, and the rest of the state, as `checkpoint.state.restore` wants them.

        Raises ValueError for a state of another optimizer.
        """
        tensors = self.own_tensors(saved, model, optimizer)
        groups = state.unflatten(dict(rest["optimizer"]["items"])["param_groups"], {})
        if [group["params"] for group in groups] != [group["params"] for group in self.groups]:
            raise ValueError("its optimizer has other groups of parameters")
        of_number = {number: group for group in groups for number in group["params"]}
        numbers, own_groups = self.of_rank(model, optimizer), list[dict[str, Any]]()
        for group in optimizer.state_dict()["param_groups"]:
            theirs = of_number[numbers[group["params"][0]]]
            own_groups.append({**theirs, **{key: group[key] for key in ("params", "param_names") if key in group}})
        moments, tree = _flat(tensors["optimizer"], own_groups)
        return {**tensors, "optimizer": moments}, {**rest, "optimizer": tree}


def _number(name: str) -> int:
    return int(name.split(".")[1])


def _renumbered(tensors: dict[str, Tensor], numbers: dict[int, int]) -> dict[str, Tensor]:
    found = {}
    for name, each in tensors.items():
        kind, number, rest = name.split(".", 2)
        found[f"{kind}.{numbers[int(number)]}.{rest}"] = each
    return found


def _flat(tensors: dict[str, Tensor], groups: list[dict[str, Any]]) -> tuple[dict[str, Tensor], Any]:
    """`flatten` of the state dict of an optimizer with these tensors, by their names."""
    found: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        found.setdefault(_number(name), {})[name.split(".", 2)[2]] = tensor
    return state.flatten({"state": found, "param_groups": groups})
