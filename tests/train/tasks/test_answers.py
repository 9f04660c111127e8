"""Best spans (exact, against all pairs), and SQuAD's exact match and F1 (exact, counted by hand)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from narrowgauge.train.tasks import task_class
from narrowgauge.train.tasks.question_answering import (
    best_span,
    exact_match,
    f1,
    normalized,
    of_spans,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Eiffel\tTower!", "eiffel tower"),
        ("an apple, a day", "apple day"),
        ("theatre", "theatre"),  # an article is a word
        ("U.S.A.", "usa"),
        ("the", ""),
        ("état-major", "étatmajor"),
        ("20–30", "20–30"),  # a dash that is not ASCII stays
    ],
)
def test_answers_are_normalized_as_squad_does(text, expected):
    assert normalized(text) == expected


@pytest.mark.parametrize(
    ("predicted", "known", "exact", "shared"),
    [
        ("the Broncos", ["Denver Broncos", "Broncos."], 1, 1),
        ("Denver Broncos", ["Broncos"], 0, 2 / 3),  # p = 1/2, r = 1
        ("red red tile", ["red tile row"], 0, 2 / 3),  # red and tile once each: p = 2/3, r = 2/3
        ("green", ["red", "blue"], 0, 0),
        ("", [], 1, 1),
        ("red", [], 0, 0),
        ("", ["red"], 0, 0),
        ("a", ["the"], 1, 1),  # nothing is left of the only known answer: that is no answer
        (
            "row",
            ["the", "row 9"],
            0,
            2 / 3,
        ),  # the known answer of which nothing is left does not count
    ],
)
def test_the_best_known_answer_counts(predicted, known, exact, shared):
    assert exact_match(predicted, known) == exact and f1(predicted, known) == pytest.approx(
        shared, rel=1e-15
    )


def test_a_model_that_knows_every_span_answers_every_question(make):
    """Over windows of several lengths, in padded batches; some questions have no answer."""
    config = make("questions")
    task = task_class(config.task).prepare(config)
    assert task.data_facts["unanswerable"]

    def knows(batches, read):
        readings = []
        for batch in batches:
            rows, width = batch["input_ids"].shape
            scores = torch.zeros(rows, 2, width).scatter_(2, batch["labels"][:, :, None], 9.0)
            readings.append((0.0, read(batch, scores)))
        return readings

    found = task.evaluate(None, knows)
    assert (found["exact_match"], found["f1"]) == (1.0, 1.0)


def test_the_loss_of_a_guessed_span_is_that_of_its_probabilities():
    """The first token means no answer; the share of answers is spread over the others of a window."""
    has_answer, lengths = [True, True, False, True], [5, 3, 9, 2]
    given = [0.75 / 4, 0.75 / 2, 0.25, 0.75 / 1]
    found = of_spans(has_answer, lengths, unanswered=0.25)
    assert found["loss"] == pytest.approx(-np.mean(np.log(given)))
    assert found["exact_match"] == found["f1"] == 0.25


@pytest.mark.parametrize("longest", [1, 3, 50])
def test_the_best_span_is_that_of_all_pairs(longest):
    draw = np.random.default_rng(0)
    for tokens in (1, 2, 9, 20):
        scores = draw.normal(size=(2, tokens + 5)).astype(np.float32)
        inside = np.zeros(tokens + 5, bool)
        inside[3 : 3 + tokens] = True
        pairs = [
            (i, j) for i in range(3, 3 + tokens) for j in range(i, min(i + longest, 3 + tokens))
        ]
        expected = max(pairs, key=lambda pair: scores[0, pair[0]] + scores[1, pair[1]])
        found = best_span(scores, inside, longest)
        assert found is not None and (found.first, found.last) == expected
        assert found.score == float(scores[0, expected[0]] + scores[1, expected[1]])


def test_what_has_no_best_span():
    assert best_span(np.zeros((2, 4), np.float32), np.zeros(4, bool), 3) is None
    assert best_span(np.full((2, 4), np.nan, np.float32), np.ones(4, bool), 3) is None
    first = best_span(np.zeros((2, 4), np.float32), np.ones(4, bool), 3)
    assert first is not None and (first.first, first.last) == (0, 0)
