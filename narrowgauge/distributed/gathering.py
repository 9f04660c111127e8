"""The ordinary weights of a model that is spread over ranks, on rank 0: for export, whatever the mesh.

Tensor by tensor, in one order on all ranks: the ranks that share a DTensor gather it, and rank 0 moves it to the CPU before the
next one is gathered. A tensor that rank 0 holds no part of (another stage's of a pipeline) is sent to it by the first rank that does.
Beside the result, rank 0 holds one tensor twice; the other ranks hold one tensor whole.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from narrowgauge.distributed.together import Group, rank_and_world, together
from narrowgauge.errors import CheckpointError
from narrowgauge.structure import is_weight, plain_name


def gathered(
    model: nn.Module,
    dtype: torch.dtype | None = None,
    only: Callable[[str], bool] = is_weight,
    process_group: Group = None,
) -> dict[str, Tensor]:
    """The model's state dict with whole tensors on the CPU, on rank 0; {} on the others. All ranks call it.

    dtype  of floating-point weights of more than 8 bits, for instance torch.bfloat16: cast before they travel; None keeps theirs
    only   which names to take, without what DDP and other wrappers add; default: those of the model before `convert`, no windows or steps

    Tied weights come back tied. For `model.save_pretrained(folder, state_dict=gathered(model, torch.bfloat16))` on rank 0.
    Plain tensors on the CPU that are not cast are the model's own, not copies.
    """
    rank, world = rank_and_world(process_group)
    state = {plain_name(name): tensor for name, tensor in model.state_dict(keep_vars=True).items()}
    own = {name: tensor for name, tensor in state.items() if only(name)}
    forms = together(lambda: _forms(own, dtype), process_group)
    told: list[dict[str, Form]] = [forms] * world
    if world > 1:
        dist.all_gather_object(told, forms, group=process_group)
    holders: dict[str, int] = {}
    for place, of_rank in enumerate(told):
        for name in of_rank:
            holders.setdefault(name, place)
    result: dict[str, Tensor] = {}
    for name, holder in holders.items():
        form = told[holder][name]
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
    """Of a tensor as it travels; `tied`: an earlier name of the same one, or ''."""

    dtype: torch.dtype
    shape: list[int]
    tied: str


def _forms(own: dict[str, Tensor], dtype: torch.dtype | None) -> dict[str, Form]:
    first: dict[int, str] = {}  # tied weights are one object
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
    """A collective of the ranks that share it."""
    local = tensor.detach().to(_cast(tensor.dtype, dtype))
    if not isinstance(local, DTensor):
        return local
    if local.dtype.itemsize > 1:
        return local.full_tensor()
    # gloo refuses 8-bit floats: their bytes travel
    octets = DTensor.from_local(
        local.to_local().view(torch.uint8),
        local.device_mesh,
        local.placements,
        shape=local.shape,
        stride=local.stride(),
    )
    return octets.full_tensor().view(local.dtype)


def _to_first(whole: Tensor | None, holder: int, form: Form, rank: int, group: Group) -> Tensor | None:
    """On rank 0 the tensor on the CPU, which its first holder sends if that is another rank; None elsewhere."""
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
    """Where the group's messages live."""
    return (
        torch.device("cuda", torch.cuda.current_device()) if "nccl" in dist.get_backend(group) else torch.device("cpu")
    )
