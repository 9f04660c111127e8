"""Words and their tags, questions and their choices, as examples (exact); what is refused, with its row and word."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from narrowgauge.data import (
    Choices,
    Classification,
    Completion,
    Limits,
    Questions,
    Regression,
    Seq2Seq,
    Tagging,
    prepare_examples,
    records,
)
from narrowgauge.data.batches import IGNORED
from narrowgauge.data.rows import width_of
from narrowgauge.errors import ConfigError, DataError
from narrowgauge.train.tasks.multiple_choice import choices_of
from tests.raising import coded, raises
from tests.train.tasks import folders

TAGS = ("O", "B-warm", "I-warm")
WORDS = {"tokens": ["the", "red", "tile", "rowcode"], "tags": ["O", "B-warm", "I-warm", "O"]}


def prepared(tmp_path, rows, task, tokenizer=None, **limits):
    source = folders.jsonl(tmp_path / "rows.jsonl", rows)
    return prepare_examples(
        source,
        task,
        tokenizer or folders.word_tokenizer(),
        cache=tmp_path / "cache",
        limits=Limits(**limits),
    )


def test_the_label_of_a_word_stands_at_its_first_token(tmp_path):
    tokenizer = folders.word_tokenizer()
    [example] = prepared(tmp_path, [WORDS], Tagging(tags=TAGS), tokenizer)
    encoding = tokenizer(WORDS["tokens"], is_split_into_words=True)
    assert example["input_ids"].tolist() == encoding["input_ids"]
    expected, before = [], None
    for word in encoding.word_ids():
        expected.append(
            TAGS.index(WORDS["tags"][word]) if word is not None and word != before else IGNORED
        )
        before = word
    assert (
        example["labels"].tolist() == expected and IGNORED in expected[1:-1]
    )  # rowcode has several tokens


@pytest.mark.parametrize(
    "task",
    [
        Choices(),
        Classification(classes=("a", "b")),
        Completion(),
        Questions(),
        Regression(),
        Seq2Seq(),
        Tagging(tags=TAGS),
    ],
)
def test_token_ids_are_stored_in_two_bytes_as_long_as_the_largest_fits(task):
    for vocabulary, bytes_each in ((2**16, 2), (2**16 + 1, 4)):
        encoder: Any = SimpleNamespace(vocabulary=vocabulary)
        assert task.arrays(encoder)["input_ids"].itemsize == bytes_each


def test_a_byte_level_tokenizer_sees_words_behind_spaces(tmp_path):
    tokenizer = folders.ending_tokenizer()
    [example] = prepared(tmp_path, [WORDS], Tagging(tags=TAGS), tokenizer)
    joined = tokenizer(" " + " ".join(WORDS["tokens"]))["input_ids"]
    assert example["input_ids"].tolist() == joined
    assert (example["labels"] != IGNORED).sum() == 4


def test_lists_text_with_spans_and_csv_are_the_same(tmp_path):
    text = {"text": "the red tile rowcode", "spans": [{"start": 4, "end": 12, "label": "warm"}]}
    lists = Tagging(tags=TAGS).words_of(
        next(iter(records(folders.jsonl(tmp_path / "a.jsonl", [WORDS]), ["tokens", "tags"])))
    )
    spans = Tagging(tags=TAGS, text="text").words_of(
        next(iter(records(folders.jsonl(tmp_path / "b.jsonl", [text]), ["text", "spans"])))
    )
    path = tmp_path / "c.csv"
    path.write_text(
        'tokens,tags\nthe red tile rowcode,"[""O"", ""B-warm"", ""I-warm"", ""O""]"\n',
        encoding="utf-8",
    )
    assert (
        lists == spans == Tagging(tags=TAGS).words_of(next(iter(records(path, ["tokens", "tags"]))))
    )


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            {"tags": ["O", "I-warm", "I-warm", "O"]},
            coded("tagging.iob2", "'I-warm'", "'O'", "jsonl:2", "'red'"),
        ),
        ({"tags": ["I-warm", "O", "O", "O"]}, coded("tagging.iob2", "'I-warm'", "'the'")),
        ({"tags": ["B-warm", "I-cold", "O", "O"]}, coded("tagging.iob2", "'I-cold'", "'B-warm'")),
        (
            {"tags": ["O", "B-wram", "O", "O"]},
            coded("tagging.tag", "word 2", "'red'", "'B-wram'", "the 3"),
        ),
        ({"tags": ["O"]}, coded("tagging.count", "4 words", "'tokens'", "and 1", "'tags'")),
        ({"tags": [0, 1, 2, 0]}, coded("tagging.entry", "entry 1", "'tags'", "is 0")),
        (
            {"tokens": ["the", "", "tile", "row"]},
            coded("tagging.empty-word", "word 2 (''): the word"),
        ),
        ({"tokens": {"a": 1}}, coded("tagging.no-list")),
        (
            {"tokens": ["the", "\ud800", "tile", "row"]},
            coded("table.surrogate", "jsonl:2", "'tokens'"),
        ),
    ],
)
def test_a_row_that_is_wrong_is_named_with_its_word(tmp_path, changes, said):
    with raises(DataError, said):
        prepared(tmp_path, [WORDS, {**WORDS, **changes}], Tagging(tags=TAGS))


@pytest.mark.parametrize(
    ("spans", "said"),
    [
        (
            [{"start": 5, "end": 12, "label": "warm"}],
            coded("tagging.span-ends", "12", "'ed tile'"),
        ),
        (
            [{"start": 4, "end": 12, "label": "warm"}, {"start": 8, "end": 12, "label": "warm"}],
            coded("tagging.overlap"),
        ),
        ([{"start": 4, "label": "warm"}], coded("tagging.span")),
        ("nothing", coded("tagging.no-span-list")),
    ],
)
def test_a_span_that_is_wrong_is_named(tmp_path, spans, said):
    with raises(DataError, said):
        prepared(
            tmp_path, [{"text": "the red tile", "spans": spans}], Tagging(tags=TAGS, text="text")
        )


def test_other_schemes_are_refused():
    with raises(ConfigError, "tagging.scheme", "'E-warm'", "'O'"):
        Tagging(tags=("O", "B-warm", "E-warm"))
    with raises(ConfigError, "tagging.scheme"):
        Tagging(tags=("O", "B-warm", "NN"))


def test_words_that_the_tokenizer_drops_are_counted_and_no_others_moved(tmp_path):
    from tokenizers import normalizers

    tokenizer = folders.word_tokenizer()
    tokenizer.backend_tokenizer.normalizer = normalizers.BertNormalizer()
    row = {"tokens": ["red", "\u200b", "tile"], "tags": ["B-warm", "I-warm", "I-warm"]}
    found = prepared(tmp_path, [row], Tagging(tags=TAGS), tokenizer)
    assert found[0]["labels"][1:-1].tolist() == [1, 2]
    assert found.notes[0].startswith("1 words are nothing but characters that the tokenizer drops")


def test_truncated_words_lose_their_tags_alone(tmp_path):
    found = prepared(tmp_path, [WORDS], Tagging(tags=TAGS), max_length=4, too_long="truncate")
    assert (
        found[0]["labels"].tolist() == [IGNORED, 0, 1, IGNORED] and found[0]["input_ids"][-1] == 3
    )


# Choices

ASKED = {
    "context": "the red tile",
    "question": "it is",
    "choices": ["red", "green", "blue"],
    "label": 0,
}


def test_a_choice_that_utf8_cannot_encode_is_refused(tmp_path):
    with raises(DataError, "table.surrogate", "d800", "character 0", "jsonl:1", "1 holds"):
        prepared(tmp_path, [{**ASKED, "choices": ["red", "\ud800"]}], Choices())


def test_each_choice_is_a_pair_of_texts(tmp_path):
    tokenizer = folders.word_tokenizer()
    found = prepared(
        tmp_path, [ASKED, {**ASKED, "choices": ["red", "grey"], "label": "B"}], Choices(), tokenizer
    )
    pairs = [tokenizer("the red tile", f"it is {choice}") for choice in ("red", "green", "blue")]
    assert [ids.tolist() for ids in found[0]["input_ids"]] == [pair["input_ids"] for pair in pairs]
    assert [each["labels"] for each in found] == [0, 1] and choices_of(found).tolist() == [3, 2]
    assert found.lengths.tolist() == [max(len(pair["input_ids"]) for pair in pairs)] * 2
    assert int(found.tokens[0]) == sum(len(pair["input_ids"]) for pair in pairs)
    assert found.group[0] == found.group[1]


@pytest.mark.parametrize(
    ("row", "task", "label"),
    [
        ({**ASKED, "label": "1"}, Choices(), 1),
        ({**ASKED, "label": "C"}, Choices(), 2),
        ({**ASKED, "choices": json.dumps(["red", "green"])}, Choices(), 0),
        (
            {**ASKED, "choices": {"text": ["red", "green"], "label": ["1", "2"]}, "label": "2"},
            Choices(),
            1,
        ),
        (
            {**ASKED, "choices": {"text": ["red", "green"], "label": ["1", "2"]}, "label": 1},
            Choices(),
            0,
        ),
        (
            {**ASKED, "ending0": "red", "ending1": "grey", "label": 1},
            Choices(choices=("ending0", "ending1")),
            1,
        ),
        ({**ASKED}, Choices(context=None), 0),
    ],
)
def test_forms_of_choices_and_labels(tmp_path, row, task, label):
    [example] = prepared(tmp_path, [row], task)
    assert example["labels"] == label


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"label": 3}, coded("choices.label", "label 3", "'label'", "of 3", "jsonl:2")),
        ({"label": -1}, coded("choices.label", "label -1")),
        ({"label": True}, coded("choices.label", "True")),
        ({"label": "D"}, coded("choices.label", "'D'")),
        ({"choices": {"text": ["a", "b"], "label": ["1", "2"]}, "label": 0}, coded("choices.label", "one of '1', '2'")),
        ({"choices": {"text": ["a", "b"], "label": ["1"]}}, coded("choices.list")),
        ({"choices": ["red"]}, coded("choices.too-few", "1 choices")),
        ({"choices": ["red", " "]}, coded("choices.choice", "choice 1", "' '")),
        ({"choices": ["red", 2]}, coded("choices.choice", "choice 1", "is 2")),
        ({"context": "", "question": " "}, coded("choices.empty-row")),
    ],
)  # fmt: skip
def test_choices_that_are_wrong_are_named(tmp_path, changes, said):
    with raises(DataError, said):
        prepared(tmp_path, [ASKED, {**ASKED, **changes}], Choices())


def test_the_padding_of_choices_counts_every_row(tmp_path):
    from narrowgauge.train.tasks.multiple_choice import padding_of

    found = prepared(tmp_path, [ASKED, {**ASKED, "choices": ["red", "grey"]}], Choices())
    report = padding_of(found, [[[0, 1]]], (16, 32), 8, 16)
    size = int(found.lengths.max())
    assert report.planned.tokens == int(found.tokens.sum())
    assert report.planned.positions == 5 * width_of(size, 5, (16, 32), 16)
    assert report.fixed.positions == report.shuffled.positions == 5 * (-(-size // 8) * 8)
    assert not np.array_equal(found.lengths, found.tokens)
