"""What a run does to need less memory, and what it says of it at the start: frozen layers, checkpointing, narrow activations."""

from __future__ import annotations

from typing import Any

import torch

from narrowgauge import data, memory
from narrowgauge.optim.precision import Precision
from narrowgauge.train.config import TrainConfig


def economize(
    config: TrainConfig, model: Any, rung: Precision, device: torch.device, batches: data.CausalBatches
) -> list[str]:
    """Applies the settings to the model, in place, and returns a few words on each. Before the optimizer is built.

    A budget of checkpointing is measured on a micro-batch of the first step, whose shape all have; generators stay as they are.
    """
    words = []
    if config.freeze:
        words.append(str(memory.freeze(model, config.freeze)))
    if config.compress_activations:
        technique = memory.compress_activations(model)
        assert technique is not None
        words.append(f"What blocks keep for backward is stored as {technique.cast}.")
    if config.checkpointing != "none":
        ids = batches.batch(0, 0, config.micro_batches)["input_ids"].to(device)
        with rung.context(device.type):
            report = memory.checkpoint(
                model, config.checkpointing, batch={"input_ids": ids}, loss=lambda output: output.logits.sum()
            )
        words.append(str(report))
    return words
