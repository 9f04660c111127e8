"""Detect how a model is parallelized: the ranks of each layer and the data-parallel ranks.

Reads DDP modules, fully_shard modules and DTensors. Private APIs of torch are in `torch_private`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from narrowgauge.distributed.torch_private import (
    exclude_from_ddp,
    exclude_from_future_ddp,
    gathered_parameters,
    parameter_group,
    parameters_of_ddp,
)
from narrowgauge.errors import ConfigError
from narrowgauge.structure import plain_name

if TYPE_CHECKING:
    from narrowgauge.nn.linear import QLinear


@dataclass(frozen=True)
class Topology:
    """Parallelization of one model on this rank.

    ddp       its DistributedDataParallel modules
    fsdp      its modules of `fully_shard`
    mesh      mesh of `fully_shard`: [shard] or [replicate, shard]; None without FSDP2
    replicas  process groups of data-parallel ranks, the outermost first
    """

    ddp: tuple[DistributedDataParallel, ...]
    fsdp: tuple[FSDPModule, ...]
    mesh: DeviceMesh | None
    replicas: tuple[dist.ProcessGroup, ...]

    @classmethod
    def detect(cls, model: nn.Module, replicas: dist.ProcessGroup | None) -> Topology:
        """Return the topology of a model. Raises ConfigError for FSDP1 (FullyShardedDataParallel).

        replicas  data-parallel group of a loop that reduces gradients itself; used if no wrapper
                  has one
        """
        ddp = tuple(each for each in model.modules() if isinstance(each, DistributedDataParallel))
        fsdp = tuple(each for each in model.modules() if isinstance(each, FSDPModule))
        if any(isinstance(each, FullyShardedDataParallel) for each in model.modules()):
            raise ConfigError(
                "distribute: FullyShardedDataParallel keeps weights as one flat tensor, whose rows no recipe knows. "
                "Shard the model with torch.distributed.fsdp.fully_shard.",
                code="distribute.fsdp1",
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
    def wrapper(self) -> str:
        """Name of the wrapper whose backward waits for gradients of all ranks; "" for none."""
        return "fully_shard" if self.fsdp else "DistributedDataParallel" if self.ddp else ""

    def device(self, model: nn.Module) -> torch.device | str:
        """Return the device for messages of the groups."""
        if self.mesh is not None:
            return self.mesh.device_type
        return next((each.device for each in model.parameters()), torch.device("cpu"))

    @property
    def replica(self) -> tuple[int, int]:
        """(index, count) of this rank among the data-parallel ranks."""
        index, count = 0, 1
        for group in self.replicas:
            size = dist.get_world_size(group)
            index, count = index * size + dist.get_rank(group), count * size
        return index, count

    def groups_of(self, layer: QLinear) -> tuple[dist.ProcessGroup, ...]:
        """Return the groups that synchronize a layer's state: all ranks with a shard or copy."""
        groups = list(self.replicas)
        for parameter in (*layer.parameters(), *layer.held_parameters()):
            if isinstance(parameter, DTensor):
                for dim in range(parameter.device_mesh.ndim):
                    _add(groups, parameter.device_mesh.get_group(dim))
        return tuple(group for group in groups if dist.get_world_size(group) > 1)

    def shard_of(self, layer: QLinear) -> dict[str, str]:
        """Return {role: label} of this rank's part of the tensors that tensor parallelism splits.

        Used by `ops.random.Stream`, so that shards draw different random numbers.
        """
        weight, found = layer._parameters.get("weight"), dict[str, str]()
        if not isinstance(weight, DTensor):
            return found
        gathers = [dist.get_process_group_ranks(group) for group in self.replicas]
        for dim, placement in enumerate(weight.placements):
            # Shards of data parallelism are gathered before use, so all its ranks read the same
            # tensor. Groups are compared by ranks and not as objects: HSDP's shards once drew
            # different noise.
            if (
                not placement.is_shard()
                or dist.get_process_group_ranks(weight.device_mesh.get_group(dim)) in gathers
            ):
                continue
            # Column-wise layers split gy [T, N], row-wise layers split x [T, K].
            other = "gy" if placement.is_shard(0) else "x"
            for role in ("w", other):
                found[role] = (
                    f"{found.get(role, '')}{dim}:{weight.device_mesh.get_local_rank(dim)} "
                )
        return found

    def require_reduced_step_sizes(self, layers: Mapping[QLinear, str]) -> None:
        """Raise ConfigError for learned step sizes that DDP or fully_shard does not reduce.

        Parameters added after wrapping, or ignored by the wrapper, would get different gradients on
        each rank.
        """
        reduced = {id(each) for ddp in self.ddp for each in parameters_of_ddp(ddp)}
        # Pipeline schedules gather before the first forward pass: module.parameters() may then hold
        # the gathered tensors.
        reduced |= {id(each) for module in self.fsdp for each in gathered_parameters(module)}
        for layer, name in layers.items():
            for step in layer.steps.parameters() if layer.steps is not None else ():
                if (
                    step.requires_grad
                    and (self.fsdp or self.ddp)
                    and id(step) not in reduced
                    and not isinstance(step, DTensor)
                ):
                    wrapper = "fully_shard" if self.fsdp else "DistributedDataParallel"
                    raise ConfigError(
                        f"distribute: {wrapper} does not sum the gradients of the learned steps of {plain_name(name)!r}: they are newer "
                        "than it, or were kept from it (ignored_params). Convert the model, then pass all of it to "
                        f"{wrapper}; beside 16-bit weights, which fully_shard does not take together with float32 steps, use "
                        "DistributedDataParallel.",
                        code="distribute.learned-steps",
                    )

    def exclude_from_broadcasts(self, model: nn.Module, layers: Iterable[QLinear]) -> None:
        """Exclude the layers' buffers, and frozen weights stored as codes, from DDP's broadcasts.

        model   the model, possibly wrapped in DDP later
        layers  its converted layers
        """
        layers = list(layers)
        # DDP broadcasts rank 0's buffers before each forward pass, which would overwrite this
        # rank's amax histories.
        own = {id(buffer) for layer in layers for buffer in layer.buffers()}
        # DDP's constructor also broadcasts all parameters once; these have no storage.
        own |= {id(layer.parameter) for layer in layers if layer.frozen is not None}

        def names_in(module: nn.Module) -> list[str]:
            named = [*module.named_buffers(), *module.named_parameters()]
            return [name for name, tensor in named if id(tensor) in own]

        # A framework may wrap the model in DDP after `distribute`.
        if not self.ddp:
            exclude_from_future_ddp(model, names_in(model))
        for each in self.ddp:
            exclude_from_ddp(each, set(names_in(each.module)))


def _add(groups: list[dist.ProcessGroup], group: dist.ProcessGroup) -> None:
    if group not in groups:
        groups.append(group)


def _mesh_of(module: FSDPModule) -> DeviceMesh | None:
    group = parameter_group(module)
    return None if group is None else group.mesh_info.mesh
