"""What is private of torch and used here nonetheless, gathered in one place. Checked on torch 2.11 and 2.13.

ReduceScatter        base class of what `FSDPModule.set_custom_reduce_scatter`, which is public, takes; it has no public address
DefaultReduceScatter that of torch, to go back to
has_compiled         hooks of a compiled model leave no trace, and nothing public says that one was compiled
in_backward          activation checkpointing repeats a forward pass inside a backward pass, and nothing public says that one runs
parameter_group      of a module of fully_shard: its mesh, and how it reshards after the forward pass
gathered_parameters  of a module of fully_shard: what stands in the place of shards while they are gathered
local_tensor         the tensor that a DTensor holds: hooks of fully_shard are attributes of it, and `to_local` gives another object
parameters_of_ddp    whose gradients DistributedDataParallel sums
ddp_around           the DistributedDataParallel in whose forward pass a module runs
leave_out_of_ddp     buffers that DistributedDataParallel, once built, no longer broadcasts; `..._later` of one that is yet to be built
is_rehearsal         whether a pipeline's stage runs its module for the shapes of its messages
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from narrowgauge.errors import BackendError

__all__ = [
    "STAGES", "DefaultReduceScatter", "ReduceScatter", "ddp_around", "gathered_parameters",
    "has_compiled", "in_backward", "is_rehearsal", "leave_out_of_ddp",
    "leave_out_of_later_ddp",
    "local_tensor", "parameter_group", "parameters_of_ddp",
]  # fmt: skip

STAGES = "torch.distributed.pipelining.stage"
TRAINING = ("forward_maybe_with_nosync", "forward_one_chunk")  # methods of a stage that run it for a micro-batch


def in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def has_compiled() -> bool:
    """Whether torch.compile has traced anything in this process: a compiled model runs its hooks without Python."""
    module = sys.modules.get("torch._dynamo.utils")
    return module is not None and bool(module.counters["frames"]["total"])


def parameter_group(module: FSDPModule) -> Any:
    """None where the module has no parameters of its own."""
    return getattr(module._get_fsdp_state(), "_fsdp_param_group", None)


def gathered_parameters(module: FSDPModule) -> list[Tensor]:
    """Those that were gathered once; each stays the same object."""
    group = parameter_group(module)
    members = () if group is None else group.fsdp_params
    return [each._unsharded_param for each in members if hasattr(each, "_unsharded_param")]


def local_tensor(x: DTensor) -> Tensor:
    return x._local_tensor


def parameters_of_ddp(ddp: DistributedDataParallel) -> list[nn.Parameter]:
    return list(getattr(ddp, "_module_parameters", ()))


def ddp_around(module: nn.Module) -> DistributedDataParallel | None:
    """None where none is in its forward pass, or where the module is no part of it."""
    active = DistributedDataParallel._active_ddp_module
    return active if active is not None and any(each is module for each in active.modules()) else None


def leave_out_of_ddp(ddp: DistributedDataParallel, names: Collection[str]) -> None:
    ddp.parameters_to_ignore |= set(names)
    ddp._assign_modules_buffers()


def leave_out_of_later_ddp(model: nn.Module, names: Collection[str]) -> None:
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(names))


def is_rehearsal() -> bool:
    """Whether a PipelineStage called the module that is running, and not for a micro-batch. False where none called it.

    Before its first step, and when training and evaluation change places, a stage that was not told the shapes of its messages finds them
    by running its module: torch 2.13 forward and backward on the first micro-batch, and behind the first stage on memory that nobody has
    written; older ones on zeros. Windows would take their largest numbers from it, and random numbers would be those of another
    micro-batch. Only the caller tells the two apart.
    """
    module = sys.modules.get(STAGES)
    if module is None:
        return False
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals is not module.__dict__:
        frame = frame.f_back
    if frame is None:
        return False
    if not any(hasattr(module.PipelineStage, name) for name in TRAINING):
        raise BackendError(
            f"distribute: PipelineStage of this torch has none of the methods {', '.join(TRAINING)}, so a micro-batch cannot be told "
            "from the pass that finds shapes. Use torch 2.13."
        )
    return frame.f_code.co_name not in TRAINING
