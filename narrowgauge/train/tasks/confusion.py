"""Classification metrics from a confusion matrix that is accumulated over batches.

counts[t, p]   examples of class t that were predicted as class p

accuracy = trace / total
mcc      = (trace total - sum_k true_k predicted_k) / sqrt((total^2 - sum predicted_k^2) (total^2 - sum true_k^2))
f1_k     = 2 counts[k, k] / (true_k + predicted_k)

scikit-learn serves as a test oracle only; docs/dependencies.md gives the reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge.train.tasks.task import Readings, total_of

if TYPE_CHECKING:
    from narrowgauge.train.loss import Batch


def class_scores(readings: Readings, batches: Iterator[Batch], classes: int) -> dict[str, Any]:
    """Loss and metrics of an evaluation with one class for each example."""
    confusion, examples = Confusion(classes), 0
    found = readings(batches, predicted)
    for _, (answers, labels) in found:
        examples += len(labels)
        confusion.count(answers, labels)
    return {"loss": total_of(found) / examples, "tokens": examples, **confusion.metrics()}


def predicted(batch: Batch, logits: Tensor | None) -> tuple[Tensor, Tensor]:
    """(predicted class, label) of each example, on the host. The first of equal logits wins."""
    assert logits is not None
    return logits.argmax(-1).cpu(), batch["labels"].cpu()


class Confusion:
    """Confusion matrix `counts`, int64 [classes, classes]: rows are labels, columns predictions."""

    def __init__(self, classes: int) -> None:
        self.counts = torch.zeros(classes, classes, dtype=torch.int64, device="cpu")

    def count(self, predicted: Tensor, labels: Tensor) -> None:
        """Adds a batch. Both arguments are integer tensors [rows] on the host."""
        classes = len(self.counts)
        places = labels * classes + predicted
        self.counts += torch.bincount(places, minlength=classes**2).view(classes, classes)

    def metrics(self) -> dict[str, float]:
        """Computes accuracy, mcc, f1 and, for two classes, f1_binary.

        mcc        Gorodkin's multi-class coefficient; 0 if labels or predictions have one class
        f1         unweighted mean over the classes that occur among labels or predictions
        f1_binary  F1 of the second class
        """
        # Python integers: products and squares of counts do not overflow.
        rows = self.counts.tolist()
        true, predicted = (
            [sum(row) for row in rows],
            [sum(column) for column in zip(*rows, strict=True)],
        )
        hits, total = [row[place] for place, row in enumerate(rows)], sum(true)
        right = sum(hits)
        above = right * total - sum(t * p for t, p in zip(true, predicted, strict=True))
        below = (total**2 - sum(p * p for p in predicted)) * (total**2 - sum(t * t for t in true))
        # A class that neither occurs nor is predicted has no F1 and is left out of the mean.
        f1 = [
            2 * each / (t + p) if t + p else None
            for each, t, p in zip(hits, true, predicted, strict=True)
        ]
        occurring = [value for value in f1 if value is not None]
        found = {
            "accuracy": right / total if total else 0.0,
            "mcc": above / math.sqrt(below) if below else 0.0,
            "f1": sum(occurring) / len(occurring) if occurring else 0.0,
        }
        return found | ({"f1_binary": f1[1] or 0.0} if len(f1) == 2 else {})
