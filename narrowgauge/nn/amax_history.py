"""State that recipes add to a layer: base class LayerState, AmaxHistory for delayed scaling.

A layer has one AmaxHistory per tensor under delayed scaling (role x, w or gy).

    history    [length]  float32, amax of earlier steps, newest first; 0 for steps without a value
    live       [3]       float32, amax state of this step, see `ops.quantize.amax_state`
    nonfinite  [1]       int64, number of steps with a non-finite amax

`roll_history` ends a step: it shifts the amax of the step into the history
and sets the amax that scales the next step.
"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from narrowgauge.addresses import holds_numbers

if TYPE_CHECKING:
    from narrowgauge.recipe import DelayedScaling


class LayerState(nn.Module):
    """State that a recipe adds to a layer.

    It moves with the model, but keeps its dtypes: an amax or a learned step
    in 8 or 16 bits would be rounded. After `to_empty` from the meta device
    the memory is undefined, so the state is reset.

    not_replayed  names of tensors that a repeated forward pass of a step does not read, or that no
                  step changes. The snapshot of a queued step leaves them out
    """

    not_replayed: frozenset[str] = frozenset()

    def _apply(self, fn: Any, recurse: bool = True) -> LayerState:
        was_meta = False
        for name, tensor in [
            *self.named_parameters(recurse=False),
            *self.named_buffers(recurse=False),
        ]:
            moved = fn(tensor.data)
            # Take the device of the conversion and not its dtype:
            # model.bfloat16() and back would round the amax history.
            moved = moved if moved.dtype == tensor.dtype else tensor.data.to(moved.device)
            was_meta = was_meta or (tensor.is_meta and not moved.is_meta)
            if not isinstance(tensor, nn.Parameter):
                setattr(self, name, moved)
            elif tensor.is_meta == moved.is_meta:
                tensor.data = moved
            else:  # `.data` of a meta parameter cannot become a real tensor
                setattr(self, name, nn.Parameter(moved, requires_grad=tensor.requires_grad))
        if was_meta:
            self.reset_parameters()
        return self

    def reset_parameters(self) -> None:
        """Reset to the initial state.

        Frameworks call this name on modules built on the meta device.
        """
        raise NotImplementedError

    def reread(self) -> None:
        """Refresh cached facts about the tensors after other code wrote them between two steps."""


class AmaxHistory(LayerState):
    """Amax history of one tensor. The module docstring lists the buffers.

    `lineage` is a hash of the history's content that the host maintains without reading the device.
    Histories that started equal and recorded the same tensors have equal lineages, so their layers
    can share casts of one x under delayed scaling. The content itself is read once if the host did
    not follow the history: after loading, after a move, or after compiled code recorded into it.
    """

    not_replayed = frozenset({"history", "nonfinite"})
    history: Tensor
    live: Tensor
    nonfinite: Tensor
    _lineage: int | None = None  # None: unknown, the host did not follow the content
    _followed: tuple[Tensor, int] | None = None  # history and version behind _lineage
    _was_seen = False  # whether `saw` was called in this step

    def __init__(self, settings: DelayedScaling, device: torch.device) -> None:
        super().__init__()
        self.settings = settings
        self.register_buffer(
            "history", torch.zeros(settings.length, dtype=torch.float32, device=device)
        )
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
        """Hash of the content, equal for histories known to be equal.

        Returns None if the content is unknown and cannot be read: during CUDA graph capture, and
        for tensors of inference mode, which have no version counter.
        """
        history: Tensor = self._buffers["history"]  # type: ignore[assignment]
        if history.is_inference():  # `_version` of an inference tensor raises
            return None
        followed = self._followed
        if (
            self._lineage is None
            or followed is None
            or followed[0] is not history
            or followed[1] != history._version
        ):
            # The copy to the host below waits for the device, which a capture forbids.
            if history.is_cuda and torch.cuda.is_current_stream_capturing():
                return None
            # A hash of the content itself: histories that became equal by a
            # load share their casts again.
            numbers = (
                torch.cat((history, self.live)).cpu().numpy().tobytes()
                if holds_numbers(history)
                else b""
            )
            self._follow(int.from_bytes(hashlib.blake2b(numbers, digest_size=8).digest(), "little"))
        return self._lineage

    def saw(self, tensor: int) -> None:
        """Record that the content now depends on a tensor.

        tensor  number of the tensor; equal for histories that recorded the same one, never reused
        """
        own = self.__dict__  # nn.Module.__setattr__ costs three microseconds
        own["_was_seen"] = True
        if self._lineage is not None:
            own["_lineage"] = hash((self._lineage, tensor))

    def rolled(self) -> None:
        """Update the lineage at the end of a step.

        The lineage is lost if no call of `saw` announced the tensor of this step: compiled code
        writes `live` without the host. The next `lineage` then reads the content.
        """
        self._follow(
            hash((self._lineage, -1)) if self._was_seen and self._lineage is not None else None
        )
        self.__dict__["_was_seen"] = False

    def _follow(self, lineage: int | None) -> None:
        history: Tensor = self._buffers["history"]  # type: ignore[assignment]
        own = self.__dict__
        own["_lineage"], own["_followed"] = (
            lineage,
            (history, 0 if history.is_inference() else history._version),
        )

    def extra_repr(self) -> str:
        return str(self.settings)


@torch.no_grad()
def roll_history(histories: list[AmaxHistory]) -> None:
    """End a step for many amax histories, without a host synchronization.

    Histories with equal settings are updated together.

    A tensor that was not recorded, or was all zero, leaves history and scale unchanged, so ending a
    step twice equals ending it once. A non-finite amax never enters the history: casts with that
    amax had a scale of NaN, and the next step uses the amax from before. `step_end` decides
    whether a step that a GradScaler skips ends.
    """
    groups: dict[tuple[DelayedScaling, torch.device], list[AmaxHistory]] = {}
    for each in histories:
        groups.setdefault((each.settings, each.live.device), []).append(each)
    for (settings, _), members in groups.items():
        live = torch.stack([member.live for member in members])
        history = torch.stack([member.history for member in members])
        in_use, seen, poisoned = live.unbind(dim=1)
        rolled = torch.cat((seen[:, None], history[:, :-1]), dim=1)
        history = torch.where(seen[:, None] > 0, rolled, history)
        newest = history.amax(dim=1) if settings.algorithm == "max" else history[:, 0]
        # margin is an exponent of two, so this multiplication is exact.
        in_use = torch.where(seen > 0, newest * 2.0**settings.margin, in_use)
        zero = torch.zeros_like(in_use)
        # Write into the existing buffers: CUDA graphs hold their addresses.
        torch._foreach_copy_([member.history for member in members], list(history))
        torch._foreach_copy_(
            [member.live for member in members], list(torch.stack((in_use, zero, zero), dim=1))
        )
        torch._foreach_add_(
            [member.nonfinite for member in members], list(poisoned.to(torch.int64)[:, None])
        )
        for member in members:
            member.rolled()
