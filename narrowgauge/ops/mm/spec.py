"""What a kernel must know to accept or refuse a product: the two casts, the device, and the form of the operands."""

from __future__ import annotations

from dataclasses import dataclass

from narrowgauge.ops.registry import Device
from narrowgauge.recipe import Cast


@dataclass(frozen=True)
class MmSpec:
    """lhs, rhs: the casts, None for a 16-bit operand. expanded: whether one of them holds decoded values, not codes."""

    lhs: Cast | None
    rhs: Cast | None
    device: Device
    expanded: bool = False
