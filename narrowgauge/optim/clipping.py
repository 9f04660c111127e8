"""The norm of a gradient, and clipping by it: torch's, without its overflow, and of DTensors on any meshes.

    norm = sqrt(sum of g^2)        of all gradients together; g *= min(1, largest / (norm + 1e-6))

Squares in float32 overflow from gradients of 1.8e19 on, in float16 from 256 on: torch then reports an infinite norm, and clips to zero.
Here a norm is infinite only if a gradient is, or if it is beyond float32 itself. On a CPU float64 is taken where float32 overflowed, so
the bits are else torch's; on a GPU, where to look would mean to wait, all squares are summed in float64, at the same traffic.

Of DTensors the squares of the local parts are summed in float64, and the ranks' sums gathered and added in one order: every rank has the
same norm, to the bit, and waits for nothing. A float32 norm of another sharding differs only where 2^-50 of it decides its rounding.
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
    if not any(map(shards.is_sharded, gradients)):
        clip_grads_with_norm_(trained, largest, norm)
        return norm
    coefficient = torch.clamp(largest / (norm + 1e-6), max=1.0)
    by_device: dict[torch.device, list[Tensor]] = {}
    for each in map(shards.local, gradients):
        by_device.setdefault(each.device, []).append(each)
    for device, members in by_device.items():
        torch._foreach_mul_(members, coefficient.to(device))
    return norm


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


def _square(gradients: list[Tensor]) -> Tensor:
    return _wide_norm([shards.local(each) for each in gradients]).square()


def _wide_norm(gradients: list[Tensor]) -> Tensor:
    """0-d float64, on the device of the first."""
    if gradients and all(device_facts(each.device.type, each.device.index).type == "cpu" for each in gradients):
        if (blocks := Blocks.of(gradients)) is not None:
            return blocks.square().sqrt()
        return sum((_square_on_cpu(each) for each in gradients), torch.zeros((), dtype=torch.float64)).sqrt()
    norms = torch._foreach_norm(gradients, 2.0, dtype=torch.float64)
    return torch.linalg.vector_norm(torch.stack([norm.to(gradients[0].device) for norm in norms]))


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
    own = shards.local(gradients[0]).device if gradients else _device_of(stages)
    total = torch.zeros((), dtype=torch.float64, device=own)
    for key, members in groups.items():
        square = _square(members) if blocks is None else blocks.square()
        total += square.to(own) if key is None else shards.sum_of_shards(square, members[0]).to(own)
    if stages is not None:
        found = [torch.empty_like(total) for _ in range(dist.get_world_size(stages))]
        dist.all_gather(found, total, group=stages)
        total = torch.stack(found).sum()
    return total.sqrt()


def _device_of(group: Any) -> torch.device:
    """Where a group's collectives take their tensors, for a stage without gradients."""
    return (
        torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else torch.device("cpu")
    )
