"""Checksums of replicated state: weights, amax histories, learned steps, optimizer step counts.

    digest(x) = (sum w_i, sum w_i (i mod 65521 + 1))   in wrapping int64; w_i are the words of x

A flipped bit changes the first sum, and a swap of two elements changes the second. Digests are
computed on the device in chunks of 2^22 words. One MAX all-reduce over the digests and their
negatives finds differences. The ranks exchange values only if there are any. Sharded tensors are
compared along the mesh axes that do not shard them.
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

PIECE = 2**22  # words in a chunk; bounds the int64 temporary to 32 MiB
POSITIONS = 65521
# Element size in bytes -> dtype of the words.
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# Keeps digests in [0, 2^62), so that -digest is representable and MAX(-digest) gives the minimum.
MASK = 2**62 - 1


def replicated(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """{name: tensor} of all state that other ranks may hold too, for `refuse_drift`."""
    names: dict[Any, str] = {parameter: name for name, parameter in model.named_parameters()}
    found = dict(model.state_dict())
    for parameter, kept in optimizer.state.items():
        if isinstance(kept.get("step"), Tensor):
            found[f"the optimizer's step count of {names[parameter]}"] = kept["step"]
    return found


@torch.no_grad()
def digest(x: Tensor) -> Tensor:
    """Checksum of a tensor, int64 [2] on its device."""
    # Bit patterns, not values: NaN payloads and signed zeros count, and float rounding cannot hide
    # a flip.
    words = x.detach().contiguous().reshape(-1).view(WORDS[x.element_size()])
    total = torch.zeros(2, dtype=torch.int64, device=x.device)
    for first in range(0, len(words), PIECE):
        part = words[first : first + PIECE].to(torch.int64)
        places = (torch.arange(first, first + len(part), device=x.device) % POSITIONS).add_(1)
        total += torch.stack((part.sum(), (part * places).sum()))
    return total & MASK


def refuse_drift(
    tensors: dict[str, Tensor], place: str, device: torch.device, mesh: DeviceMesh | None = None
) -> None:
    """Raises DriftError on all ranks if a replicated tensor differs between ranks.

    tensors  {name: tensor}; plain ones must be equal on all ranks, DTensors where not sharded
    place    position in the run for the message, such as 'step 100'
    mesh     ranks that share a model or the same stages; None: all ranks, no sharding

    The message names the first differing tensor and two ranks.
    """
    groups = _groups(tensors, mesh)
    compared = {name for _, names in groups for name in names}
    digests = {
        name: digest(local(each)).to(device) for name, each in tensors.items() if name in compared
    }
    different = {
        name
        for group, names in groups
        for name in _different({each: digests[each] for each in names}, group)
    }
    any_differs = torch.tensor(bool(different), dtype=torch.int32, device=device)
    # A difference in one group must stop the ranks of all groups, or they would wait forever.
    if mesh is not None:
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
    # The first in the order of `tensors`, so that all ranks raise the same message.
    _, name = min((where, name) for each in told for name, (where, *_) in each.items())
    held: dict[Any, tuple[int, list[int]]] = {}
    ranks = (0, 0)
    for rank, (_, part, numbers) in (
        (rank, each[name]) for rank, each in enumerate(told) if name in each
    ):
        # Only ranks with the same part of a sharded tensor are comparable.
        other, expected = held.setdefault(part, (rank, numbers))
        if numbers != expected:
            ranks = other, rank
            break
    count = len(set().union(*told))
    others = f"; so do {count - 1} tensors after it" if count > 1 else ""
    raise DriftError(
        f"{place}: {name} differs between rank {ranks[0]} and rank {ranks[1]}, which must hold the same{others}. Nothing was saved "
        "since the last checkpoint. Suspect the memory or processor of one of their machines; resume with --resume.",
        code="ranks.drift",
    )


def _groups(
    tensors: dict[str, Tensor], mesh: DeviceMesh | None
) -> list[tuple[dist.ProcessGroup | None, list[str]]]:
    """(process group, names of tensors replicated in it) for each mesh axis; None: all ranks."""
    if mesh is None:
        return [(None, list(tensors))]
    found: list[tuple[dist.ProcessGroup | None, list[str]]] = []
    for axis in mesh.mesh_dim_names or ():
        names = [
            name
            for name, each in tensors.items()
            if not isinstance(each, DTensor) or axis not in _cut_axes(each)
        ]
        if names and mesh[axis].size() > 1:
            found.append((mesh.get_group(axis), names))
    return found


def _cut_axes(x: DTensor) -> list[str]:
    """Names of the mesh axes that shard a tensor."""
    names = x.device_mesh.mesh_dim_names or ()
    return [
        name
        for name, placement in zip(names, x.placements, strict=True)
        if hasattr(placement, "dim")
    ]


def _part(x: Tensor) -> tuple[int, ...]:
    """Coordinates of a rank's shard on the axes that shard the tensor; () if replicated."""
    if not isinstance(x, DTensor):
        return ()
    return tuple(x.device_mesh.get_local_rank(axis) for axis in _cut_axes(x))


def _different(own: dict[str, Tensor], group: dist.ProcessGroup | None) -> list[str]:
    """Names of digests that differ within a process group."""
    digests = torch.stack(list(own.values())).view(-1)
    # One all-reduce instead of MAX and MIN: MIN(d) = -MAX(-d).
    extremes = torch.cat((digests, -digests))
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    largest, smallest = extremes[: len(digests)], -extremes[len(digests) :]
    apart = (largest != smallest).view(-1, 2).any(1).tolist()
    return [name for name, differs in zip(own, apart, strict=True) if differs]
