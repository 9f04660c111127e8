"""The trivial predictor of each task: what a model that ignores its input scores, by the task's own evaluation (exact)."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
import torch

from narrowgauge.data import IGNORED
from narrowgauge.train.tasks import task_class, trivial
from narrowgauge.train.tasks.regression import numbers_of


def constant(batches, read, compute=None):
    """Readings of a model with the same logits everywhere: the logarithms of how often each label occurs."""
    found = list(batches)
    labels = torch.cat([batch["labels"].flatten() for batch in found])
    counts = torch.bincount(labels[labels != IGNORED]).double()
    logits = (counts / counts.sum()).log()
    readings = []
    for batch in found:
        given = logits.expand(*batch["labels"].shape, len(logits))
        valid = batch["labels"][batch["labels"] != IGNORED]
        readings.append((float(-logits[valid].sum()), read(batch, given)))
    return readings


@pytest.mark.parametrize("job", ["classification", "pairs of a decoder", "tags"])
def test_a_model_of_frequencies_scores_what_is_recorded(make, job):
    """And no metric of the evaluation is left out."""
    config = make(job)
    task = task_class(config.task).prepare(config)
    recorded = task.trivial()
    scored = task.evaluate(None, constant)
    del scored["tokens"]
    assert recorded.pop("predictor") and recorded.keys() >= scored.keys()
    assert {key: recorded[key] for key in scored} == pytest.approx(scored, rel=1e-12)


@pytest.mark.parametrize("job", ["completion", "chat", "t5"])
def test_texts_to_write_have_the_entropy_of_their_targets(make, job):
    config = make(job)
    task = task_class(config.task).prepare(config)
    places = slice(1, None) if config.task == "causal-lm" else slice(None)
    counts = Counter(
        int(label)
        for example in task.evaluation_set
        for label in example["labels"][places]
        if label != IGNORED
    )
    total = sum(counts.values())
    assert task.trivial()["loss"] == pytest.approx(
        -sum(n / total * math.log(n / total) for n in counts.values())
    )


def test_the_mean_of_numbers_has_their_variance_as_loss(make):
    config = make("regression")
    task = task_class(config.task).prepare(config)
    numbers = numbers_of(task.evaluation_set)
    assert task.trivial()["loss"] == pytest.approx(np.mean((numbers - numbers.mean(0)) ** 2))
    assert task.trivial()["pearson"] == task.trivial()["spearman"] == 0.0


@pytest.mark.parametrize("job", ["questions", "choices"])
def test_answers_and_choices_are_as_likely_as_a_guess_or_more(make, job):
    config = make(job)
    task = task_class(config.task).prepare(config)
    found = task.trivial()
    assert 0 < found["loss"] < math.inf and all(
        0 <= value <= 1 for key, value in found.items() if key not in ("predictor", "loss")
    )


def test_no_constant_answer_beats_it():
    """Of 500 random distributions the loss is never below that of the counts themselves."""
    draw = np.random.default_rng(0)
    labels = draw.integers(0, 7, 200)
    counts = np.bincount(labels, minlength=7)
    best = trivial.of_tokens([labels])["loss"]
    for shares in draw.dirichlet(np.ones(7), 500):
        assert best <= -(counts / counts.sum() * np.log(shares)).sum() + 1e-12
    assert trivial.of_tokens([np.full(9, 3)])["loss"] == 0.0
