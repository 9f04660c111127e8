"""Losses of answers and of choices against those written out for each row (exact sums, float32), and their batches."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from narrowgauge.data import Collator
from narrowgauge.data.batches import IGNORED
from narrowgauge.errors import ConfigError
from narrowgauge.train.tasks.losses import count_targets, step_loss
from narrowgauge.train.tasks.multiple_choice import choice_scores
from narrowgauge.train.tasks.question_answering import span_scores
from tests.raising import raises


def ids(size):
    return np.arange(1, size + 1)


def test_choices_become_rows_of_one_width_and_the_label_a_row():
    examples = [
        {"input_ids": [ids(3), ids(5)], "labels": 1},
        {"input_ids": [ids(2), ids(2), ids(4)], "labels": 2},
    ]
    batch = Collator(pad_id=0, multiple=8, tokens_multiple=8)(examples)
    assert batch["input_ids"].shape == (5, 1, 8) == batch["attention_mask"].shape
    assert batch["attention_mask"].sum(-1).flatten().tolist() == [3, 5, 2, 2, 4]
    assert batch["labels"].tolist() == [1, IGNORED, 4, IGNORED, IGNORED]
    assert count_targets([batch], "multiple-choice") == 2


def test_the_loss_of_choices_is_that_of_each_question():
    torch.manual_seed(0)
    logits = torch.randn(5, 1, requires_grad=True)
    labels = torch.tensor([1, IGNORED, 4, IGNORED, IGNORED])

    def model(**inputs):
        return {"logits": logits}

    loss = step_loss(
        model, {"input_ids": torch.ones(5, 1, 8), "labels": labels}, "multiple-choice", 2
    )
    flat = logits[:, 0]
    apart = -(flat[:2].log_softmax(0)[1] + flat[2:].log_softmax(0)[2]) / 2
    assert loss.item() == pytest.approx(apart.item(), rel=1e-6)
    found, expected = (torch.autograd.grad(each, logits)[0] for each in (loss, apart))
    assert torch.allclose(found, expected, atol=1e-7)


def test_a_batch_with_nothing_to_learn_has_the_loss_and_the_gradient_zero():
    logits = torch.randn(3, 1, requires_grad=True)
    labels = torch.full((3,), IGNORED)
    loss = torch.nn.functional.cross_entropy(
        choice_scores(logits, labels), labels, ignore_index=IGNORED, reduction="sum"
    )
    loss.backward()
    assert loss.item() == 0 and not logits.grad.any()


def test_padding_has_no_share_in_the_loss_of_answers():
    torch.manual_seed(0)
    starts, ends = torch.randn(2, 2, 4)

    def loss(width):
        wide = {"start_logits": pad(starts, width), "end_logits": pad(ends, width)}
        mask = (torch.arange(width) < 4).long().expand(2, width)
        batch = {"attention_mask": mask, "labels": torch.tensor([[1, 2], [0, 0]])}
        return step_loss(
            lambda **inputs: SimpleNamespace(**wide), batch, "question-answering", 4
        ).item()

    def pad(scores, width):
        return torch.nn.functional.pad(scores, (0, width - 4), value=7.0)

    apart = (
        -(starts.log_softmax(-1)[[0, 1], [1, 0]].sum() + ends.log_softmax(-1)[[0, 1], [2, 0]].sum())
        / 4
    )
    assert loss(4) == pytest.approx(apart.item(), rel=1e-6) and loss(16) == pytest.approx(
        loss(4), rel=1e-6
    )
    assert span_scores(SimpleNamespace(start_logits=starts, end_logits=ends)).shape == (2, 2, 4)


def test_positions_of_answers_are_labels_of_their_own_even_if_a_window_has_two_tokens():
    batch = Collator(pad_id=0)(
        [{"input_ids": ids(2), "labels": (0, 1)}, {"input_ids": ids(2), "labels": (1, 1)}]
    )
    assert batch["labels"].tolist() == [[0, 1], [1, 1]]


def test_labels_that_are_not_shifted_keep_the_first_of_a_packed_document():
    rows = [[{"input_ids": ids(3), "labels": ids(3)}, {"input_ids": ids(2), "labels": ids(2)}]]
    options = {"pad_id": 0, "multiple": 8, "tokens_multiple": 8}
    kept = Collator(**options, causal=False, shifted=False)(rows)["labels"]
    assert kept.tolist() == [[1, 2, 3, 1, 2, IGNORED, IGNORED, IGNORED]]
    assert Collator(**options)(rows)["labels"].tolist() == [
        [IGNORED, 2, 3, IGNORED, 2, IGNORED, IGNORED, IGNORED]
    ]
    with raises(ConfigError, "collator.labels"):
        Collator(**options)([[{"input_ids": ids(3), "labels": np.array([0, 1])}]])
