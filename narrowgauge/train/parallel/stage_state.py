"""State of a pipeline-parallel run under the parameter names and numbers of one process.

Weights and recipe buffers have the whole model's names on every stage. An optimizer numbers its
parameters, so checkpoints use the numbers of an optimizer of the whole model: `state.17.exp_avg`,
with the parameter groups of the whole. Each rank writes its part, and reads its part of a
checkpoint from any number of ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from narrowgauge.structure import is_weight
from narrowgauge.train.checkpoint import state

if TYPE_CHECKING:
    from narrowgauge.train.checkpoint.store import Tensors


class WholeNumbers:
    """Parameter numbers of the whole model's optimizer.

    Create it before the model is cut into stages.

    numbers  {parameter name: number}
    groups   parameter groups of the whole model's optimizer
    weights  names of all weights of the whole model
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        names = {parameter: name for name, parameter in model.named_parameters()}
        found = [
            names[parameter] for group in optimizer.param_groups for parameter in group["params"]
        ]
        self.numbers = {name: number for number, name in enumerate(found)}
        self.groups: list[dict[str, Any]] = optimizer.state_dict()["param_groups"]
        self.weights = {name for name in model.state_dict() if is_weight(name)}

    def of_rank(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> list[int]:
        """Number in the whole model's optimizer for each parameter of this rank's optimizer."""
        names = {parameter: name for name, parameter in model.named_parameters()}
        return [
            self.numbers[names[parameter]]
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]

    def collect(
        self, model: nn.Module, optimizer: Any, scaler: Any
    ) -> tuple[Tensors, dict[str, Any]]:
        """As `checkpoint.state.collect`: this rank's tensors, and other state of the whole model.

        All ranks must call it together.
        """
        tensors, rest = state.collect(model, optimizer, scaler)
        tensors = self.in_whole(tensors, model, optimizer)
        told: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(told, list(tensors["optimizer"]))
        names = sorted((name for each in told for name in each), key=_number)
        # The schedule changes lr after the groups were recorded; all other options are constant.
        groups = [{**group, "lr": optimizer.param_groups[0]["lr"]} for group in self.groups]
        rest["optimizer"] = _flat(dict.fromkeys(names, torch.empty(0)), groups)[1]
        # Drop empty groups: a distributed checkpoint stores an empty dict as an entry of its own,
        # which collides with tensors that other stages store under the same group.
        return {group: members for group, members in tensors.items() if members}, rest

    def in_whole(self, tensors: Tensors, model: nn.Module, optimizer: Any) -> Tensors:
        """The same tensors, with the optimizer's numbered as in the whole model."""
        numbers = dict(enumerate(self.of_rank(model, optimizer)))
        return {**tensors, "optimizer": _renumbered(tensors["optimizer"], numbers)}

    def own_tensors(
        self, saved: Tensors, model: nn.Module, optimizer: Any, is_whole: bool = False
    ) -> Tensors:
        """Selects this rank's tensors of a checkpoint, with the numbers of its own optimizer.

        is_whole  `saved` covers all stages, so its weights must be exactly the model's

        Raises ValueError if they belong to another model.
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

    def own_part(
        self, saved: Tensors, rest: dict[str, Any], model: nn.Module, optimizer: Any
    ) -> tuple[Tensors, Any]:
        """Selects this rank's tensors and other state, in the form of `checkpoint.state.restore`.

        Raises ValueError for the state of another optimizer.
        """
        tensors = self.own_tensors(saved, model, optimizer)
        groups = state.unflatten(dict(rest["optimizer"]["items"])["param_groups"], {})
        if [group["params"] for group in groups] != [group["params"] for group in self.groups]:
            raise ValueError("its optimizer has other groups of parameters")
        of_number = {number: group for group in groups for number in group["params"]}
        numbers, own_groups = self.of_rank(model, optimizer), list[dict[str, Any]]()
        for group in optimizer.state_dict()["param_groups"]:
            # A rank's group is a part of one group of the whole, so its first parameter identifies
            # that group.
            theirs = of_number[numbers[group["params"][0]]]
            own_groups.append(
                {**theirs, **{key: group[key] for key in ("params", "param_names") if key in group}}
            )
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


def _flat(
    tensors: dict[str, Tensor], groups: list[dict[str, Any]]
) -> tuple[dict[str, Tensor], Any]:
    """Flattens an optimizer's state dict that is built from these named tensors."""
    found: dict[int, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        found.setdefault(_number(name), {})[name.split(".", 2)[2]] = tensor
    return state.flatten({"state": found, "param_groups": groups})
