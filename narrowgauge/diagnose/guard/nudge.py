"""A control for continuations that cannot take their batches in another order: weights that differ in their last bit."""

from __future__ import annotations

import torch
from torch import nn

from narrowgauge.nn.coded_weight import CodedWeight
from narrowgauge.optim import shards


@torch.no_grad()
def nudge(model: nn.Module) -> None:
    """Moves every second float32 weight by one unit in the last place, of 16 bits every 64th; on all ranks that hold it alike."""
    for parameter in model.parameters():
        if isinstance(parameter, CodedWeight):  # no last bit of it is kept
            continue
        part = shards.local(parameter)
        if part.is_floating_point() and part.itemsize > 1 and part.untyped_storage().nbytes():
            some = part[..., :: 2 if part.itemsize > 2 else 64] if part.ndim else part
            some.copy_(torch.nextafter(some, torch.full_like(some, torch.inf)))
