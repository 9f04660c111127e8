"""Losses of all tasks for a training loop of one's own, by the name of the task.

    loss = sum over micro-batches and ranks of sum over valid targets of -log p(target)  /  number of valid targets

The number of targets is counted over all micro-batches before the first one runs. The gradient
therefore does not depend on how a step is cut: 8 x 1, 2 x 4, 1 x 8, padded or packed.

    micro_batches = [next(batches) for _ in range(4)]
    total = count_targets(micro_batches, "causal-lm")
    for batch in micro_batches:
        step_loss(model, batch, "causal-lm", total).backward()

Labels follow transformers: a causal-lm label at position t is token t, compared with the logits at
t - 1. With several ranks, sum `count_targets` over them, and multiply the loss by the number of
ranks if gradients are averaged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from narrowgauge.data.batches import IGNORED, valid_targets
from narrowgauge.errors import DataError
from narrowgauge.train.tasks.task import task_class

if TYPE_CHECKING:
    from narrowgauge.train.loss import Batch


def count_targets(batches: Sequence[Batch], kind: str) -> int:
    """Number of valid targets in these batches, after the shift.

    kind  name of the task

    Raises DataError if there are none.
    """
    task = task_class(kind)
    total = sum(valid_targets({"labels": task.align_labels(batch["labels"])}) for batch in batches)
    if not total:
        raise DataError(
            f"step: no valid target in {len(batches)} micro-batches, every label is {IGNORED}. Check a coloured_sample of the "
            "data, and how prompts are masked.",
            code="targets.none-valid",
        )
    return total


def summed_loss(scores: Tensor, labels: Tensor, kind: str) -> Tensor:
    """Sum over the targets of the task's loss, as -log p(target), a float32 scalar.

    scores  [..., classes]; a float32 copy is made
    labels  [...], as the collator gives them
    """
    task = task_class(kind)
    return task.criterion(scores, task.align_labels(labels).to(scores.device))


def step_loss(model: Any, batch: Batch, kind: str, total: int) -> Tensor:
    """This micro-batch's part of the step's loss: nats per target, or squared error.

    total  number of targets of the whole step

    Calls a transformers model without labels, so that the model computes no loss of its own.
    """
    task = task_class(kind)
    aligned = task.align(batch, model)
    inputs: dict[str, Any] = {name: value for name, value in aligned.items() if name != "labels"}
    # Packed batches hold use_cache themselves, so the options are merged rather than passed beside.
    scores = task.scores(model(**inputs | dict(task.options)), aligned)
    return task.criterion(scores, aligned["labels"].to(scores.device)) / total


def trainer_loss(kind: str) -> Callable[..., Tensor]:
    """Loss function for `transformers.Trainer(compute_loss_func=...)`.

    Trainer passes the step's number of targets as `num_items_in_batch`.
    """

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        total = (
            count_targets([{"labels": labels}], kind)
            if num_items_in_batch is None
            else num_items_in_batch
        )
        scores = task_class(kind).scores(outputs, {"labels": labels})
        return summed_loss(scores, labels, kind) / total

    return loss
