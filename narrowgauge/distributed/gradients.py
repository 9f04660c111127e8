"""How gradients travel between the ranks of data parallelism: `install(model, gradients="fp8")` on DDP or FSDP2 modules.

    "16bit"    as torch sends them, in the dtype of the gradients
    "fp8"      E4M3, tiles of 1 x 128 with a power of two each, summed in float32 (messages.py)
    "fp8-lm"   E4M3, one scale per tensor that all ranks share and that adapts, summed in float32 (shared_scale.py)

                           what is replaced                                                      bytes per parameter
    DDP                    the all-reduce, by a communication hook (ddp_gradients.py)            2.02
    FSDP2                  the reduce-scatter, by `set_custom_reduce_scatter` (fsdp_gradients.py)  1.01
    several nodes, `mesh`  DDP: reduce-scatter in the node, all-reduce across, all-gather        2.02, and 2.02 / ranks of a node across
                           FSDP2 sharded within a node: then all-reduce across, by `set_all_reduce_hook`   1.01, and as much across
    HSDP                   the reduce-scatter; torch's own all-reduce of shards cannot be replaced

reduce="mean" divides by the number of ranks, as DDP and FSDP2 do by themselves; "sum" does not, for a loss that was divided by the
targets of all ranks. What DDP and FSDP2 do besides is untouched: buckets, `no_sync` and `set_requires_gradient_sync`, parameters without
gradient, dtypes of reduction. "fp8-lm" has a state, `state_dict()`, the same on all ranks.
"""

from __future__ import annotations

from typing import get_args

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from narrowgauge.distributed import ddp_gradients, fsdp_gradients
from narrowgauge.distributed.alike import refuse_others
from narrowgauge.distributed.gradient_state import Gradients, Numbers, Reduce
from narrowgauge.errors import ConfigError

__all__ = ["Gradients", "Numbers", "Reduce", "install"]


def install(
    model: nn.Module, *, gradients: Numbers = "16bit", reduce: Reduce = "mean", mesh: DeviceMesh | None = None
) -> Gradients:
    """Set how the gradients of a parallelised model travel; before its first backward, with the same arguments on every rank.

    model  DistributedDataParallel, or a module that is, or that has, FSDP2 modules
    mesh   for several nodes, (nodes, ranks of a node): then messages between nodes are narrow too. FSDP2 modules must be sharded over
           its last axis alone (`fully_shard(block, mesh=mesh["..."])`), with the same weights in every node.
    """
    if not isinstance(model, DistributedDataParallel) and any(
        isinstance(each, DistributedDataParallel) for each in model.modules()
    ):
        raise ConfigError(
            f"distribute: this {type(model).__name__} has a DistributedDataParallel inside. Pass that one to distribute, and compile or "
            "wrap it afterwards."
        )
    if not isinstance(model, DistributedDataParallel) and not _has_shards(model):
        raise ConfigError(
            f"distribute: {type(model).__name__} is neither DistributedDataParallel nor has modules of FSDP2, so no gradients travel. "
            "Wrap it, or call fully_shard first."
        )
    shape = None if mesh is None else tuple(mesh.mesh.shape)
    refuse_others({"gradients": gradients, "reduce": reduce, "mesh": shape}, *_groups(model))
    _refuse_unknown(gradients, reduce)
    if mesh is not None and mesh.ndim != 2:
        raise ConfigError(
            f"distribute: mesh has {mesh.ndim} axes; give two, (nodes, ranks of a node): init_device_mesh(device, (nodes, ranks))."
        )
    made = Gradients(gradients, reduce)
    if isinstance(model, DistributedDataParallel):
        ddp_gradients.install(model, made, mesh)
    else:
        fsdp_gradients.install(model, made, mesh)
    return made


def nothing_travels(gradients: Numbers, reduce: Reduce) -> Gradients:
    """For one process without a wrapper: the run that others are compared with."""
    _refuse_unknown(gradients, reduce)
    return Gradients(gradients, reduce)


def _refuse_unknown(gradients: Numbers, reduce: Reduce) -> None:
    for name, value, known in (("gradients", gradients, Numbers), ("reduce", reduce, Reduce)):
        if value not in get_args(known):
            raise ConfigError(f"distribute: {name} is {value!r}; choose one of {', '.join(get_args(known))}.")


def _has_shards(model: nn.Module) -> bool:
    return any(isinstance(module, FSDPModule) for module in model.modules()) and any(
        isinstance(parameter, DTensor) for parameter in model.parameters()
    )


def _groups(model: nn.Module) -> tuple[list[dist.ProcessGroup], torch.device]:
    """The groups that share the model's gradients, and where they compute: parameters of FSDP2 may wait in host memory."""
    if isinstance(model, DistributedDataParallel):
        return [model.process_group], next(model.parameters()).device
    mesh = next(parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor))
    return [mesh.get_group(axis) for axis in range(mesh.ndim)], torch.device(mesh.device_type)
