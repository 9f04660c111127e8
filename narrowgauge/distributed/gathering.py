"""Gather the full, unquantized weights of a distributed model on rank 0, for export.

Works for any parallelization. Tensors are gathered one by one, in the same order on all ranks. The
ranks of a DTensor gather it, and rank 0 moves it to the CPU before the next one. If rank 0 holds no
part of a tensor (another pipeline stage), the first rank that does sends it.

Peak memory besides the result: two copies of one tensor on rank 0, one full tensor on the others.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from narrowgauge.distributed.all_ranks import Group, rank_and_world, run_on_all_ranks
from narrowgauge.errors import CheckpointError
from narrowgauge.structure import is_weight, plain_name


def gather_state_dict(
    model: nn.Module,
    dtype: torch.dtype | None = None,
    only: Callable[[str], bool] = is_weight,
    process_group: Group = None,
) -> dict[str, Tensor]:
    """Return the model's state dict with full CPU tensors on rank 0, {} on the other ranks.

    All ranks must call it.

    dtype          cast floating-point weights of more than 8 bits to it before sending, for
                   instance torch.bfloat16; None: no cast
    only           predicate on names (without prefixes of DDP and other wrappers); default: the
                   weights of the model before `convert`, without amax histories and step sizes
    process_group  of all ranks that hold parts of the model; None: the default group

    Tied weights stay tied. Use it as `model.save_pretrained(folder,
    state_dict=gather_state_dict(model, torch.bfloat16))` on rank 0. Plain CPU tensors without a cast
    are the model's own tensors, not copies.
    """
    rank, world = rank_and_world(process_group)
    state = {plain_name(name): tensor for name, tensor in model.state_dict(keep_vars=True).items()}
    selected = {name: tensor for name, tensor in state.items() if only(name)}
    infos = run_on_all_ranks(lambda: _tensor_infos(selected, dtype), process_group)
    infos_of_ranks: list[dict[str, TensorInfo]] = [infos] * world
    if world > 1:
        dist.all_gather_object(infos_of_ranks, infos, group=process_group)
    holders: dict[str, int] = {}
    # The lowest rank that holds a tensor sends it. The order of `holders` is the same on all ranks,
    # so the collectives match.
    for source, of_rank in enumerate(infos_of_ranks):
        for name in of_rank:
            holders.setdefault(name, source)
    result: dict[str, Tensor] = {}
    for name, holder in holders.items():
        info = infos_of_ranks[holder][name]
        # The earlier name's tensor was gathered already: reuse the object, so that ties survive.
        if info.tied:
            found = result.get(info.tied)
        else:
            full = _full_tensor(selected[name], dtype) if name in selected else None
            found = _to_rank_0(full, holder, info, rank, process_group)
        if found is not None:
            result[name] = found
    return result


@dataclass(frozen=True)
class TensorInfo:
    """Metadata of a sent tensor; `tied` is an earlier name of the same tensor, or ""."""

    dtype: torch.dtype
    shape: list[int]
    tied: str


def _tensor_infos(selected: dict[str, Tensor], dtype: torch.dtype | None) -> dict[str, TensorInfo]:
    # Tied weights are one Python object.
    first: dict[int, str] = {}
    infos = {}
    for name, tensor in selected.items():
        if tensor.is_meta:
            raise CheckpointError(
                f"gather_state_dict: {name!r} is a meta tensor, without memory. Load or initialise the model first.",
                code="distribute.meta-tensor",
            )
        earlier = first.setdefault(id(tensor), name)
        infos[name] = TensorInfo(
            _cast(tensor.dtype, dtype), list(tensor.shape), earlier if earlier != name else ""
        )
    return infos


def _cast(own: torch.dtype, target: torch.dtype | None) -> torch.dtype:
    return target if target is not None and own.is_floating_point and own.itemsize > 1 else own


@torch.no_grad()
def _full_tensor(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return the full tensor on every rank of its mesh; a collective for DTensors."""
    local = tensor.detach().to(_cast(tensor.dtype, dtype))
    if not isinstance(local, DTensor):
        return local
    if local.dtype.itemsize > 1:
        return local.full_tensor()
    # gloo has no 8-bit float types: send the bytes as uint8.
    as_bytes = DTensor.from_local(
        local.to_local().view(torch.uint8),
        local.device_mesh,
        local.placements,
        shape=local.shape,
        stride=local.stride(),
    )
    return as_bytes.full_tensor().view(local.dtype)


def _to_rank_0(
    full: Tensor | None, holder: int, info: TensorInfo, rank: int, group: Group
) -> Tensor | None:
    """Return the tensor on the CPU on rank 0, received from `holder` if needed; None elsewhere."""
    if holder == 0:
        return full.cpu() if rank == 0 and full is not None else None
    if rank == holder and full is not None:
        dist.send(_as_bytes(full), group=group, group_dst=0)
    if rank == 0:
        found = torch.empty(info.shape, dtype=info.dtype, device=_device(group))
        dist.recv(_as_bytes(found), group=group, group_src=holder)
        return found.cpu()
    return None


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _device(group: Group) -> torch.device:
    """Return the device that the group's point-to-point messages use."""
    return (
        torch.device("cuda", torch.cuda.current_device())
        if "nccl" in dist.get_backend(group)
        else torch.device("cpu")
    )
