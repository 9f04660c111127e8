"""The forward pass of a Linear whose recipe is suspended: nn.Linear's GEMM, fast on every CPU."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from narrowgauge.ops.registry import device_facts


def suspended_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """nn.functional.linear; float32 GEMMs for bfloat16 on a CPU without bfloat16 instructions.

    The operands are rounded to bfloat16 first, so results differ only by the order of summation.
    That is ten times faster there, and differentiable any number of times.
    """
    if not multiplies_slowly(x, weight):
        return nn.functional.linear(x, weight, bias)
    addend = None if bias is None else bias.bfloat16().float()
    # Autocast would convert the float32 operands back to bfloat16 and call the slow GEMM.
    with torch.autocast("cpu", enabled=False):
        return nn.functional.linear(
            x.bfloat16().float(), weight.bfloat16().float(), addend
        ).bfloat16()


def multiplies_slowly(x: Tensor, weight: Tensor) -> bool:
    """True for a bfloat16 GEMM on a CPU without bfloat16 instructions."""
    if not isinstance(x, Tensor):  # a Proxy of torch.fx
        return False
    if x.device.type != "cpu" or x.dtype == torch.float64 or device_facts("cpu", None).bf16_gemm:
        return False
    if torch.is_autocast_enabled("cpu"):
        return torch.get_autocast_dtype("cpu") == torch.bfloat16
    return x.dtype == weight.dtype == torch.bfloat16
