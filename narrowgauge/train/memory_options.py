"""Applies the settings that save memory: frozen layers, checkpointing, narrow activations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from narrowgauge import memory
from narrowgauge.optim.precision import Precision
from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.loss import Batch, inputs_of
from narrowgauge.train.optimizer import planned_bytes


def apply_memory_options(
    config: TrainConfig,
    model: Any,
    precision: Precision,
    device: torch.device,
    probe: Callable[[], Batch],
    options: Mapping[str, Any],
) -> list[str]:
    """Applies the settings to the model, in place, and returns a sentence on each. Call it before the optimizer is built.

    probe  a micro-batch of the first step, the largest: a budget of checkpointing is measured on it; generators stay as they are
    """
    notes = []
    if config.freeze:
        kept = planned_bytes(config, model, precision)
        notes.append(str(memory.freeze(model, config.freeze, optimizer_bytes=kept.of)))
    if config.compress_activations:
        technique = memory.compress_activations(model)
        assert technique is not None
        notes.append(f"What blocks keep for backward is stored as {technique.cast}.")
    if config.checkpointing != "none":
        inputs = inputs_of(probe(), device, options)
        with precision.context(device.type):
            report = memory.checkpoint(
                model, config.checkpointing, batch=inputs, loss=lambda output: output.logits.sum()
            )
        notes.append(str(report))
    return notes
