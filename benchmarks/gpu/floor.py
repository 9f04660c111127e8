"""The card's own rates, measured before anything else: what it copies, and multiplies in BF16 and FP8 without any cast.

copy    bytes read plus bytes written per second by Tensor.copy_, 1 GiB
bf16    8192 x 8192 x 8192 of random numbers by torch.mm
fp8     the same by torch._scaled_mm, E4M3, one scale per tensor, with fast accumulation; None where there are no such units
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks import harness

REPEATS = 10


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
    side, elements = (64, 1 << 12) if dry else (8192, 1 << 29)
    source = torch.randn(elements // 2, device=device)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / _seconds(lambda: target.copy_(source), device, dry)
    left, right = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    flop = 2 * side**3
    bf16 = flop / _seconds(lambda: torch.mm(left, right.T), device, dry)
    return Floor(copy, bf16, _fp8(left, right, flop, device, dry))


def _fp8(
    left: torch.Tensor, right: torch.Tensor, flop: int, device: torch.device, dry: bool
) -> float | None:
    a, b = left.to(torch.float8_e4m3fn), right.to(torch.float8_e4m3fn)
    one = torch.ones((), device=device)

    def product() -> torch.Tensor:
        return torch._scaled_mm(a, b.T, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

    try:
        product()
    except (RuntimeError, NotImplementedError):
        return None
    return flop / _seconds(product, device, dry)


def _seconds(case: Callable[[], object], device: torch.device, dry: bool) -> float:
    clock = harness.cuda_clock if device.type == "cuda" else harness.host_clock
    case()
    return statistics.median(clock(case, 1 if dry else 5) for _ in range(2 if dry else REPEATS))
