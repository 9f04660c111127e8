"""Which evaluation is the best: by the metric, of equal ones by the loss, of equal ones the first; across a restart too."""

from __future__ import annotations

import math

import pytest
import torch

from narrowgauge.train.checkpoint.store import Best

WEIGHTS = {"w": torch.zeros(1)}


@pytest.mark.parametrize(
    ("metric", "found", "best"),
    [
        ("loss", [0.5, 0.4, 0.4, 0.6], 2),
        ("mcc", [(0.0, 0.5), (0.0, 0.4), (0.0, 0.45)], 2),
        ("mcc", [(0.3, 0.5), (0.2, 0.1), (0.3, 0.5)], 1),
        ("mcc", [(math.nan, 0.1), (0.0, 0.5), (-0.1, 0.4)], 2),
        ("mcc", [(0.0, math.nan), (0.0, math.nan)], 1),
    ],
)
def test_the_best_evaluation(tmp_path, metric, found, best):
    kept = Best(tmp_path, metric)
    for step, each in enumerate(found, start=1):
        values = {"loss": each} if metric == "loss" else {"mcc": each[0], "loss": each[1]}
        again = Best(tmp_path, metric)  # each evaluation in a run that was resumed
        assert again.restore(kept.facts()) == ""
        again.take(step, values, WEIGHTS)
        kept = again
    assert kept.step == best


def test_what_an_older_checkpoint_says_of_the_best_is_taken_up(tmp_path):
    """Without its loss: of equal evaluations the first stays."""
    first = Best(tmp_path, "mcc")
    first.take(1, {"mcc": 0.0, "loss": 0.5}, WEIGHTS)
    again = Best(tmp_path, "mcc")
    assert again.restore({"step": 1, "value": 0.0}) == ""
    assert not again.take(2, {"mcc": 0.0, "loss": 0.4}, WEIGHTS) and again.take(
        3, {"mcc": 0.1, "loss": 0.6}, WEIGHTS
    )
