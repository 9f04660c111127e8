"""Whether the codes of a weight are kept for an optimizer step or made again in backward: decided here alone, the same bits either way.

recast   nothing is kept: a micro-batch casts a weight twice, once for forward and once for backward
step     both orientations are kept for the step, 2 bytes per weight of 8-bit formats: further micro-batches cast nothing
         compiled code casts both in forward by one read, and keeps the second for backward, a byte per weight: each micro-batch casts
"""

from __future__ import annotations

from typing import Literal

WeightCodes = Literal["auto", "recast", "step"]


def chosen(
    asked: WeightCodes, device_type: str, micro_batches: int = 1, step_fits: bool | None = None, compiled: bool = False
) -> Literal["recast", "step"]:
    """What "auto" is on a device, for a step of so many micro-batches; what else was asked for is taken as it is.

    step_fits  whether the codes of all weights fit beside the rest of the step, by a plan; None: nobody has counted

    compiled   whether compiled code asks, which "auto" lets keep them

    A CPU keeps them: an emulated cast takes longer than a product there, and memory is not what it lacks.
    """
    if asked != "auto":
        return asked
    keeps = device_type == "cpu" or compiled or (micro_batches > 1 and step_fits)
    return "step" if keeps else "recast"
