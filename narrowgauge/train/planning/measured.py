"""Measures two real steps on this machine, with random weights and tokens, beside the plan."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from narrowgauge.errors import OutOfMemoryError
from narrowgauge.ops.registry import device_facts
from narrowgauge.plan.allocations import most_allocated
from narrowgauge.train.config import parallel_syntax
from narrowgauge.train.device import chosen_device, device_name
from narrowgauge.train.planning.counts import Counts, generators_kept
from narrowgauge.train.planning.steps import Source

if TYPE_CHECKING:
    from narrowgauge.plan.forecast import Forecast
    from narrowgauge.train.config.settings import TrainConfig


def measured(config: TrainConfig) -> dict[str, Any]:
    """Measures one process.

    Returns `device`, `allocated_bytes`, `planned_bytes`, and `error`, the relative error of the
    plan.
    """
    device = chosen_device(config.device)
    copies = parallel_syntax.named(config.parallel)
    source = Source.of(config, copies.data)
    # full=True: an extrapolation error would be mistaken for an error of the trace.
    planned = second_step(Counts(device_facts(device.type, device.index), full=True).whole(source))
    try:
        with generators_kept():
            found = most_allocated(source.builder(place=device, real=True)(), device)
    except RuntimeError as error:
        # The CPU allocator raises a plain RuntimeError.
        if isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error):
            raise OutOfMemoryError(
                f"measure: {str(error).splitlines()[0]} Planned are {planned / 2**30:.2f} GiB. Leave --measure out, or plan a smaller run.",
                code="memory.measure",
            ) from error
        raise
    return {
        "device": device_name(device), "allocated_bytes": found, "planned_bytes": planned, "error": planned / found - 1,
    }  # fmt: skip


def second_step(found: Forecast) -> int:
    """Peak bytes of the second step, the first with optimizer states."""
    return max(
        each.allocated if found.on_gpu else each.alive for each in found.moments if each.step == 2
    )
