"""What a Linear computes while its recipe is suspended: nn.Linear's product, fast on every CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from narrowgauge.ops.registry import device_facts


def suspended_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """nn.functional.linear. Of bfloat16 on a CPU without instructions for it by float32 products of the rounded operands.

    Those are the same numbers but for the order of the sums, ten times faster there, and differentiable as often as one likes.
    """
    if not _multiplies_slowly(x, weight):
        return nn.functional.linear(x, weight, bias)
    addend = None if bias is None else bias.bfloat16().float()
    with torch.autocast("cpu", enabled=False):
        return nn.functional.linear(x.bfloat16().float(), weight.bfloat16().float(), addend).bfloat16()


def _multiplies_slowly(x: Tensor, weight: Tensor) -> bool:
    if not isinstance(x, Tensor):  # a Proxy of torch.fx
        return False
    if x.device.type != "cpu" or x.dtype == torch.float64 or device_facts("cpu", None).bf16_gemm:
        return False
    if torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu") == torch.bfloat16
    return x.dtype == weight.dtype == torch.bfloat16
