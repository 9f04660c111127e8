"""The loss of an optimizer step: the sum over valid targets, divided by their number in the step.

    loss = sum over micro-batches and ranks of sum over valid targets of -log p(target)  /  number of valid targets

The number is counted over all micro-batches before the first one runs, so the gradient does not depend on how the step is cut:
8 x 1, 2 x 4, 1 x 8, padded or packed.

    micro_batches = [next(batches) for _ in range(4)]
    total = count_targets(micro_batches, "causal-lm")
    for batch in micro_batches:
        step_loss(model, batch, "causal-lm", total).backward()

Labels follow transformers: a causal-lm label at position t is token t, compared with the logits at t - 1. With several ranks, sum
`count_targets` over them, and multiply the loss by the number of ranks if gradients are averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from narrowgauge.data.batches import IGNORED, Batch
from narrowgauge.data.tasks import Kind
from narrowgauge.errors import DataError


def shifted_labels(labels: Tensor, kind: Kind) -> Tensor:
    """The target of each position: for causal-lm the next label, -100 at the end."""
    if kind != "causal-lm":
        return labels
    return torch.nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORED)


def count_targets(batches: Sequence[Batch], kind: Kind) -> int:
    """Number of valid targets of these micro-batches after the shift. Raises DataError if there are none."""
    total = sum(int((shifted_labels(batch["labels"], kind) != IGNORED).sum()) for batch in batches)
    if not total:
        raise DataError(
            f"step: no valid target in {len(batches)} micro-batches, every label is {IGNORED}. Check a coloured_sample of the "
            "data, and how prompts are masked."
        )
    return total


def summed_loss(logits: Tensor, labels: Tensor, kind: Kind) -> Tensor:
    """Sum of -log p(target) over the valid targets, a float32 scalar. logits [..., classes], labels [...] of the same kind.

    Holds the logits once more in float32.
    """
    return aligned_loss(logits, shifted_labels(labels, kind).to(logits.device))


def aligned_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """`summed_loss` where the logits at each position are compared with the target there."""
    return torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(), targets.reshape(-1), ignore_index=IGNORED, reduction="sum"
    )


def step_loss(model: Any, batch: Batch, kind: Kind, total: int) -> Tensor:
    """This micro-batch's share of the step's loss, in nats per target; `total` is the number of targets of the step.

    Calls a transformers model without labels, so that it does not compute a loss itself.
    """
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    if kind == "seq2seq":
        inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(labels=batch["labels"])
    if kind != "classification":
        inputs["use_cache"] = False  # type: ignore[assignment]
    return summed_loss(model(**inputs).logits, batch["labels"], kind) / total


def trainer_loss(kind: Kind) -> Callable[..., Tensor]:
    """The loss for `transformers.Trainer(compute_loss_func=...)`, which passes the step's number of targets."""

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        total = count_targets([{"labels": labels}], kind) if num_items_in_batch is None else num_items_in_batch
        return summed_loss(outputs["logits"], labels, kind) / total

    return loss
