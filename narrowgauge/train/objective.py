"""The loss of an optimizer step: nats per valid target token, over all of its micro-batches together.

    loss = sum over valid targets of -log p(target) / number of valid targets in the step

Each micro-batch divides by the step's count, not by its own, so the gradient does not depend on how a batch is cut.
"""

from __future__ import annotations

from typing import Any

import torch
from narrowgauge.data import IGNORED, valid_targets
from torch import Tensor

from narrowgauge.errors import DataError

Batch = dict[str, Tensor]


def count_targets(batches: list[Batch], step: int) -> int:
    """Valid targets of a step. Raises DataError if there are none: a mean over nothing is NaN."""
    total = sum(valid_targets(batch) for batch in batches)
    if total == 0:
        raise DataError(f"step {step}: the batch has no valid target, every label is {IGNORED}. Look at the data.")
    return total


def summed_loss(model: Any, batch: Batch, device: torch.device) -> Tensor:
    """Sum of -log p over the valid targets of one micro-batch, float32 scalar. Holds the logits once more in float32."""
    ids, labels = batch["input_ids"].to(device), batch["labels"].to(device)
    logits = model(input_ids=ids, use_cache=False).logits
    return torch.nn.functional.cross_entropy(
        logits.flatten(0, -2).float(), labels.flatten(), ignore_index=IGNORED, reduction="sum"
    )


def learning_rate(step: int, *, steps: int, warmup_steps: int, peak: float, lowest: float) -> float:
    """Linear warm-up over `warmup_steps`, then a half cosine down to `lowest` at the last step; step counts from 1."""
    if step <= warmup_steps:
        return peak * step / warmup_steps
    done = (step - warmup_steps) / max(1, steps - warmup_steps)
    cosine = 0.5 * (1 + torch.cos(torch.tensor(torch.pi * min(done, 1.0), dtype=torch.float64)).item())
    return lowest + (peak - lowest) * cosine
