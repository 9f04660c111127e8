"""The policy for weight codes: cached for an optimizer step, or recast in backward. Same results.

recast   nothing is cached: each micro-batch casts a weight twice, in forward and in backward
step     codes of w and w.T are cached for the step, 2 bytes per weight for 8-bit formats, so
         further micro-batches cast nothing. Compiled code casts both in forward with one read and
         saves the codes of w.T for backward, one byte per weight: each micro-batch casts
"""

from __future__ import annotations

from typing import Literal

WeightCodes = Literal["auto", "recast", "step"]


def chosen(
    asked: WeightCodes,
    device_type: str,
    micro_batches: int = 1,
    step_fits: bool | None = None,
    compiled: bool = False,
) -> Literal["recast", "step"]:
    """Resolve "auto" for a device. Other values are returned as they are.

    micro_batches  micro-batches of a step
    step_fits      True if a plan found memory for the codes of all weights; None: unknown
    compiled       True for compiled code, where "auto" means "step"

    A CPU caches: emulated casts take longer than a GEMM there, and memory is not the bottleneck.
    """
    if asked != "auto":
        return asked
    keeps = device_type == "cpu" or compiled or (micro_batches > 1 and step_fits)
    return "step" if keeps else "recast"
