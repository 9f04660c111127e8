"""Scores of the trivial predictor: the best answer that ignores the input.

    tokens   label distribution: loss H = -sum p log p
    classes  the same; other scores are computed for the most frequent class

Tasks with other labels have their predictor in their own file.

A reference run that does not beat this predictor has learnt nothing from its inputs.
`diagnose.sensitivity` then accepts no comparison with it.

p is the label frequency in the evaluated targets themselves, so no constant answer does better on
them. On a small evaluation set the bar is too strict by about (classes - 1) / (2 targets) nats.

Cost: one pass over the evaluated labels at the start of a run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from narrowgauge.data import IGNORED
from narrowgauge.diagnose.sensitivity import FREQUENCIES
from narrowgauge.train.tasks.confusion import Confusion

Values = np.ndarray[Any, np.dtype[Any]]


def of_tokens(labels: Iterable[Values]) -> dict[str, Any]:
    """Label distribution of running text, or of target texts.

    labels  integer arrays of any shape; labels equal to IGNORED do not count
    """
    loss = entropy(counts_of(labels))
    return {
        "predictor": FREQUENCIES,
        "loss": loss,
        "perplexity": math.exp(loss),
        "bleu": 0.0,
        "chrf": 0.0,
    }


def of_classes(labels: Sequence[int], classes: int) -> dict[str, Any]:
    """Most frequent class of single-label examples, with all scores of `class_scores`."""
    found = torch.as_tensor(list(labels), dtype=torch.int64, device="cpu")
    confusion = Confusion(classes)
    # Through Confusion, so that mcc and F1 follow the same conventions as an evaluation's.
    confusion.count(torch.full_like(found, int(torch.bincount(found).argmax())), found)
    return {
        "predictor": "class frequencies",
        "loss": entropy(counts_of([found.numpy()])),
        **confusion.metrics(),
    }


def counts_of(labels: Iterable[Values]) -> Values:
    """Frequency of each label except IGNORED, float64 [largest label + 1]."""
    total = np.zeros(1)
    for each in labels:
        valid = np.asarray(each).reshape(-1)
        counts = np.bincount(valid[valid != IGNORED], minlength=len(total)).astype(np.float64)
        # bincount grows to the largest label seen; the number of classes need not be known.
        counts[: len(total)] += total
        total = counts
    return total


def entropy(counts: Values) -> float:
    """Entropy in nats of the distribution with these counts; 0 for empty counts."""
    # p log p is 0 at p = 0, but NaN in floating point.
    shares = counts[counts > 0] / max(counts.sum(), 1e-300)
    # max() turns the -0.0 of a single class into 0.0.
    return max(0.0, float(-(shares * np.log(shares)).sum()))
