"""Gradient norm and clipping as in torch, without overflow, for plain tensors and DTensors.

    norm = sqrt(sum of g^2)        over all gradients; g *= min(1, largest / (norm + 1e-6))

Squares overflow in float32 from gradients of 1.8e19 on, and in float16 from 256 on. torch then
reports an infinite norm and clips to zero. Here a norm is infinite only if a gradient is infinite,
or if the norm exceeds float32.

On a CPU the result is torch's, bit for bit, and float64 is used only after float32 overflowed. On a
GPU this test would be a host sync, so all squares are summed in float64, with the same memory
traffic.

Squares of local DTensor parts are summed in float64. The ranks' sums are gathered and added in one
order, so every rank has a bit-identical norm without a host sync. With another sharding, the
float32 norm differs only if an error of 2^-50 decides its rounding.

`NormInParts` computes the same norm if gradients arrive one after another and are freed in between.
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
from narrowgauge.optim.cpp.norm import GradientBlocks


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[Tensor], largest: float | None, *, wide: bool = False, stages: Any = None
) -> Tensor:
    """Clip gradients to the norm `largest` and return the norm before clipping.

    largest  largest norm that stays as it is; None only measures
    wide     also sum squares of plain gradients in float64, so that one process gets the norm
             of sharded runs
    stages   process group of ranks with other parameters of the same model, such as pipeline
             stages. The norm then covers all of their gradients, and every rank of the group
             has to call. DTensors use the groups of their own meshes
    ->       0-d float32 on the device of the gradients
    """
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    gradients = [parameter.grad for parameter in trained if parameter.grad is not None]
    blocks = GradientBlocks.of(gradients) if wide else None
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
    """Multiply gradients by min(1, largest / (norm + 1e-6)), in place.

    Parameters without a gradient are ignored. norm: 0-d float32.
    """
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
    gradients: list[Tensor],
    *,
    wide: bool = False,
    stages: Any = None,
    blocks: GradientBlocks | None = None,
) -> Tensor:
    """Norm of all gradients, 0-d float32.

    wide, stages  see `clip_gradients`
    blocks        the same gradients as `GradientBlocks`, if none is sharded; saves a second traversal
    """
    if stages is not None or (wide and gradients) or any(map(shards.is_sharded, gradients)):
        return _norm_over_ranks(gradients, stages, blocks).to(torch.float32)
    if gradients and gradients[0].is_cuda and not wrapper(*gradients):
        return _wide_norm(gradients).to(torch.float32)
    norm = get_total_norm(gradients)
    # Only an infinite norm is computed again in float64: all other norms keep torch's bits.
    if norm.device.type == "cpu" and not wrapper(norm, *gradients) and math.isinf(float(norm)):
        norm = _wide_norm(gradients)
    return norm.to(torch.float32)


def _wide_norm(gradients: list[Tensor]) -> Tensor:
    """Norm in float64, 0-d, on the device of the first gradient."""
    return _square(*_parts(gradients)).sqrt()


def _parts(gradients: list[Tensor]) -> tuple[list[Tensor], bool]:
    """Contributions of local gradients to `_square`: (float64 tensors, are_squares).

    On a CPU they are 1-d sums of squares of tensors or blocks (True), elsewhere 0-d norms (False).
    """
    if not all(
        device_facts(each.device.type, each.device.index).type == "cpu" for each in gradients
    ):
        return list(torch._foreach_norm(gradients, 2.0, dtype=torch.float64)), False
    if (blocks := GradientBlocks.of(gradients)) is not None:
        return [blocks.squares()], True
    return [_squares_on_cpu(each) for each in gradients], True


def _squares_on_cpu(x: Tensor) -> Tensor:
    if not x.numel():
        return torch.zeros(0, dtype=torch.float64, device="cpu")
    blocks = GradientBlocks.of([x])
    return _square_on_cpu(x)[None] if blocks is None else blocks.squares()


def _square(parts: list[Tensor], are_squares: bool) -> Tensor:
    """Sum of squares of all gradients: 0-d float64, on the device of the first part."""
    if are_squares:
        return (
            torch.cat(parts).sum() if parts else torch.zeros((), dtype=torch.float64, device="cpu")
        )
    return torch.linalg.vector_norm(
        torch.stack([norm.to(parts[0].device) for norm in parts])
    ).square()


class NormInParts:
    """`gradient_norm(gradients, wide=True)` for gradients that arrive one at a time; bit-identical.

    `place` is the index of a gradient in that list. The caller must not add a second gradient for a
    place. The norm covers the places seen so far.

    For a DTensor, `add` communicates nothing, and `norm` once per mesh. `so_far` communicates 8
    bytes per gradient, and every rank of its mesh must call it. On a CPU, 8 bytes are stored per
    4,096 elements.
    """

    def __init__(self) -> None:
        # place -> (mesh and its sharding axes or None, partial sums, are_squares).
        self._parts: dict[int, tuple[Any, Tensor, bool]] = {}
        # Sum of squares over the gradients that `so_far` was called for.
        self._known: Tensor | None = None

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
        """Norm of the gradients for which this was called, including this one: 0-d float32."""
        key, part, is_squares = self._parts[place]
        square = part.sum() if is_squares else part.square()
        if key is not None:
            square = shards.sum_of_shards(square, key)
        self._known = square if self._known is None else self._known + square.to(self._known.device)
        return self._known.sqrt().to(torch.float32)

    @torch.no_grad()
    def norm(self) -> Tensor:
        """Norm of all gradients added, 0-d float32; 0 if there are none."""
        groups: dict[Any, list[tuple[Tensor, bool]]] = {}
        # The order of the list, not of arrival: backward order differs from it, and float sums
        # depend on order.
        for _, (key, part, is_squares) in sorted(self._parts.items(), key=lambda item: item[0]):
            groups.setdefault(key, []).append((part, is_squares))
        found = {}
        for key, members in groups.items():
            # Mixed parts: gradients lie on several devices, so all become norms.
            all_squares = all(is_squares for _, is_squares in members)
            parts = [x if all_squares or not of else x.sum().sqrt() for x, of in members]
            found[key] = _square(parts, all_squares)
        return _total(found, None).to(torch.float32)


def _square_on_cpu(x: Tensor) -> Tensor:
    """Sum of squares in float64, by pieces that fit in the cache.

    torch's norm with another dtype takes eight times as long.
    """
    total = torch.zeros((), dtype=torch.float64)
    pieces = x.reshape(-1).split(2**16)
    # A dry run counts operations on one piece, because all pieces cost the same.
    for piece in pieces if dry_run_on() is None else pieces[:1]:
        wide = piece.to(torch.float64)
        total += torch.dot(wide, wide)
    return total


def _norm_over_ranks(gradients: list[Tensor], stages: Any, blocks: GradientBlocks | None) -> Tensor:
    """Norm over all ranks, 0-d float64.

    Costs one gather for each sharding axis of each mesh, and one over the stages.
    """
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
        {
            key: _square(*_parts([shards.local(each) for each in members]))
            for key, members in groups.items()
        },
        stages,
    )


def _total(squares: dict[Any, Tensor], stages: Any) -> Tensor:
    """Norm from local sums of squares: 0-d float64.

    The keys of `squares` are (mesh, sharding axes), or None for plain gradients.
    """
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
    """Device of the tensors that a group's collectives take, for a stage without gradients."""
    if group is None:
        return torch.device("cpu")
    return (
        torch.device("cuda", torch.cuda.current_device())
        if dist.get_backend(group) == "nccl"
        else torch.device("cpu")
    )
