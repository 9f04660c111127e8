"""The norm of a gradient, and clipping by it: torch's, without its overflow.

    norm = sqrt(sum of g^2)        of all gradients together; g *= min(1, largest / (norm + 1e-6))

Squares in float32 overflow from gradients of 1.8e19 on, in float16 from 256 on: torch then reports an infinite norm, and clips to zero.
Here a norm is infinite only if a gradient is, or if it is beyond float32 itself. On a CPU float64 is taken where float32 overflowed, so
the bits are else torch's; on a GPU, where to look would mean to wait, all squares are summed in float64, at the same traffic.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from narrowgauge.addresses import wrapper


@torch.no_grad()
def clip_gradients(parameters: Iterable[Tensor], largest: float | None) -> Tensor:
    """Makes the norm of the gradients at most `largest` (None: as it is). Returns the norm before, 0-d float32 on their device."""
    trained = [parameter for parameter in parameters if parameter.grad is not None]
    norm = gradient_norm([parameter.grad for parameter in trained if parameter.grad is not None])
    if largest is not None and trained:
        clip_grads_with_norm_(trained, largest, norm)
    return norm


@torch.no_grad()
def gradient_norm(gradients: list[Tensor]) -> Tensor:
    """0-d float32. Of wrappers, such as DTensors, torch's own."""
    if gradients and gradients[0].is_cuda and not wrapper(*gradients):
        return _wide_norm(gradients).to(torch.float32)
    norm = get_total_norm(gradients)
    if norm.device.type == "cpu" and not wrapper(norm, *gradients) and math.isinf(float(norm)):
        norm = _wide_norm(gradients)
    return norm.to(torch.float32)


def _wide_norm(gradients: list[Tensor]) -> Tensor:
    """0-d float64, on the device of the first."""
    norms = torch._foreach_norm(gradients, 2.0, dtype=torch.float64)
    return torch.linalg.vector_norm(torch.stack([norm.to(gradients[0].device) for norm in norms]))
