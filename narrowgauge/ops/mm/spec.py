"""What a kernel must know to accept or refuse a product: the two casts, the device, and the form of the operands."""

from __future__ import annotations

from dataclasses import dataclass

from narrowgauge.ops.registry import Device, Refusal
from narrowgauge.recipe import Cast


@dataclass(frozen=True)
class MmSpec:
    """lhs, rhs: the casts, None for a 16-bit operand. expanded: whether one of them holds decoded values, not codes."""

    lhs: Cast | None
    rhs: Cast | None
    device: Device
    expanded: bool = False

    @property
    def casts(self) -> tuple[Cast | None, Cast | None]:
        return self.lhs, self.rhs

    @property
    def capability(self) -> str:
        return ".".join(map(str, self.device.capability))


EXPANDED = Refusal("expanded", "takes codes, but an operand is expanded to floats")
TWO_SCALES = Refusal("scale", "takes one scale, but a cast has a second one for the tensor (headroom)")
NO_E5M2_PAIR = Refusal("format", "e5m2 x e5m2 does not exist in hardware")
