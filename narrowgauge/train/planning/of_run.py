"""The plan of a run that begins, beside what it really takes: in its first and last lines and in run.json.

On a GPU both are bytes of torch's allocator. A CPU's allocator keeps no count that costs nothing, so what a run on a CPU really takes
is known of its process alone, interpreter and libraries included; it is planned only if the setting `plan` asks for it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from narrowgauge.errors import NarrowgaugeError, OutOfMemoryError
from narrowgauge.ops.registry import device_facts
from narrowgauge.ops.timing.cards import CONTEXT
from narrowgauge.plan.text import gib
from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.loss import Batch
from narrowgauge.train.planning.counts import Counts
from narrowgauge.train.planning.shapes import Shape


def planned(config: TrainConfig, device: torch.device, probe: Batch) -> dict[str, Any]:
    """For run.json; {} where nobody asked. Whatever goes wrong in it, the run goes on.

    probe  the largest micro-batch of the first step
    ->     allocated_bytes, allocated_error, reserved_bytes, reserved_error, usable_bytes, peak, counted, with a guard (whose steps are
           among them) without_guard_bytes; or the `reason` why not
    """
    if config.plan == "never" or (config.plan == "auto" and device.type != "cuda"):
        return {}
    try:
        if "pixel_values" in probe:
            rows, width = len(probe["labels"]), 1  # whose width the model knows
        else:
            *outer, width = probe["input_ids"].shape
            rows = math.prod(outer)
        counts, shape = Counts(device_facts(device.type, device.index)), Shape(rows, width)
        found = counts.of(config, shape).as_dict()
        alone = {"without_guard_bytes": counts.of(replace(config, guard=""), shape).allocated} if config.guard else {}
    except NarrowgaugeError as error:
        return {"reason": str(error)}
    except Exception as error:  # of torch, transformers or a model: a run that would train must not end here
        return {"reason": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no details'}"}
    keys = ("allocated_bytes", "allocated_error", "reserved_bytes", "reserved_error", "peak", "counted")
    usable = torch.cuda.get_device_properties(device).total_memory - CONTEXT if device.type == "cuda" else 0
    return {**{key: found[key] for key in keys}, "usable_bytes": usable, **alone}


def refuse_guard(config: TrainConfig, known: dict[str, Any]) -> None:
    """OutOfMemoryError where the run fits the device, and a step of its guard in BF16 does not."""
    usable, alone = known.get("usable_bytes", 0), known.get("without_guard_bytes", 0)
    if usable and alone and alone <= usable < known["allocated_bytes"]:
        raise OutOfMemoryError(
            f"guard = {config.guard!r}: a step of a check in BF16 needs {gib(known['allocated_bytes'])} on the device, of which "
            f"{gib(usable)} can be used; one of the recipe needs {gib(alone)}. Raise micro_batches, or remove guard."
        )


def first_line(known: dict[str, Any]) -> str:
    """For the console before the first step, or ''."""
    if not known:
        return ""
    if "reason" in known:
        return f"Memory is not planned: {known['reason']}"
    size, usable = known["allocated_bytes"], known["usable_bytes"]
    room = f" of {gib(usable)} that can be used" if usable else ""
    line = f"Planned: {gib(size)}{room}, ± {100 * known['allocated_error']:.1f} %, at most in {known['peak']['phase']}."
    if usable and size > usable:
        line += " That does not fit: narrowgauge plan says what would."
    return line


def last_line(known: dict[str, Any], peak: int, device: torch.device) -> str:
    """For the console after the last step, or ''; peak: as `train.device.peak_bytes`, 0 if it is not this run's."""
    if "allocated_bytes" not in known or not peak:
        return ""
    size = known["allocated_bytes"]
    if device.type != "cuda":
        return f"Planned: {gib(size)} of tensors; the process held {gib(peak)} at most, interpreter and libraries among them."
    return f"Allocated: {gib(peak)} at most, planned {gib(size)}, {100 * (size / peak - 1):+.1f} %."
