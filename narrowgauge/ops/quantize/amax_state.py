"""Delayed scaling: the memory of one tensor's magnitudes, and the amax that the next step will use.

Per tensor (role x, w or gy of a layer) the state is plain buffers, so that checkpoints hold it:

    history    [length]  largest magnitudes of earlier steps, newest first; 0 where nothing was seen yet
    live       [3]       in_use: amax of this step's scale, 0 before the first step; seen: largest amax of this step so far;
                         poisoned: 1 if an amax of this step was not finite
    nonfinite  [1]       how many steps had a non-finite amax

Within a step `observe` only ever takes a maximum, so that micro-batches add up and recomputation changes nothing. Between
steps `roll` moves `seen` into the history and sets `in_use` for the next one. A tensor that was not seen, or was all zero,
keeps history and scale. A non-finite amax never enters: this step's scale becomes NaN, which poisons the tile and so shows
itself, and the next step uses the old window again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.recipe import Window

IN_USE, SEEN, POISONED = 0, 1, 2


class AmaxWindow(nn.Module):
    """The state of one tensor; see the module."""

    history: Tensor
    live: Tensor
    nonfinite: Tensor

    def __init__(self, window: Window, device: torch.device) -> None:
        super().__init__()
        self.window = window
        self.register_buffer("history", torch.zeros(window.length, dtype=torch.float32, device=device))
        self.register_buffer("live", torch.zeros(3, dtype=torch.float32, device=device))
        self.register_buffer("nonfinite", torch.zeros(1, dtype=torch.int64, device=device))

    def _apply(self, fn: Any, recurse: bool = True) -> AmaxWindow:
        """model.to(bfloat16) moves this state but leaves its type: amax is kept in float32.

        From the meta device it arrives (to_empty) as whatever was in memory, and begins anew.
        """
        for name, buffer in self._buffers.items():
            assert buffer is not None
            moved = fn(buffer)
            moved = moved if moved.dtype == buffer.dtype else buffer.to(moved.device)
            self._buffers[name] = torch.zeros_like(moved) if buffer.is_meta and not moved.is_meta else moved
        return self

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Forgets everything; the name is the one by which frameworks initialize modules that were made on meta."""
        for buffer in (self.history, self.live, self.nonfinite):
            buffer.zero_()

    def extra_repr(self) -> str:
        return str(self.window)


def observe(live: Tensor, amax: Tensor, *, records: bool = True) -> Tensor:
    """Notes this tensor's amax [1, 1] in `live` (if it records) and returns the amax [1, 1] to scale by.

    That is the window's, or the tensor's own before the first step and when it is not finite.
    """
    amax = amax.reshape(1)
    finite = amax.isfinite()
    in_use, seen, poisoned = live.unbind()
    if records:
        now = torch.where(finite, torch.maximum(seen, amax), seen)
        bad = torch.maximum(poisoned, (~finite).to(poisoned.dtype))
        live.copy_(torch.cat((in_use.reshape(1), now, bad)))
    return torch.where(finite & (in_use > 0), in_use, amax).reshape(1, 1)


@torch.no_grad()
def roll(windows: list[AmaxWindow]) -> None:
    """Ends a step for many tensors at once. Windows of equal settings are updated together; no host synchronisation."""
    groups: dict[tuple[Window, torch.device], list[AmaxWindow]] = {}
    for window in windows:
        groups.setdefault((window.window, window.live.device), []).append(window)
    for (settings, _), members in groups.items():
        live = torch.stack([member.live for member in members])
        history = torch.stack([member.history for member in members])
        in_use, seen, poisoned = live.unbind(dim=1)
        rolled = torch.cat((seen[:, None], history[:, :-1]), dim=1)
        history = torch.where(seen[:, None] > 0, rolled, history)
        newest = history.amax(dim=1) if settings.algorithm == "max" else history[:, 0]
        in_use = torch.where(seen > 0, newest * 2.0**settings.margin, in_use)
        zero = torch.zeros_like(in_use)
        torch._foreach_copy_([member.history for member in members], list(history))
        torch._foreach_copy_([member.live for member in members], list(torch.stack((in_use, zero, zero), dim=1)))
        torch._foreach_add_([member.nonfinite for member in members], list(poisoned.to(torch.int64)[:, None]))
