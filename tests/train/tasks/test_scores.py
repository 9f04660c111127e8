"""Metrics of a streamed confusion matrix (exact counts; floats against scikit-learn within rounding)."""

from __future__ import annotations

import math

import pytest
import torch

from narrowgauge.train.tasks.confusion import Confusion, predicted
from narrowgauge.train.tasks.table import perplexity


def streamed(truth, predicted, classes, rows):
    confusion = Confusion(classes)
    for start in range(0, len(truth), rows):
        confusion.count(predicted[start : start + rows], truth[start : start + rows])
    return confusion


@pytest.mark.parametrize("classes", [2, 3, 7])
def test_metrics_are_those_of_scikit_learn(classes):
    metrics = pytest.importorskip("sklearn.metrics")
    draw = torch.Generator().manual_seed(classes)
    truth = torch.randint(classes, (101,), generator=draw)
    predicted = torch.where(
        torch.rand(101, generator=draw) < 0.6, truth, torch.randint(classes, (101,), generator=draw)
    )
    found = streamed(truth, predicted, classes, rows=8).metrics()
    expected = {
        "accuracy": metrics.accuracy_score(truth, predicted),
        "mcc": metrics.matthews_corrcoef(truth, predicted),
        "f1": metrics.f1_score(truth, predicted, average="macro"),
    }
    if classes == 2:
        expected["f1_binary"] = metrics.f1_score(truth, predicted)
    assert found == pytest.approx(
        expected, rel=1e-12
    )  # float64 on both sides, a few roundings each


def test_batches_do_not_matter():
    truth, predicted = torch.tensor([0, 1, 2, 2, 1, 0, 2]), torch.tensor([0, 2, 2, 2, 1, 1, 0])
    assert torch.equal(
        streamed(truth, predicted, 3, 1).counts, streamed(truth, predicted, 3, 7).counts
    )
    assert streamed(truth, predicted, 3, 2).counts.tolist() == [[1, 1, 0], [0, 1, 1], [1, 0, 2]]


def test_degenerate_evaluations_give_numbers():
    one_class = streamed(
        torch.zeros(5, dtype=torch.long), torch.zeros(5, dtype=torch.long), 2, 5
    ).metrics()
    # The class that never occurs is left out.
    assert one_class == {"accuracy": 1.0, "mcc": 0.0, "f1": 1.0, "f1_binary": 0.0}
    assert set(Confusion(2).metrics().values()) == {0.0}


def test_squares_of_large_counts_do_not_overflow():
    confusion = Confusion(2)
    confusion.counts = torch.tensor([[3 * 10**9, 0], [0, 10**9]])
    assert confusion.metrics()["mcc"] == 1.0


def test_perplexity_of_any_loss():
    assert perplexity(0.0) == 1.0 and perplexity(1e4) == math.inf
    assert math.isnan(perplexity(math.nan)) and perplexity(math.inf) == math.inf


def test_the_predicted_class_is_the_first_of_the_largest_logits_of_each_example():
    logits = torch.tensor([[0.0, 2.0, 2.0], [5.0, 1.0, 9.0]])
    found, labels = predicted({"labels": torch.tensor([1, 0])}, logits)
    assert found.tolist() == [1, 2] and labels.tolist() == [1, 0]
