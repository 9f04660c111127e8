"""The norm of a gradient, and clipping by it: torch's, without its overflow, and of DTensors on any meshes.

    norm = sqrt(sum of g^2)        of all gradients together; g *= min(1, largest / (norm + 1e-6))

Squares in float32 overflow from gradients of 1.8e19 on, in float16 from 256 on: torch then reports an infinite norm, and clips to zero.
Here a norm is infinite only if a gradient is, or if it is beyond float32 itself. On a CPU float64 is taken where float32 overflowed, so
the bits are else torch's; on a GPU, where to look would mean to wait, all squares are summed in float64, at the same traffic.

Of DTensors the squares of the local parts are summed in float64, and the ranks' sums gathered and added in one order: every rank has the
same norm, to the bit, and waits for nothing. A float32 norm of another sharding differs only where 2^-50 of it decides its rounding.

`NormInParts` has the same norm of gradients that come one after another, of which each is gone when the next one comes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from narrowgauge.addresses import dry_run_on, wrapper
from narrowgauge.ops.registry import device_facts
from narrowgauge.optim import shards
from narrowgauge.optim.cpp.norm import Blocks


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[Tensor], largest: float | None, *, wide: bool = False, stages: Any = None
) -> Tensor:
    """Makes the norm of the gradients at most `largest` (None: as it is). Returns the norm before, 0-d float32 on their device.

    wide    sums squares of plain gradients in float64 too, so that one process has the norm that shards have
    stages  process group of the ranks that hold other parameters of the same model, such as the stages of a pipeline: the norm is of
            all of them. Every rank of it has to call. DTensors bring their own groups
    """
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
    blocks = Blocks.of(gradients) if wide else None
    norm = gradient_norm(gradients, wide=wide, stages=stages, blocks=blocks)
    if largest is None or not trained:
        return norm
    if blocks is not None and math.isfinite(float(norm)):
        factor = float(torch.clamp(largest / (norm + 1e-6), max=1.0))
        if factor < 1.0:
            blocks.multiply(factor)
        return norm
    scale_gradients(trained, largest, norm)
    return norm


@torch.no_grad()
def scale_gradients(trained: list[Tensor], largest: float, norm: Tensor) -> None:
    """Multiplies the gradients of parameters that have one by min(1, largest / (norm + 1e-6)); norm 0-d float32."""
    gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
    if not any(map(shards.is_sharded, gradients)):
        clip_grads_with_norm_(trained, largest, norm)
        return
    coefficient = torch.clamp(largest / (norm + 1e-6), max=1.0)
    by_device: dict[torch.device, list[Tensor]] = {}
    for each in map(shards.local, gradients):
        by_device.setdefault(each.device, []).append(each)
    for device, members in by_device.items():
        torch._foreach_mul_(members, coefficient.to(device))


@torch.no_grad()
def gradient_norm(
    gradients: list[Tensor], *, wide: bool = False, stages: Any = None, blocks: Blocks | None = None
) -> Tensor:
    """0-d float32. wide, stages: see `clip_gradients`. blocks: the gradients once more, where nothing of them is sharded."""
    if stages is not None or (wide and gradients) or any(map(shards.is_sharded, gradients)):
        return _norm_over_ranks(gradients, stages, blocks).to(torch.float32)
    if gradients and gradients[0].is_cuda and not wrapper(*gradients):
        return _wide_norm(gradients).to(torch.float32)
    norm = get_total_norm(gradients)
    if norm.device.type == "cpu" and not wrapper(norm, *gradients) and math.isinf(float(norm)):
        norm = _wide_norm(gradients)
    return norm.to(torch.float32)


def _wide_norm(gradients: list[Tensor]) -> Tensor:
    """0-d float64, on the device of the first."""
    return _square(*_parts(gradients)).sqrt()


def _parts(gradients: list[Tensor]) -> tuple[list[Tensor], bool]:
    """What local gradients add to `_square`, float64, and whether it is squares: on a CPU (1-d, of tensors or of blocks), else norms."""
    if not all(device_facts(each.device.type, each.device.index).type == "cpu" for each in gradients):
        return list(torch._foreach_norm(gradients, 2.0, dtype=torch.float64)), False
    if (blocks := Blocks.of(gradients)) is not None:
        return [blocks.squares()], True
    return [_squares_on_cpu(each) for each in gradients], True


def _squares_on_cpu(x: Tensor) -> Tensor:
    if not x.numel():
        return torch.zeros(0, dtype=torch.float64, device="cpu")
    blocks = Blocks.of([x])
    return _square_on_cpu(x)[None] if blocks is None else blocks.squares()


def _square(parts: list[Tensor], are_squares: bool) -> Tensor:
    """Of all gradients 0-d float64, on the device of the first."""
    if are_squares:
        return torch.cat(parts).sum() if parts else torch.zeros((), dtype=torch.float64, device="cpu")
    return torch.linalg.vector_norm(torch.stack([norm.to(parts[0].device) for norm in parts])).square()


class NormInParts:
    """`gradient_norm(gradients, wide=True)` of gradients that are not there together, to the bit; `place` is a gradient's in that list.

    Of the places that were seen; a second gradient at a place is the caller's mistake. Of a DTensor, `add` sends nothing and `norm` once
    for each mesh; `so_far` sends 8 bytes for each gradient, and every rank of its mesh has to call it. On a CPU 8 bytes are kept for 4,096
    elements.
    """

    def __init__(self) -> None:
        # place -> mesh and axes that cut, part, whether it is squares
        self._parts: dict[int, tuple[Any, Tensor, bool]] = {}
        self._known: Tensor | None = None  # square of what `so_far` has seen

    def __contains__(self, place: int) -> bool:
        return place in self._parts

    def __len__(self) -> int:
        return len(self._parts)

    @torch.no_grad()
    def add(self, place: int, gradient: Tensor) -> None:
        key = None
        if shards.is_sharded(gradient):
            gradient = shards.without_partial_sums(gradient)
            key, gradient = shards.cut_of(gradient), shards.local(gradient)
        parts, are_squares = _parts([gradient])
        self._parts[place] = key, parts[0], are_squares

    @torch.no_grad()
    def so_far(self, place: int) -> Tensor:
        """0-d float32: the norm of the gradients for which this was called, this one included."""
        key, part, is_squares = self._parts[place]
        square = part.sum() if is_squares else part.square()
        if key is not None:
            square = shards.sum_of_shards(square, key)
        self._known = square if self._known is None else self._known + square.to(self._known.device)
        return self._known.sqrt().to(torch.float32)

    @torch.no_grad()
    def norm(self) -> Tensor:
        """0-d float32, of all; of none 0."""
        groups: dict[Any, list[tuple[Tensor, bool]]] = {}
        for _, (key, part, is_squares) in sorted(self._parts.items(), key=lambda item: item[0]):
            groups.setdefault(key, []).append((part, is_squares))
        found = {}
        for key, members in groups.items():
            all_squares = all(is_squares for _, is_squares in members)  # else some are on another device
            parts = [x if all_squares or not of else x.sum().sqrt() for x, of in members]
            found[key] = _square(parts, all_squares)
        return _total(found, None).to(torch.float32)


def _square_on_cpu(x: Tensor) -> Tensor:
    """Sum of squares in float64, by pieces that stay in the cache: torch's norm in another dtype takes eight times as long."""
    total = torch.zeros((), dtype=torch.float64)
    pieces = x.reshape(-1).split(2**16)
    for piece in pieces if dry_run_on() is None else pieces[:1]:  # of which one is like another
        wide = piece.to(torch.float64)
        total += torch.dot(wide, wide)
    return total


def _norm_over_ranks(gradients: list[Tensor], stages: Any, blocks: Blocks | None) -> Tensor:
    """0-d float64: one gather for each mesh whose axes cut gradients (for each such axis of it), and one over the stages."""
    groups: dict[Any, list[Tensor]] = {}
    for gradient in gradients:
        if shards.is_sharded(gradient):
            whole = shards.without_partial_sums(gradient)
            groups.setdefault(shards.cut_of(whole), []).append(whole)
        else:
            groups.setdefault(None, []).append(gradient)
    if blocks is not None:
        return _total({None: blocks.square()}, stages)
    return _total(
        {key: _square(*_parts([shards.local(each) for each in members])) for key, members in groups.items()}, stages
    )


def _total(squares: dict[Any, Tensor], stages: Any) -> Tensor:
    """The norm, 0-d float64: of the local squares of gradients on the meshes and cut axes that are keys, None: of none."""
    own = next(iter(squares.values())).device if squares else _device_of(stages)
    total = torch.zeros((), dtype=torch.float64, device=own)
    for key, square in squares.items():
        total += square.to(own) if key is None else shards.sum_of_shards(square, key).to(own)
    if stages is not None:
        found = [torch.empty_like(total) for _ in range(dist.get_world_size(stages))]
        dist.all_gather(found, total, group=stages)
        total = torch.stack(found).sum()
    return total.sqrt()


def _device_of(group: Any) -> torch.device:
    """Where a group's collectives take their tensors, for a stage without gradients."""
    if group is None:
        return torch.device("cpu")
    return (
        torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else torch.device("cpu")
    )
