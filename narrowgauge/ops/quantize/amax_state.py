"""Delayed scaling within a step: what one tensor's window knows of it.

An amax state [3] float32 holds

    in_use     the amax that this step's scale is made from, 0 before the first step
    seen       the largest amax of this step so far
    nonfinite  1 if an amax of this step was not finite

`update_amax` only ever takes a maximum, so micro-batches add up and recomputation changes nothing. A non-finite amax is returned as
it is: the scale becomes NaN, which poisons the tile and so shows itself. What happens between steps: `nn.amax_history`.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from narrowgauge.recipe import Window

IN_USE, SEEN, NONFINITE = 0, 1, 2


class AmaxBuffers(Protocol):
    """The state of one tensor from step to step: an `nn.amax_history.AmaxHistory`, or what has the same tensors."""

    history: Tensor
    live: Tensor
    window: Window


def update_amax(amax_state: Tensor, amax: Tensor, *, records: bool = True) -> Tensor:
    """Notes this tensor's amax [1, 1] in the state (if it records) and returns the amax [1, 1] to scale by.

    That is the window's, or the tensor's own before the first step and when it is not finite. amax has no element if the tensor has
    none, and counts as 0.
    """
    amax = amax.reshape(1) if amax.numel() else amax.new_zeros(1)
    finite = amax.isfinite()
    in_use, seen, nonfinite = amax_state.unbind()
    if records:
        now = torch.where(finite, torch.maximum(seen, amax), seen)
        bad = torch.maximum(nonfinite, (~finite).to(nonfinite.dtype))
        amax_state.copy_(torch.cat((in_use.reshape(1), now, bad)))
    return torch.where(finite & (in_use > 0), in_use, amax).reshape(1, 1)
