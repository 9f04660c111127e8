"""Targets and losses: which tokens have a loss, and the loss of an optimizer step.

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

import torch
from torch import Tensor

from narrowgauge.data.batches import IGNORED, Batch, valid_targets
from narrowgauge.data.heads import choice_scores, span_scores
from narrowgauge.data.task import Kind
from narrowgauge.errors import DataError

if TYPE_CHECKING:
    from rich.text import Text

# Visible signs for control characters, which a terminal would execute. A line end is kept as well.
SIGNS = (
    {code: chr(0x2400 + code) for code in range(32)}
    | {code: f"\\x{code:02x}" for code in range(0x80, 0xA0)}
    | {0x7F: "␡", ord("\t"): "→\t", ord("\n"): "↵\n"}
)


def shifted_labels(labels: Tensor, kind: Kind) -> Tensor:
    """Target of each position: for causal-lm the next label, -100 at the end; else the labels."""
    if kind != "causal-lm":
        return labels
    return torch.nn.functional.pad(labels[..., 1:], (0, 1), value=IGNORED)


def count_targets(batches: Sequence[Batch], kind: Kind) -> int:
    """Number of valid targets in these batches, after the shift.

    Raises DataError if there are none.
    """
    total = sum(
        valid_targets({"labels": shifted_labels(batch["labels"], kind)}) for batch in batches
    )
    if not total:
        raise DataError(
            f"step: no valid target in {len(batches)} micro-batches, every label is {IGNORED}. Check a coloured_sample of the "
            "data, and how prompts are masked.",
            code="targets.none-valid",
        )
    return total


def summed_loss(logits: Tensor, labels: Tensor, kind: Kind) -> Tensor:
    """Sum of -log p(target), a float32 scalar; for regression the sum of squared differences.

    logits  [..., classes]; a float32 copy is made
    labels  [...], of the same kind of task
    """
    if kind == "regression":
        return squared_loss(logits, labels.to(logits.device))
    return aligned_loss(logits, shifted_labels(labels, kind).to(logits.device))


def aligned_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Sum of -log p(target), with logits and targets at the same positions."""
    # float32: a 16-bit log-softmax loses the small probabilities. reduction="sum": the caller
    # divides by the targets of the whole step.
    return torch.nn.functional.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(),
        targets.reshape(-1),
        ignore_index=IGNORED,
        reduction="sum",
    )


def squared_loss(values: Tensor, targets: Tensor) -> Tensor:
    """Sum of squared differences, a float32 scalar.

    values, targets  [rows, columns]; NaN targets do not count
    """
    counts = ~targets.isnan()
    # Replace NaN before the subtraction: masking afterwards would still give NaN gradients (0 x
    # NaN).
    difference = torch.where(counts, values.float() - targets.nan_to_num(), 0.0)
    return (difference * difference).sum()


def step_loss(model: Any, batch: Batch, kind: Kind, total: int) -> Tensor:
    """This micro-batch's part of the step's loss: nats per target, or squared error.

    total  number of targets of the whole step

    Calls a transformers model without labels, so that the model computes no loss of its own.
    """
    inputs = {name: value for name, value in batch.items() if name != "labels"}
    if kind == "seq2seq":
        inputs["decoder_input_ids"] = model.prepare_decoder_input_ids_from_labels(
            labels=batch["labels"]
        )
    if kind in ("causal-lm", "seq2seq"):
        # A KV cache would only cost memory in training.
        inputs["use_cache"] = False  # type: ignore[assignment]
    scores = scores_of(model(**inputs), batch["labels"], kind, batch.get("attention_mask"))
    return summed_loss(scores, batch["labels"], kind) / total


def scores_of(output: Any, labels: Tensor, kind: Kind, mask: Tensor | None = None) -> Tensor:
    """Scores of a model's output that the labels index (see `heads`).

    mask  0 on padding; used for question answering
    """
    if kind == "question-answering":
        return span_scores(output, mask)
    logits: Tensor = output["logits"]
    return choice_scores(logits, labels) if kind == "multiple-choice" else logits


def trainer_loss(kind: Kind) -> Callable[..., Tensor]:
    """Loss function for `transformers.Trainer(compute_loss_func=...)`.

    Trainer passes the step's number of targets as `num_items_in_batch`.
    """

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        total = (
            count_targets([{"labels": labels}], kind)
            if num_items_in_batch is None
            else num_items_in_batch
        )
        return summed_loss(scores_of(outputs, labels, kind), labels, kind) / total

    return loss


def coloured_sample(
    tokenizer: Any, input_ids: Sequence[int], labels: Sequence[int] | None, *, tokens: int = 200
) -> Text:
    """The first `tokens` tokens as rich Text: green with a loss, dim without, reversed if special.

    labels  as in an `Examples` item; None: no token has a loss

    Bars separate tokens. Double brackets mark tokens with a loss in logs without colours. A
    byte-level token that is part of a character shows as U+FFFD. rich comes with
    narrowgauge[train].
    """
    from rich.text import Text

    special = set(tokenizer.all_special_ids)
    text, learning = Text(), False
    shown = list(input_ids[:tokens])
    for place, id in enumerate(shown):
        learnt = labels is not None and int(labels[place]) != IGNORED
        if learnt != learning:
            text.append("⟦" if learnt else "⟧", "bold")
        elif place:
            text.append("|", "dim")
        style = ("bold green" if learnt else "dim") + (" reverse" if int(id) in special else "")
        text.append(tokenizer.decode([int(id)]).translate(SIGNS), style)
        learning = learnt
    if text.plain.endswith("\n"):
        text.right_crop(1)  # the caller's print adds a line end
    if learning:
        text.append("⟧", "bold")
    if len(shown) < len(input_ids):
        text.append(f" ... {len(input_ids) - len(shown)} more", "dim")
    return text
