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

from narrowgauge.distributed.all_ranks import Group, rank_and_world, together
from narrowgauge.errors import CheckpointError
from narrowgauge.structure import is_weight, plain_name


def gathered(
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

    Tied weights stay tied. Use it as `model.save_pretrained(folder, state_dict=gathered(model,
    torch.bfloat16))` on rank 0. Plain CPU tensors without a cast are the model's own tensors, not
    copies.
    """
    rank, world = rank_and_world(process_group)
    state = {plain_name(name): tensor for name, tensor in model.state_dict(keep_vars=True).items()}
    own = {name: tensor for name, tensor in state.items() if only(name)}
    forms = together(lambda: _forms(own, dtype), process_group)
    told: list[dict[str, Form]] = [forms] * world
    if world > 1:
        dist.all_gather_object(told, forms, group=process_group)
    holders: dict[str, int] = {}
    # The lowest rank that holds a tensor sends it. The order of `holders` is the same on all ranks,
    # so the collectives match.
    for place, of_rank in enumerate(told):
        for name in of_rank:
            holders.setdefault(name, place)
    result: dict[str, Tensor] = {}
    for name, holder in holders.items():
        form = told[holder][name]
        # The earlier name's tensor was gathered already: reuse the object, so that ties survive.
        if form.tied:
            found = result.get(form.tied)
        else:
            whole = _whole(own[name], dtype) if name in own else None
            found = _to_first(whole, holder, form, rank, process_group)
        if found is not None:
            result[name] = found
    return result


@dataclass(frozen=True)
class Form:
    """Metadata of a sent tensor; `tied` is an earlier name of the same tensor, or ""."""

    dtype: torch.dtype
    shape: list[int]
    tied: str


def _forms(own: dict[str, Tensor], dtype: torch.dtype | None) -> dict[str, Form]:
    # Tied weights are one Python object.
    first: dict[int, str] = {}
    forms = {}
    for name, tensor in own.items():
        if tensor.is_meta:
            raise CheckpointError(
                f"gathered: {name!r} is a meta tensor, without memory. Load or initialise the model first."
            )
        earlier = first.setdefault(id(tensor), name)
        forms[name] = Form(_cast(tensor.dtype, dtype), list(tensor.shape), earlier if earlier != name else "")
    return forms


def _cast(own: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    return wanted if wanted is not None and own.is_floating_point and own.itemsize > 1 else own


@torch.no_grad()
def _whole(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Return the full tensor on every rank of its mesh; a collective for DTensors."""
    local = tensor.detach().to(_cast(tensor.dtype, dtype))
    if not isinstance(local, DTensor):
        return local
    if local.dtype.itemsize > 1:
        return local.full_tensor()
    # gloo has no 8-bit float types: send the bytes as uint8.
    octets = DTensor.from_local(
        local.to_local().view(torch.uint8),
        local.device_mesh,
        local.placements,
        shape=local.shape,
        stride=local.stride(),
    )
    return octets.full_tensor().view(local.dtype)


def _to_first(whole: Tensor | None, holder: int, form: Form, rank: int, group: Group) -> Tensor | None:
    """Return the tensor on the CPU on rank 0, received from `holder` if needed; None elsewhere."""
    if holder == 0:
        return whole.cpu() if rank == 0 and whole is not None else None
    if rank == holder and whole is not None:
        dist.send(_octets(whole), group=group, group_dst=0)
    if rank == 0:
        found = torch.empty(form.shape, dtype=form.dtype, device=_device(group))
        dist.recv(_octets(found), group=group, group_src=holder)
        return found.cpu()
    return None


def _octets(tensor: Tensor) -> Tensor:
    return tensor.contiguous().reshape(-1).view(torch.uint8)


def _device(group: Group) -> torch.device:
    """Return the device that the group's point-to-point messages use."""
    return (
        torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend(group) else torch.device("cpu")
    )
