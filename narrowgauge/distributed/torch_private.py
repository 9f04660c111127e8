"""Private APIs of torch that distributed training needs, wrapped in one place.

Checked on torch 2.11 and 2.13. ReduceScatter, the base class for the public
`FSDPModule.set_custom_reduce_scatter`, has no public import path either; DefaultReduceScatter
restores torch's own.
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
    "STAGES", "DefaultReduceScatter", "ReduceScatter", "enclosing_ddp", "exclude_from_ddp",
    "exclude_from_future_ddp", "gathered_parameters", "has_compiled", "in_backward",
    "is_shape_inference", "local_tensor", "parameter_group", "parameters_of_ddp",
]  # fmt: skip

STAGES = "torch.distributed.pipelining.stage"
# Methods of PipelineStage that run its module for a micro-batch.
MICRO_BATCH_METHODS = ("forward_maybe_with_nosync", "forward_one_chunk")


def in_backward() -> bool:
    """Return True during a backward pass, where checkpointing repeats forward passes."""
    return torch._C._current_graph_task_id() != -1


def has_compiled() -> bool:
    """Return True if torch.compile has traced anything in this process.

    A compiled model runs its hooks without Python, so hooks alone cannot prove that no forward pass
    ran.
    """
    # Look in sys.modules: importing Dynamo takes a second, and an unused one has traced nothing.
    module = sys.modules.get("torch._dynamo.utils")
    return module is not None and bool(module.counters["frames"]["total"])


def parameter_group(module: FSDPModule) -> Any:
    """Return the FSDP2 parameter group (mesh, resharding); None without own parameters."""
    return getattr(module._get_fsdp_state(), "_fsdp_param_group", None)


def gathered_parameters(module: FSDPModule) -> list[Tensor]:
    """Return the gathered (unsharded) parameters; each stays the same object once created."""
    group = parameter_group(module)
    members = () if group is None else group.fsdp_params
    return [each._unsharded_param for each in members if hasattr(each, "_unsharded_param")]


def local_tensor(x: DTensor) -> Tensor:
    """Return the local tensor object of a DTensor, to which FSDP2's hooks are attached.

    `to_local` returns a new object without the attributes.
    """
    return x._local_tensor


def parameters_of_ddp(ddp: DistributedDataParallel) -> list[nn.Parameter]:
    """Return the parameters whose gradients a DDP module reduces."""
    return list(getattr(ddp, "_module_parameters", ()))


def enclosing_ddp(module: nn.Module) -> DistributedDataParallel | None:
    """Return the DDP whose forward pass is running, if it contains `module`; else None."""
    active = DistributedDataParallel._active_ddp_module
    return (
        active if active is not None and any(each is module for each in active.modules()) else None
    )


def exclude_from_ddp(ddp: DistributedDataParallel, names: Collection[str]) -> None:
    """Stop an existing DDP module from broadcasting the named buffers."""
    ddp.parameters_to_ignore |= set(names)
    # DDP computed its list of buffers in the constructor: compute it again.
    ddp._assign_modules_buffers()


def exclude_from_future_ddp(model: nn.Module, names: Collection[str]) -> None:
    """Stop a DDP module that wraps `model` later from broadcasting the named buffers."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(names))


def is_shape_inference() -> bool:
    """Return True if a PipelineStage runs the current module only to infer shapes.

    False if no PipelineStage called it. A stage without explicit message shapes infers them by
    running its module before the first step, and whenever training and evaluation alternate. torch
    2.13 runs forward and backward on the first micro-batch, behind the first stage on uninitialized
    memory; older versions run on zeros. Such a pass would fill amax histories and shift the random
    numbers of micro-batches.

    Raises BackendError if PipelineStage has none of the expected methods.
    """
    module = sys.modules.get(STAGES)
    if module is None:
        return False
    # Only the calling method distinguishes shape inference from a micro-batch: walk up to the first
    # frame of torch's module.
    frame = inspect.currentframe()
    while frame is not None and frame.f_globals is not module.__dict__:
        frame = frame.f_back
    if frame is None:
        return False
    if not any(hasattr(module.PipelineStage, name) for name in MICRO_BATCH_METHODS):
        raise BackendError(
            f"distribute: PipelineStage of this torch has none of the methods {', '.join(MICRO_BATCH_METHODS)}, so a "
            "micro-batch cannot be told from the pass that finds shapes. Use torch 2.13.",
            code="pipeline.old-torch",
        )
    return frame.f_code.co_name not in MICRO_BATCH_METHODS
