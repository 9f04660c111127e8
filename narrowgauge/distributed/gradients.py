"""Gradient messages of data parallelism: `install(model, gradients="fp8")` for DDP or FSDP2.

    "16bit"   torch's reduction, in the dtype of the gradients
    "fp8"     E4M3, 1 x 128 tiles with power-of-two scales, float32 sums (messages.py)
    "fp8-lm"  E4M3, one adaptive scale per tensor shared by all ranks, float32 sums
              (shared_scale.py)

                          replaced collective                          bytes per parameter
    DDP                   all-reduce, by a communication hook          2.02
    FSDP2                 reduce-scatter                               1.01
    several nodes, DDP    reduce-scatter, all-reduce, all-gather       2.02, + 2.02 / ranks per node
    several nodes, FSDP2  reduce-scatter, all-reduce across nodes      1.01, + 1.01 across
    HSDP                  reduce-scatter; torch's all-reduce of the shards cannot be replaced

The second number of a row counts bytes between nodes. Implementation: ddp_gradients.py, and
fsdp_gradients.py by `set_custom_reduce_scatter` and `set_all_reduce_hook`.

reduce="mean" divides by the number of ranks, as DDP and FSDP2 do. "sum" does not divide, for a loss
that is divided by the number of targets on all ranks. Buckets, `no_sync`,
`set_requires_gradient_sync`, parameters without gradients and reduction dtypes work as in torch.
"fp8-lm" has a state, `state_dict()`, identical on all ranks.
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
from narrowgauge.distributed.gradient_state import GradientFormat, Gradients, Reduce
from narrowgauge.distributed.same_settings import require_same
from narrowgauge.errors import ConfigError

__all__ = ["GradientFormat", "Gradients", "Reduce", "install"]


def install(
    model: nn.Module,
    *,
    gradients: GradientFormat = "16bit",
    reduce: Reduce = "mean",
    mesh: DeviceMesh | None = None,
) -> Gradients:
    """Set the gradient messages of a parallelized model; call before its first backward.

    model              DistributedDataParallel, or a module that is or contains an FSDP2 module
    gradients, reduce  as in the module docstring; equal on every rank
    mesh               for several nodes: (nodes, ranks of a node), so that messages between nodes
                       are 8-bit too. FSDP2 modules must be sharded over its last axis alone,
                       `fully_shard(block, mesh=mesh["..."])`, with the same weights in every node

    Raises ConfigError if the model sends no gradients, or if arguments are invalid or differ
    between ranks.
    """
    # The communication hook belongs to the DDP module, which must therefore be the outermost one.
    if not isinstance(model, DistributedDataParallel) and any(
        isinstance(each, DistributedDataParallel) for each in model.modules()
    ):
        raise ConfigError(
            f"distribute: this {type(model).__name__} has a DistributedDataParallel inside. Pass that one to distribute, and compile or "
            "wrap it afterwards.",
            code="distribute.inner-ddp",
        )
    if not isinstance(model, DistributedDataParallel) and not _has_shards(model):
        raise ConfigError(
            f"distribute: {type(model).__name__} is neither DistributedDataParallel nor has modules of FSDP2, so no gradients travel. "
            "Wrap it, or call fully_shard first.",
            code="distribute.no-gradients",
        )
    shape = None if mesh is None else tuple(mesh.mesh.shape)
    # Compare before validating: an invalid argument on one rank must raise on all of them.
    require_same({"gradients": gradients, "reduce": reduce, "mesh": shape}, *_groups(model))
    _refuse_unknown(gradients, reduce)
    if mesh is not None and mesh.ndim != 2:
        raise ConfigError(
            f"distribute: mesh has {mesh.ndim} axes; give two, (nodes, ranks of a node): init_device_mesh(device, (nodes, ranks)).",
            code="distribute.mesh-size",
        )
    installed = Gradients(gradients, reduce)
    if isinstance(model, DistributedDataParallel):
        ddp_gradients.install(model, installed, mesh)
    else:
        fsdp_gradients.install(model, installed, mesh)
    return installed


def single_rank_gradients(gradients: GradientFormat, reduce: Reduce) -> Gradients:
    """Return the Gradients of one process without a wrapper, the reference for distributed runs."""
    _refuse_unknown(gradients, reduce)
    return Gradients(gradients, reduce)


def _refuse_unknown(gradients: GradientFormat, reduce: Reduce) -> None:
    for name, value, choices in (
        ("gradients", gradients, GradientFormat),
        ("reduce", reduce, Reduce),
    ):
        if value not in get_args(choices):
            raise ConfigError(
                f"distribute: {name} is {value!r}; choose one of {', '.join(get_args(choices))}.",
                code="distribute.choice",
            )


def _has_shards(model: nn.Module) -> bool:
    return any(isinstance(module, FSDPModule) for module in model.modules()) and any(
        isinstance(parameter, DTensor) for parameter in model.parameters()
    )


def _groups(model: nn.Module) -> tuple[list[dist.ProcessGroup], torch.device]:
    """Return the gradient process groups and the compute device.

    Offloaded FSDP2 parameters are in host memory, so the device is taken from the mesh.
    """
    if isinstance(model, DistributedDataParallel):
        return [model.process_group], next(model.parameters()).device
    mesh = next(
        parameter.device_mesh for parameter in model.parameters() if isinstance(parameter, DTensor)
    )
    return [mesh.get_group(axis) for axis in range(mesh.ndim)], torch.device(mesh.device_type)
