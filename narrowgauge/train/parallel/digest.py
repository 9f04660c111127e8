"""Digests of what ranks hold alike: weights, or the parts of them that several ranks have, amax windows, learned steps, step counts.

    digest(x) = (sum w_i, sum w_i (i mod 65521 + 1))   in 64 bits that wrap around, w_i the words of x

A changed bit changes the first sum, two elements that changed places the second. Computed on the device, in pieces of 2^22 words, and
compared by one MAX over the ranks, of the digests and of their negatives; only where they differ does every rank say its own. Parts of
weights are compared along each axis of the mesh that does not cut them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from narrowgauge.errors import DriftError
from narrowgauge.optim.shards import local

PIECE = 2**22  # words; each takes 8 bytes more while it is summed
POSITIONS = 65521
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element
MASK = 2**62 - 1  # a negative of each exists


def replicated(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Name -> what other ranks hold too, or may: see `refuse_drift`."""
    names: dict[Any, str] = {parameter: name for name, parameter in model.named_parameters()}
    found = dict(model.state_dict())
    for parameter, kept in optimizer.state.items():
        if isinstance(kept.get("step"), Tensor):
            found[f"the optimizer's step count of {names[parameter]}"] = kept["step"]
    return found


@torch.no_grad()
def digest(x: Tensor) -> Tensor:
    """[2] int64, on the device of x."""
    words = x.detach().contiguous().reshape(-1).view(WORDS[x.element_size()])
    total = torch.zeros(2, dtype=torch.int64, device=x.device)
    for first in range(0, len(words), PIECE):
        part = words[first : first + PIECE].to(torch.int64)
        places = (torch.arange(first, first + len(part), device=x.device) % POSITIONS).add_(1)
        total += torch.stack((part.sum(), (part * places).sum()))
    return total & MASK


def refuse_drift(tensors: dict[str, Tensor], place: str, device: torch.device, mesh: DeviceMesh | None = None) -> None:
    """Raises DriftError, on all ranks, that names the first tensor and the ranks that differ. place: in the run, as 'step 100'.

    mesh: of the ranks that share a model, or the same stages of it; None: all, and nothing is cut. What is no DTensor is the same on all
    of them.
    """
    groups = _groups(tensors, mesh)
    compared = {name for _, names in groups for name in names}
    digests = {name: digest(local(each)).to(device) for name, each in tensors.items() if name in compared}
    different = {name for group, names in groups for name in _different({each: digests[each] for each in names}, group)}
    any_differs = torch.tensor(bool(different), dtype=torch.int32, device=device)
    if mesh is not None:  # one group may differ where another does not
        dist.all_reduce(any_differs, dist.ReduceOp.MAX)
    if not any_differs:
        return
    own = {
        name: (place, _part(tensors[name]), digests[name].tolist())
        for place, name in enumerate(tensors)
        if name in different
    }
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, own)
    _, name = min((where, name) for each in told for name, (where, *_) in each.items())
    held: dict[Any, tuple[int, list[int]]] = {}
    ranks = (0, 0)
    for rank, (_, part, numbers) in ((rank, each[name]) for rank, each in enumerate(told) if name in each):
        other, expected = held.setdefault(part, (rank, numbers))
        if numbers != expected:
            ranks = other, rank
            break
    count = len(set().union(*told))
    others = f"; so do {count - 1} tensors after it" if count > 1 else ""
    raise DriftError(
        f"{place}: {name} differs between rank {ranks[0]} and rank {ranks[1]}, which must hold the same{others}. Nothing was saved "
        "since the last checkpoint. Suspect the memory or processor of one of their machines; resume with --resume."
    )


def _groups(tensors: dict[str, Tensor], mesh: DeviceMesh | None) -> list[tuple[dist.ProcessGroup | None, list[str]]]:
    """Ranks that hold the same of some tensors, by name, along each axis; None: all ranks."""
    if mesh is None:
        return [(None, list(tensors))]
    found: list[tuple[dist.ProcessGroup | None, list[str]]] = []
    for axis in mesh.mesh_dim_names or ():
        names = [name for name, each in tensors.items() if not isinstance(each, DTensor) or axis not in _cut_axes(each)]
        if names and mesh[axis].size() > 1:
            found.append((mesh.get_group(axis), names))
    return found


def _cut_axes(x: DTensor) -> list[str]:
    """The axes of the run's mesh that cut a tensor, by name."""
    names = x.device_mesh.mesh_dim_names or ()
    return [name for name, placement in zip(names, x.placements, strict=True) if hasattr(placement, "dim")]


def _part(x: Tensor) -> tuple[int, ...]:
    """What tells the part of a tensor that a rank holds from other parts: its coordinates on the axes that cut it."""
    if not isinstance(x, DTensor):
        return ()
    return tuple(x.device_mesh.get_local_rank(axis) for axis in _cut_axes(x))


def _different(own: dict[str, Tensor], group: dist.ProcessGroup | None) -> list[str]:
    """Names of digests that are not the same on all ranks of a group."""
    digests = torch.stack(list(own.values())).view(-1)
    extremes = torch.cat((digests, -digests))
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    largest, smallest = extremes[: len(digests)], -extremes[len(digests) :]
    apart = (largest != smallest).view(-1, 2).any(1).tolist()
    return [name for name, differs in zip(own, apart, strict=True) if differs]
