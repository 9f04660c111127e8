"""Control for replays of identical batches: weights changed in their last bit.

Reversed rows are no control under dropout, because the masks then fall on other rows: their
differences of 0.0005 to 0.0031 nats hide the differences of a recipe (docs/log.md).
"""

from __future__ import annotations

import torch
from torch import nn

from narrowgauge.nn.coded_weight import CodedWeight
from narrowgauge.optim import shards


@torch.no_grad()
def nudge(model: nn.Module) -> None:
    """Move every second float32 weight, or every 64th 16-bit weight, by one unit in the last place.

    Ranks that hold copies of a weight make identical changes.
    """
    for parameter in model.parameters():
        if isinstance(parameter, CodedWeight):  # stored as codes: there is no last bit to move
            continue
        part = shards.local(parameter)
        if part.is_floating_point() and part.itemsize > 1 and part.untyped_storage().nbytes():
            # The last bit of a 16-bit weight is a far larger step, so fewer of them are moved.
            some = part[..., :: 2 if part.itemsize > 2 else 64] if part.ndim else part
            some.copy_(torch.nextafter(some, torch.full_like(some, torch.inf)))
