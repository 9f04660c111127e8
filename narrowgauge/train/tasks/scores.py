"""Metrics as running sums: batches are added and forgotten, so that no evaluation holds its logits.

counts[t, p]   examples of class t that were taken for class p

accuracy = trace / total
mcc      = (trace total - sum_k true_k predicted_k) / sqrt((total^2 - sum predicted_k^2) (total^2 - sum true_k^2))
f1_k     = 2 counts[k, k] / (true_k + predicted_k)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Confusion:
    """counts [classes, classes] int64; rows are the truth, columns what was predicted."""

    def __init__(self, classes: int) -> None:
        self.counts = torch.zeros(classes, classes, dtype=torch.int64, device="cpu")

    def add(self, logits: Tensor, labels: Tensor) -> None:
        """logits [rows, classes], labels [rows]; the largest logit is the prediction, the first of equal ones."""
        classes = len(self.counts)
        places = labels.cpu() * classes + logits.argmax(-1).cpu()
        self.counts += torch.bincount(places, minlength=classes**2).view(classes, classes)

    def metrics(self) -> dict[str, float]:
        """As a table of names: see the top of the file.

        mcc is Gorodkin's for many classes, 0 where all is one class. f1 is the mean over the classes that occur in truth or
        prediction, f1_binary that of the second of two classes.
        """
        rows = self.counts.tolist()  # Python's integers: squares of counts do not overflow
        true, predicted = [sum(row) for row in rows], [sum(column) for column in zip(*rows, strict=True)]
        right, total = [row[place] for place, row in enumerate(rows)], sum(true)
        f1 = [2 * hits / (t + p) if t + p else None for hits, t, p in zip(right, true, predicted, strict=True)]
        occurring = [value for value in f1 if value is not None]
        found = {
            "accuracy": sum(right) / total if total else 0.0,
            "mcc": _correlation(sum(right), total, true, predicted),
            "f1": sum(occurring) / len(occurring) if occurring else 0.0,
        }
        return found | ({"f1_binary": f1[1] or 0.0} if len(f1) == 2 else {})


def _correlation(right: int, total: int, true: list[int], predicted: list[int]) -> float:
    above = right * total - sum(t * p for t, p in zip(true, predicted, strict=True))
    below = (total**2 - sum(p * p for p in predicted)) * (total**2 - sum(t * t for t in true))
    return above / math.sqrt(below) if below else 0.0


def perplexity(loss: float) -> float:
    """exp(loss); infinity where it overflows, NaN of NaN."""
    return math.exp(loss) if not loss > 700 else math.inf
