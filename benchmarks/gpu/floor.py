"""The card's own rates, measured before anything else: what it copies, and multiplies in BF16 and FP8 without any cast.

copy    bytes read plus bytes written per second by Tensor.copy_, 1 GiB
bf16    8192 x 8192 x 8192 of random numbers by torch.mm
fp8     the same by torch._scaled_mm, E4M3, one scale per tensor, with fast accumulation; None where there are no such units
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks import harness
from narrowgauge.lab.card import timings


@dataclass(frozen=True)
class Floor:
    """Per second."""

    copy: float
    bf16: float
    fp8: float | None

    def rate(self, bound: str) -> float:
        """The rate by its name; where there are no FP8 units, FP8 products are emulated in BF16 and bound by it."""
        found = getattr(self, bound)
        return self.bf16 if found is None else float(found)

    def facts(self) -> dict[str, float | None]:
        return {"floor_copy": self.copy, "floor_bf16": self.bf16, "floor_fp8": self.fp8}

    def __str__(self) -> str:
        fp8 = "no FP8 units" if self.fp8 is None else f"FP8 {harness.rate(self.fp8, 'FLOP', 1)}"
        return f"floor: copy {harness.rate(self.copy, 'B', 1)}, BF16 {harness.rate(self.bf16, 'FLOP', 1)}, {fp8}"


def measured(device: torch.device, dry: bool) -> Floor:
    """As `narrowgauge card-report` measures them."""
    side, elements = (64, 1 << 12) if dry else (timings.SIDE, timings.COPIED)
    found = timings.rates(lambda at: None, str(device), side, elements)
    return Floor(found["copy"], found["bf16"], found["fp8"])
