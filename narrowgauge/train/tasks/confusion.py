"""The metrics of classes, from counts of what was taken for what, streamed over batches.

counts[t, p]   examples of class t that were taken for class p

accuracy = trace / total
mcc      = (trace total - sum_k true_k predicted_k) / sqrt((total^2 - sum predicted_k^2) (total^2 - sum true_k^2))
f1_k     = 2 counts[k, k] / (true_k + predicted_k)

docs/dependencies.md says why scikit-learn, with which tests compare, does not compute them.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from narrowgauge.train.loss import Batch
from narrowgauge.train.tasks.task import Readings, total_of


def class_scores(readings: Readings, batches: Iterator[Batch], classes: int) -> dict[str, Any]:
    """Loss and metrics of an evaluation, of one class for each example."""
    confusion, examples = Confusion(classes), 0
    found = readings(batches, predicted)
    for _, (answers, labels) in found:
        examples += len(labels)
        confusion.count(answers, labels)
    return {"loss": total_of(found) / examples, "tokens": examples, **confusion.metrics()}


def predicted(batch: Batch, logits: Tensor | None) -> tuple[Tensor, Tensor]:
    """The class of the largest logit of each example, the first of equal ones, and the labels; on the host."""
    assert logits is not None
    return logits.argmax(-1).cpu(), batch["labels"].cpu()


class Confusion:
    """counts [classes, classes] int64; rows are the truth, columns what was predicted. Batches are added and forgotten."""

    def __init__(self, classes: int) -> None:
        self.counts = torch.zeros(classes, classes, dtype=torch.int64, device="cpu")

    def count(self, predicted: Tensor, labels: Tensor) -> None:
        """[rows] each, whole numbers on the host."""
        classes = len(self.counts)
        places = labels * classes + predicted
        self.counts += torch.bincount(places, minlength=classes**2).view(classes, classes)

    def metrics(self) -> dict[str, float]:
        """As a table of names: see the top of the file.

        mcc is Gorodkin's for many classes, 0 where all is one class. f1 is the mean over the classes that occur in truth or
        prediction, f1_binary that of the second of two classes.
        """
        rows = self.counts.tolist()  # Python's integers: squares of counts do not overflow
        true, predicted = [sum(row) for row in rows], [sum(column) for column in zip(*rows, strict=True)]
        hits, total = [row[place] for place, row in enumerate(rows)], sum(true)
        right = sum(hits)
        above = right * total - sum(t * p for t, p in zip(true, predicted, strict=True))
        below = (total**2 - sum(p * p for p in predicted)) * (total**2 - sum(t * t for t in true))
        f1 = [2 * each / (t + p) if t + p else None for each, t, p in zip(hits, true, predicted, strict=True)]
        occurring = [value for value in f1 if value is not None]
        found = {
            "accuracy": right / total if total else 0.0,
            "mcc": above / math.sqrt(below) if below else 0.0,
            "f1": sum(occurring) / len(occurring) if occurring else 0.0,
        }
        return found | ({"f1_binary": f1[1] or 0.0} if len(f1) == 2 else {})
