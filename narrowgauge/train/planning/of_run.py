"""Planned memory of a starting run beside its measured peak, on the console and in run.json.

On a GPU both are bytes of torch's allocator. On a CPU no cheap counter exists, so the measured
figure is the whole process's memory, interpreter and libraries included. A CPU run is planned only
if the setting `plan` asks for it.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from narrowgauge.errors import NarrowgaugeError, OutOfMemoryError
from narrowgauge.ops.registry import device_facts
from narrowgauge.ops.timing.cards import CONTEXT
from narrowgauge.plan.text import gib
from narrowgauge.train.planning.counts import Counts
from narrowgauge.train.tasks import Shape

if TYPE_CHECKING:
    from narrowgauge.train.config.settings import TrainConfig
    from narrowgauge.train.loss import Batch


def planned(config: TrainConfig, device: torch.device, probe: Batch) -> dict[str, Any]:
    """Plan for run.json; {} if planning is off. A failed plan never ends the run.

    probe  largest micro-batch of the first step
    ->     allocated_bytes, allocated_error, reserved_bytes, reserved_error, usable_bytes, peak,
           counted; with a guard also without_guard_bytes, the peak without its probes;
           or `reason` if the plan failed
    """
    if config.plan == "never" or (config.plan == "auto" and device.type != "cuda"):
        return {}
    try:
        if "pixel_values" in probe:
            rows, width = len(probe["labels"]), 1  # the model's image size determines the width
        else:
            *outer, width = probe["input_ids"].shape
            rows = math.prod(outer)
        counts, shape = Counts(device_facts(device.type, device.index)), Shape(rows, width)
        found = counts.of(config, shape).as_dict()
        alone = (
            {"without_guard_bytes": counts.of(replace(config, guard=""), shape).allocated}
            if config.guard
            else {}
        )
    except NarrowgaugeError as error:
        return {"reason": str(error)}
    # Any error of torch, transformers or the model: a run that would train must not end here.
    except Exception as error:
        return {
            "reason": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no details'}"
        }
    keys = (
        "allocated_bytes",
        "allocated_error",
        "reserved_bytes",
        "reserved_error",
        "peak",
        "counted",
    )
    # CONTEXT: the CUDA context takes memory that the allocator never sees.
    usable = (
        torch.cuda.get_device_properties(device).total_memory - CONTEXT
        if device.type == "cuda"
        else 0
    )
    return {**{key: found[key] for key in keys}, "usable_bytes": usable, **alone}


def refuse_guard(config: TrainConfig, known: dict[str, Any]) -> None:
    """Raises OutOfMemoryError if the run fits the device but its guard's BF16 step does not."""
    usable, alone = known.get("usable_bytes", 0), known.get("without_guard_bytes", 0)
    if usable and alone and alone <= usable < known["allocated_bytes"]:
        raise OutOfMemoryError(
            f"guard = {config.guard!r}: a step of a check in BF16 needs {gib(known['allocated_bytes'])} on the device, of which "
            f"{gib(usable)} can be used; one of the recipe needs {gib(alone)}. Raise batch.micro_batches, or remove guard.",
            code="memory.guard-check",
        )


def first_line(known: dict[str, Any]) -> str:
    """Console line before the first step, or ''."""
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
    """Console line after the last step, or ''.

    peak  as `train.device.peak_bytes`; 0 if the peak is not this run's
    """
    if "allocated_bytes" not in known or not peak:
        return ""
    size = known["allocated_bytes"]
    if device.type != "cuda":
        return f"Planned: {gib(size)} of tensors; the process held {gib(peak)} at most, interpreter and libraries among them."
    return f"Allocated: {gib(peak)} at most, planned {gib(size)}, {100 * (size / peak - 1):+.1f} %."
