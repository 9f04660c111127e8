"""Spans of tags as conlleval reads them, and their precision, recall and F1 (exact, counted by hand)."""

from __future__ import annotations

import pytest

from narrowgauge.train.tasks.tagging import metrics, spans_in

TAGS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]


@pytest.mark.parametrize(
    ("tags", "spans"),
    [
        ("", []),
        ("O O", []),
        ("B-PER I-PER O", [(0, 2, "PER")]),
        ("B-PER B-PER", [(0, 1, "PER"), (1, 2, "PER")]),
        ("I-PER I-PER", [(0, 2, "PER")]),  # of a prediction: it begins without B
        ("O I-LOC B-LOC", [(1, 2, "LOC"), (2, 3, "LOC")]),
        ("B-PER I-LOC I-LOC", [(0, 1, "PER"), (1, 3, "LOC")]),  # another type begins another span
        ("B-PER O I-PER", [(0, 1, "PER"), (2, 3, "PER")]),
        ("O B-LOC", [(1, 2, "LOC")]),
    ],
)
def test_spans_of_any_sequence(tags, spans):
    assert spans_in(tags.split()) == set(spans)


def numbers(tags: str) -> list[int]:
    return [TAGS.index(tag) for tag in tags.split()]


# predicted, known -> right spans, found, there, right words, words
COUNTED = [
    ("B-PER I-PER O B-LOC", "B-PER I-PER O B-LOC", (2, 2, 2, 4, 4)),
    ("B-PER O O B-LOC", "B-PER I-PER O B-LOC", (1, 2, 2, 3, 4)),  # too short a span is wrong
    ("B-PER I-PER I-PER O", "B-PER I-PER O O", (0, 1, 1, 3, 4)),  # so is one too long
    ("B-LOC I-LOC O O", "B-PER I-PER O O", (0, 1, 1, 2, 4)),  # and one of another type
    (
        "I-PER I-PER O O",
        "B-PER I-PER O O",
        (1, 1, 1, 3, 4),
    ),  # right without its B, though a word's tag is wrong
    ("B-PER B-PER O O", "B-PER I-PER O O", (0, 2, 1, 3, 4)),
    ("O O O", "O O O", (0, 0, 0, 3, 3)),
    ("B-LOC O O", "O O O", (0, 1, 0, 2, 3)),
    ("O O O", "O B-LOC I-LOC", (0, 0, 1, 1, 3)),
]


@pytest.mark.parametrize(("predicted", "known", "counts"), COUNTED)
def test_metrics_of_a_sentence_are_those_counted_by_hand(predicted, known, counts):
    found = metrics([(numbers(predicted), numbers(known))], TAGS)
    assert found == pytest.approx(ratios(counts), rel=1e-15)


def test_sentences_and_types_are_counted_together():
    sums = tuple(map(sum, zip(*(counts for *_, counts in COUNTED), strict=True)))
    assert sums == (4, 10, 9, 24, 33)
    found = metrics([(numbers(predicted), numbers(known)) for predicted, known, _ in COUNTED], TAGS)
    assert found == pytest.approx(ratios(sums), rel=1e-15)
    assert found["precision"] == 0.4 and found["recall"] == pytest.approx(4 / 9)


def ratios(counts):
    right, found, there, words_right, words = counts
    precision, recall = right / found if found else 0.0, right / there if there else 0.0
    f1 = 2 * right / (found + there) if right else 0.0  # the same as 2 p r / (p + r)
    return {"f1": f1, "precision": precision, "recall": recall, "accuracy": words_right / words}


def test_tags_that_mark_no_spans_have_an_accuracy_alone():
    assert metrics([([0, 1, 1], [0, 1, 0])], ["NN", "VB"]) == {"accuracy": 2 / 3}
    assert metrics([], TAGS) == {"f1": 0.0, "precision": 0.0, "recall": 0.0, "accuracy": 0.0}
