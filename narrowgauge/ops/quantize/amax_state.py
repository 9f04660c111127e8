"""Delayed scaling within a step: the amax state of one tensor.

An amax state [3] float32 holds

    in_use     the amax that sets this step's scale, 0 before the first step
    seen       the largest amax of this step so far
    nonfinite  1 if an amax of this step was not finite

`update_amax` only takes maxima, so micro-batches accumulate and recomputation changes nothing. A
non-finite amax is returned unchanged: the scale becomes NaN, which makes the tile NaN and thereby
visible. `nn.amax_history` updates the state between steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from narrowgauge.recipe import DelayedScaling

IN_USE, SEEN, NONFINITE = 0, 1, 2


class AmaxBuffers(Protocol):
    """Amax buffers of one tensor, as in `nn.amax_history.AmaxHistory`.

    history  amax of earlier steps
    live     [3] amax state of this step
    settings settings of delayed scaling
    """

    history: Tensor
    live: Tensor
    settings: DelayedScaling


def update_amax(amax_state: Tensor, amax: Tensor, *, records: bool = True) -> Tensor:
    """Record this tensor's amax [1, 1] in the state; return the amax [1, 1] that sets the scale.

    The result is the amax in use. Before the first step, and if the tensor's amax is not finite, it
    is the tensor's own. amax has no element if the tensor is empty, and counts as 0.

    records  False leaves the state unchanged
    """
    amax = amax.reshape(1) if amax.numel() else amax.new_zeros(1)
    finite = amax.isfinite()
    in_use, seen, nonfinite = amax_state.unbind()
    # Tensor operations only: a branch on the values would synchronize with the GPU.
    if records:
        now = torch.where(finite, torch.maximum(seen, amax), seen)
        bad = torch.maximum(nonfinite, (~finite).to(nonfinite.dtype))
        # One copy of all three, in place: the buffer keeps its address, which CUDA graphs and
        # kernels hold.
        amax_state.copy_(torch.cat((in_use.reshape(1), now, bad)))
    return torch.where(finite & (in_use > 0), in_use, amax).reshape(1, 1)
