"""Cross-entropy of logits and labels, and its gradient, without a float32 copy of the logits.

    loss_i = log sum_j e^x_ij - x_it,    t = labels[i]
    dx_ij  = g_i (e^(x_ij - log sum) - [j = t])

Contract of FORWARD, (logits, labels), and BACKWARD, (logits, labels, sums, gradients)

    logits     [T, V], float32 or bfloat16
    labels     [T] int64 in [0, V), or negative for a row without a loss; the caller checks them
    gradients  [T] float32, gradients of the losses
    ->         forward: losses [T] and sums (log sum e^x) [T], float32; a row without a loss has loss 0
               backward: gradients of the logits in their dtype, rounded once

Arithmetic is float32. torch's own way from bfloat16 logits writes and reads 32 bytes for each of
them: a float32 copy, its log-softmax, two gradients of float32 and one of bfloat16. The kernel reads
2 bytes forward; it reads 2 and writes 2 backward.

The C++ kernel serves CPUs (cpp.py). `memory.chunked_cross_entropy` keeps no logits at all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.ops.cross_entropy import cpp
from narrowgauge.ops.registry import Device, Kernel, Registry, device_of

__all__ = ["BACKWARD", "FORWARD", "CrossEntropySpec"]


@dataclass(frozen=True)
class CrossEntropySpec:
    """Properties of a call that decide which kernel is chosen.

    dtype     dtype of the logits
    is_empty  True if there is no logit
    """

    device: Device
    dtype: torch.dtype
    is_empty: bool = False

    @classmethod
    def of(cls, logits: Tensor, labels: Tensor) -> CrossEntropySpec:
        return cls(device_of(logits, labels), logits.dtype, logits.numel() == 0)


def forward(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Definition in plain torch; see the module."""
    wide = logits.to(torch.float32)
    sums = wide.logsumexp(-1)
    chosen = wide.gather(1, labels.clamp(min=0)[:, None])[:, 0]
    return torch.where(labels < 0, 0.0, sums - chosen), sums


def backward(logits: Tensor, labels: Tensor, sums: Tensor, gradients: Tensor) -> Tensor:
    """Definition in plain torch; see the module."""
    p = (logits.to(torch.float32) - sums[:, None]).exp()
    p.scatter_add_(1, labels.clamp(min=0)[:, None], torch.full_like(p[:, :1], -1.0))
    found = torch.where((labels < 0)[:, None], 0.0, p * gradients[:, None])
    return found.to(logits.dtype)


FORWARD: Registry[CrossEntropySpec] = Registry("cross_entropy")
FORWARD.register(
    Kernel("native-cpp", cpp.refuse, cpp.forward, on="cpu"),
    Kernel("reference", lambda spec: None, forward, by_torch=True),
)
BACKWARD: Registry[CrossEntropySpec] = Registry("cross_entropy_backward")
BACKWARD.register(
    Kernel("native-cpp", cpp.refuse, cpp.backward, on="cpu"),
    Kernel("reference", lambda spec: None, backward, by_torch=True),
)
