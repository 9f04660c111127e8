"""How a model was parallelised: which ranks hold a layer, and which read other data. Read from DDP, fully_shard and DTensors.

torch has no public way to ask for the mesh of `fully_shard`, nor to leave buffers out of what DistributedDataParallel broadcasts once
it is built. What is private there is used here alone (checked on torch 2.11 and 2.13).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from narrowgauge.errors import ConfigError
from narrowgauge.nn.linear import QLinear

# What wrappers add to the name of a layer.
_WRAPPERS = re.compile(r"(^|\.)(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(?=\.|$)")


def plain_name(name: str) -> str:
    """A layer's name without what DDP, torch.compile and activation checkpointing add to it."""
    return _WRAPPERS.sub("", name).lstrip(".")


@dataclass(frozen=True)
class Topology:
    """Of one model on this rank.

    ddp          the DistributedDataParallel modules in it
    fsdp         the modules of `fully_shard`
    mesh         that of `fully_shard`: [shard] or [replicate, shard]; None without it
    replicas     process groups of ranks that read other data, the outermost first
    """

    ddp: tuple[DistributedDataParallel, ...]
    fsdp: tuple[FSDPModule, ...]
    mesh: DeviceMesh | None
    replicas: tuple[dist.ProcessGroup, ...]

    @classmethod
    def of(cls, model: nn.Module, replicas: dist.ProcessGroup | None) -> Topology:
        """replicas: what a loop that reduces gradients by itself says. Raises ConfigError for what cannot be served."""
        ddp = tuple(each for each in model.modules() if isinstance(each, DistributedDataParallel))
        fsdp = tuple(each for each in model.modules() if isinstance(each, FSDPModule))
        if any(isinstance(each, FullyShardedDataParallel) for each in model.modules()):
            raise ConfigError(
                "distribute: FullyShardedDataParallel keeps weights as one flat tensor, whose rows no recipe knows. "
                "Shard the model with torch.distributed.fsdp.fully_shard."
            )
        mesh = next((found for each in fsdp if (found := _mesh_of(each)) is not None), None)
        groups: list[dist.ProcessGroup] = []
        if mesh is not None:
            groups += [mesh.get_group(dim) for dim in range(mesh.ndim)]
        for each in ddp:
            _add(groups, each.process_group)
        if replicas is not None and not groups:
            groups.append(replicas)
        return cls(ddp, fsdp, mesh, tuple(groups))

    @property
    def replica(self) -> tuple[int, int]:
        """(number, count) of this rank among those that read other data."""
        number, count = 0, 1
        for group in self.replicas:
            size = dist.get_world_size(group)
            number, count = number * size + dist.get_rank(group), count * size
        return number, count

    def groups_of(self, layer: QLinear) -> tuple[dist.ProcessGroup, ...]:
        """Those in which the state of a layer is agreed on: of all ranks that hold a part or a copy of it."""
        groups = list(self.replicas)
        for parameter in layer.parameters():
            if isinstance(parameter, DTensor):
                for dim in range(parameter.device_mesh.ndim):
                    _add(groups, parameter.device_mesh.get_group(dim))
        return tuple(group for group in groups if dist.get_world_size(group) > 1)

    def leave_out_of_broadcasts(self, model: nn.Module, layers: Iterable[QLinear]) -> None:
        """DDP writes the buffers of rank 0 into all ranks at each forward pass, which would undo what a rank saw since."""
        own = {id(buffer) for layer in layers for buffer in layer.buffers()}
        if not self.ddp:  # nor shall one that wraps the model later
            later = [name for name, buffer in model.named_buffers() if id(buffer) in own]
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, later)
        for each in self.ddp:
            names = {name for name, buffer in each.module.named_buffers() if id(buffer) in own}
            each.parameters_to_ignore |= names
            each._assign_modules_buffers()


def _add(groups: list[dist.ProcessGroup], group: dist.ProcessGroup) -> None:
    if group not in groups:
        groups.append(group)


def _mesh_of(module: FSDPModule) -> DeviceMesh | None:
    state = module._get_fsdp_state()
    group = getattr(state, "_fsdp_param_group", None)
    return None if group is None else group.mesh_info.mesh
