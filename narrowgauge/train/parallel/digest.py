"""Digests of what all ranks hold alike: weights that are not sharded, amax windows, learned steps, step counts of the optimizer.

    digest(x) = (sum w_i, sum w_i (i mod 65521 + 1))   in 64 bits that wrap around, w_i the words of x

A changed bit changes the first sum, two elements that changed places the second. Computed on the device, in pieces of 2^22 words, and
compared by one MAX over the ranks, of the digests and of their negatives; only where they differ does every rank say its own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from narrowgauge.errors import DriftError

PIECE = 2**22  # words; each takes 8 bytes more while it is summed
POSITIONS = 65521
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element
MASK = 2**62 - 1  # a negative of each exists


def replicated(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Name -> what is the same on all ranks."""
    names: dict[Any, str] = {parameter: name for name, parameter in model.named_parameters()}
    found = {name: each for name, each in model.state_dict().items() if not isinstance(each, DTensor)}
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


def refuse_drift(tensors: dict[str, Tensor], place: str, device: torch.device) -> None:
    """Raises DriftError, on all ranks, that names the first tensor and rank that differ from rank 0. place: in the run, as 'step 100'."""
    if not tensors:  # all is sharded, and no recipe remembers anything
        return
    own = torch.stack([digest(each).to(device) for each in tensors.values()]).view(-1)
    extremes = torch.cat((own, -own))
    dist.all_reduce(extremes, dist.ReduceOp.MAX)
    largest, smallest = extremes[: len(own)], -extremes[len(own) :]
    if torch.equal(largest, smallest):
        return
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, own.tolist())
    first = int((largest != smallest).nonzero()[0]) // 2
    ranks = [
        rank for rank, each in enumerate(told) if each[2 * first : 2 * first + 2] != told[0][2 * first : 2 * first + 2]
    ]
    count = int((largest != smallest).view(-1, 2).any(1).sum())
    others = f"; so do {count - 1} tensors after it" if count > 1 else ""
    raise DriftError(
        f"{place}: {list(tensors)[first]} differs between rank 0 and rank {ranks[0]}, which must hold the same{others}. Nothing was saved "
        "since the last checkpoint. Suspect the memory or processor of one of their machines; resume with --resume."
    )
