"""What recipes add to a layer as state: LayerState, the base of all of it, and AmaxHistory, the memory of delayed scaling.

A layer has one AmaxHistory per tensor with a window (role x, w or gy).

    history    [length]  largest magnitudes of earlier steps, newest first; 0 where nothing was seen yet
    live       [3]       this step's amax state, see `ops.quantize.amax_state`
    nonfinite  [1]       how many steps had a non-finite amax

Between steps `roll_history` moves what was seen into the history and sets the amax of the next one. A tensor that was not seen, or
was all zero, keeps history and scale, so ending a step twice is ending it once. A non-finite amax never enters: its step's scale was
NaN, and the next step uses the old window again.

Windows that began alike and saw the same tensors hold the same numbers. `lineage` says so without reading them, which a GPU would be
waited for: layers that read one x can then share its casts. Where nobody followed a window (it was loaded, moved, or seen by a compiled
graph), its numbers are read, once.
"""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.addresses import holds_numbers
from narrowgauge.recipe import Window


class LayerState(nn.Module):
    """State that a recipe adds to a layer. It is moved with the model and keeps its types: amax and steps of 8 bits would jump.

    From the meta device it arrives (to_empty) as whatever was in memory, and begins anew.

    not_replayed  names of tensors that a repeated forward pass of a step does not read, or that no step changes; the snapshot of each
                  queued step leaves them out
    """

    not_replayed: frozenset[str] = frozenset()

    def _apply(self, fn: Any, recurse: bool = True) -> LayerState:
        was_meta = False
        for name, tensor in [*self.named_parameters(recurse=False), *self.named_buffers(recurse=False)]:
            moved = fn(tensor.data)
            moved = moved if moved.dtype == tensor.dtype else tensor.data.to(moved.device)
            was_meta = was_meta or (tensor.is_meta and not moved.is_meta)
            if not isinstance(tensor, nn.Parameter):
                setattr(self, name, moved)
            elif tensor.is_meta == moved.is_meta:
                tensor.data = moved
            else:  # a parameter cannot change from meta in place
                setattr(self, name, nn.Parameter(moved, requires_grad=tensor.requires_grad))
        if was_meta:
            self.reset_parameters()
        return self

    def reset_parameters(self) -> None:
        """Begins anew; the name is the one by which frameworks initialize modules that were made on meta."""
        raise NotImplementedError

    def reread(self) -> None:
        """Its tensors were written by somebody else, between two steps: what it knows of them is found anew."""


class AmaxHistory(LayerState):
    """The state of one tensor; see the module."""

    not_replayed = frozenset({"history", "nonfinite"})
    history: Tensor
    live: Tensor
    nonfinite: Tensor
    _lineage: int | None = None  # None: nobody followed it
    _followed: tuple[Tensor, int] | None = None  # the history that it is of, and its version
    _was_seen = False  # in this step

    def __init__(self, window: Window, device: torch.device) -> None:
        super().__init__()
        self.window = window
        self.register_buffer("history", torch.zeros(window.length, dtype=torch.float32, device=device))
        self.register_buffer("live", torch.zeros(3, dtype=torch.float32, device=device))
        self.register_buffer("nonfinite", torch.zeros(1, dtype=torch.int64, device=device))

    @torch.no_grad()
    def reset_parameters(self) -> None:
        for buffer in (self.history, self.live, self.nonfinite):
            buffer.zero_()
        self._follow(None)

    def reread(self) -> None:
        self._follow(None)
        self._was_seen = False

    def lineage(self) -> int | None:
        """Equal for windows with equal numbers, as far as is known; None: not to be known, while a CUDA graph is captured."""
        history: Tensor = self._buffers["history"]  # type: ignore[assignment]
        if history.is_inference():  # without a version
            return None
        followed = self._followed
        if self._lineage is None or followed is None or followed[0] is not history or followed[1] != history._version:
            if history.is_cuda and torch.cuda.is_current_stream_capturing():
                return None
            numbers = torch.cat((history, self.live)).cpu().numpy().tobytes() if holds_numbers(history) else b""
            self._follow(int.from_bytes(hashlib.blake2b(numbers, digest_size=8).digest(), "little"))
        return self._lineage

    def saw(self, tensor: int) -> None:
        """Its numbers now depend on a tensor, which has this number: equal for windows that see the same one, and never used again."""
        own = self.__dict__  # the table: to set an attribute of a torch module takes three microseconds
        own["_was_seen"] = True
        if self._lineage is not None:
            own["_lineage"] = hash((self._lineage, tensor))

    def rolled(self) -> None:
        """A step has ended. Of one in which nobody said what the window saw, only its numbers tell what it holds."""
        self._follow(hash((self._lineage, -1)) if self._was_seen and self._lineage is not None else None)
        self._was_seen = False

    def _follow(self, lineage: int | None) -> None:
        history = self.history
        self._lineage, self._followed = lineage, (history, 0 if history.is_inference() else history._version)

    def extra_repr(self) -> str:
        return str(self.window)


@torch.no_grad()
def roll_history(windows: list[AmaxHistory]) -> None:
    """Ends a step for many tensors at once. Windows of equal settings are updated together; no host synchronisation."""
    groups: dict[tuple[Window, torch.device], list[AmaxHistory]] = {}
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
        for member in members:
            member.rolled()
