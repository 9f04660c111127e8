"""The trivial predictor of a task: the best answer that ignores the input, scored on the evaluated targets.

    tokens, tags     the distribution of the labels: loss H = -sum p log p; accuracy the share of the largest
    classes          the same; the scores are those of the most frequent class
    numbers          the mean of each column: loss the variance; no correlation
    choices          the most frequent place, or a guess: the better of both
    answers          "no answer" with its frequency, the other tokens alike

A reference that does not beat it has learnt nothing of the input, and nothing can be compared with it
(`diagnose.sensitivity`). p is the frequency in the evaluated targets themselves, so no constant answer
does better there; of a small evaluation that is strict, by about (classes - 1) / (2 targets) nats.
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
    """Of running text and of texts to write. labels: whole numbers of any shape; IGNORED ones do not count."""
    loss = entropy(counts_of(labels))
    return {"predictor": FREQUENCIES, "loss": loss, "perplexity": math.exp(loss), "bleu": 0.0, "chrf": 0.0}


def of_classes(labels: Sequence[int], classes: int) -> dict[str, Any]:
    """Of one class for each example, with every score that an evaluation of classes has."""
    found = torch.as_tensor(list(labels), dtype=torch.int64, device="cpu")
    confusion = Confusion(classes)
    confusion.count(torch.full_like(found, int(torch.bincount(found).argmax())), found)
    return {"predictor": "class frequencies", "loss": entropy(counts_of([found.numpy()])), **confusion.metrics()}


def of_tags(labels: Iterable[Values]) -> dict[str, Any]:
    """Of one tag for each word. One tag for all words marks no span that is right."""
    counts = counts_of(labels)
    spans = dict.fromkeys(("f1", "precision", "recall"), 0.0)
    return {
        "predictor": "tag frequencies",
        "loss": entropy(counts),
        "accuracy": float(counts.max() / counts.sum()),
        **spans,
    }


def of_numbers(targets: Values) -> dict[str, Any]:
    """targets [examples, columns]; NaN does not count."""
    squares = (targets - np.nanmean(targets, axis=0)) ** 2
    return {"predictor": "means", "loss": float(np.nanmean(squares)), "pearson": 0.0, "spearman": 0.0}


def of_choices(labels: Sequence[int], choices: Sequence[int]) -> dict[str, Any]:
    """Of one right place for each question, and how many choices each has."""
    counts, sizes = counts_of([np.asarray(labels)]), np.asarray(choices, np.float64)
    return {
        "predictor": "places of answers",
        "loss": min(entropy(counts), float(np.log(sizes).mean())),
        "accuracy": max(float(counts.max() / counts.sum()), float((1 / sizes).mean())),
    }


def of_spans(has_answer: Sequence[bool], lengths: Sequence[int], unanswered: float) -> dict[str, Any]:
    """Of the first and the last token of an answer in each window.

    has_answer  of each window; lengths: its tokens; unanswered: the share of questions without an answer, which "no answer" gets right
    """
    share = float(np.mean(has_answer))
    others = np.maximum(np.asarray(lengths, np.float64)[np.asarray(has_answer, bool)] - 1, 1)
    inside = float(np.log(others).sum()) / len(lengths) if len(lengths) else 0.0
    loss = entropy(np.array([share, 1 - share])) + inside
    return {"predictor": "“no answer”, or any token,", "loss": loss, "exact_match": unanswered, "f1": unanswered}


def counts_of(labels: Iterable[Values]) -> Values:
    """How often each label occurs, float64; at least one of them has to count."""
    total = np.zeros(1)
    for each in labels:
        valid = np.asarray(each).reshape(-1)
        counts = np.bincount(valid[valid != IGNORED], minlength=len(total)).astype(np.float64)
        counts[: len(total)] += total
        total = counts
    return total


def entropy(counts: Values) -> float:
    """Of the distribution that counts have, nats; 0 of none."""
    shares = counts[counts > 0] / max(counts.sum(), 1e-300)
    return max(0.0, float(-(shares * np.log(shares)).sum()))
