"""Windows and the tokens of answers (exact, against transformers' own windows); SQuAD's files; what is refused, with its row."""

from __future__ import annotations

import json

import numpy as np
import pytest

from narrowgauge.data import Limits, Questions, prepare_examples, records
from narrowgauge.errors import ConfigError, DataError
from narrowgauge.train.tasks.question_answering import KNOWN, OFFSETS, TEXT
from tests.raising import coded, raises
from tests.train.tasks import folders

CONTEXT = "the red tile and the green scale and the blue code and the grey row and the red amax and the blue tile"


def row(question, answers, context=CONTEXT):
    found = [{"text": each, "answer_start": context.index(each)} for each in answers]
    return {"question": question, "context": context, "answers": found}


ROWS = [
    row("which scale ?", ["green"]), row("which row ?", ["grey row", "grey"]), row("which stone ?", []),
    row("the first ?", ["the red tile"]), row("all ?", [CONTEXT]), row("which tile ?", ["blue tile"]), row("short ?", ["red"], "red tile"),
]  # fmt: skip


def tokenizers():
    return {"words": folders.word_tokenizer(), "bytes": folders.ending_tokenizer()}


def prepared(tmp_path, rows, tokenizer, *, stride=4, **limits):
    source = folders.jsonl(tmp_path / "rows.jsonl", rows)
    return prepare_examples(
        source,
        Questions(stride=stride),
        tokenizer,
        cache=tmp_path / "cache",
        limits=Limits(**limits),
    )


@pytest.mark.parametrize("kind", ["words", "bytes"])
def test_windows_are_those_of_transformers_and_hold_the_answer(tmp_path, kind):
    tokenizer, stride, longest = tokenizers()[kind], 4, {"words": 16, "bytes": 26}[kind]
    found = prepared(tmp_path, ROWS, tokenizer, stride=stride, max_length=longest)
    theirs = tokenizer(
        [each["question"] for each in ROWS], [each["context"] for each in ROWS], truncation="only_second", max_length=longest,
        stride=stride, return_overflowing_tokens=True, return_offsets_mapping=True,
    )  # fmt: skip
    assert [example["input_ids"].tolist() for example in found] == theirs["input_ids"]
    assert len(found) > len(ROWS) and found.lengths.max() <= longest
    number = np.cumsum(found.sizes(TEXT) > 0) - 1
    assert number.tolist() == theirs["overflow_to_sample_mapping"]
    held = dict.fromkeys(range(len(ROWS)), 0)
    for place, example in enumerate(found):
        known, (first, last) = ROWS[number[place]], example["labels"]
        offsets = found.array(OFFSETS, place).reshape(-1, 2)
        answer = known["answers"][0] if known["answers"] else None
        if answer and whole(answer, offsets):
            text = known["context"][offsets[first, 0] : offsets[last, 1]]
            assert text.strip() == answer["text"]
            held[number[place]] += 1
        else:
            nowhere = (
                example["input_ids"].tolist().index(tokenizer.cls_token_id)
                if kind == "words"
                else 0
            )
            assert (first, last) == (nowhere, nowhere)
        assert found.array(KNOWN, place).tolist() == [len(known["answers"])]
    assert [count > 0 for count in held.values()] == [True, True, False, True, False, True, True]
    assert json.loads(bytes(found.array(TEXT, 0))) == {"context": CONTEXT, "answers": ["green"]}


def whole(answer, offsets):
    inside = offsets[offsets[:, 0] >= 0]
    return inside[0, 0] <= answer["answer_start"] and inside[-1, 1] >= answer["answer_start"] + len(
        answer["text"]
    )


def test_questions_on_a_text_have_one_group(tmp_path):
    found = prepared(tmp_path, ROWS, folders.word_tokenizer(), max_length=16)
    groups = found.group[found.sizes(TEXT) > 0]
    assert len(set(groups[:6].tolist())) == 1 and groups[6] != groups[0]
    assert len(set(found.group.tolist())) == 2


def test_all_forms_of_answers_are_one(tmp_path):
    rows = {
        "objects": ROWS,
        "lists": [
            {
                **each,
                "answers": {
                    key: [one[key] for one in each["answers"]] for key in ("text", "answer_start")
                },
            }
            for each in ROWS
        ],
        "json": [{**each, "answers": json.dumps(each["answers"])} for each in ROWS],
    }
    read = {
        name: list(
            map(
                Questions().answers_of,
                records(folders.jsonl(tmp_path / f"{name}.jsonl", some), COLUMNS),
            )
        )
        for name, some in rows.items()
    }
    assert read["objects"] == read["lists"] == read["json"]
    assert read["objects"][:3] == [
        [("green", CONTEXT.index("green"))],
        [("grey row", CONTEXT.index("grey")), ("grey", CONTEXT.index("grey"))],
        [],
    ]


COLUMNS = ["question", "context", "answers"]


def squad(path, rows):
    questions = [
        {
            "id": str(place),
            "question": each["question"],
            "answers": each["answers"],
            "is_impossible": not each["answers"],
        }
        for place, each in enumerate(rows)
    ]
    whole = {
        "version": "v2.0",
        "data": [{"title": "t", "paragraphs": [{"context": CONTEXT, "qas": questions}]}],
    }
    path.write_text(json.dumps(whole), encoding="utf-8")
    return path


def test_squads_own_file_gives_the_same_rows(tmp_path):
    found = list(records(squad(tmp_path / "dev.json", ROWS[:6]), COLUMNS))
    assert [each.values for each in found] == [
        {key: each[key] for key in COLUMNS} for each in ROWS[:6]
    ]
    assert found[2].origin.endswith("dev.json.data[0].paragraphs[0].qas[2]")


def bad(**changes):
    return [ROWS[0], {**ROWS[1], **changes}]


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            bad(answers=[{"text": "grey", "answer_start": 3}]),
            coded("questions.answer-place", "'grey'", "character 3", "' red'", "jsonl:2"),
        ),
        (
            bad(answers=[{"text": "grey", "answer_start": -1}]),
            coded("questions.answer-place", "character -1"),
        ),
        (bad(answers=[{"text": " ", "answer_start": 3}]), coded("questions.empty-answer")),
        (bad(answers="grey"), coded("questions.json", "'grey'")),
        (bad(answers={"text": ["grey"], "answer_start": []}), coded("questions.lists")),
        (bad(answers=[{"text": "grey"}]), coded("questions.answer")),
        (bad(answers=[{"text": "grey", "answer_start": "5"}]), coded("questions.answer")),
        (bad(answers=None), coded("questions.answers", "None")),
        (bad(context=" "), coded("questions.empty-column", "'context'")),
        (bad(question=7), coded("table.cell", "'question'", "a number (7)")),
    ],
)
def test_a_row_that_is_wrong_is_named(tmp_path, rows, said):
    with raises(DataError, said):
        prepared(tmp_path, rows, folders.word_tokenizer())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[]", "dev.json: its list is empty"),
        ("{}", "dev.json: has no 'data'"),
        ('{"data": 3}', "'data' is no list"),
        (
            '{"data": [{"paragraphs": [{"qas": []}]}]}',
            r"dev.json.data\[0\].paragraphs\[0\]: has no 'context'",
        ),
        ('{"data": [', "dev.json: .*JSON"),
        (
            '{"data": [{"paragraphs": [{"context": "a", "qas": [{"question": "b", "answers": [1], "is_impossible": true}]}]}]}',
            "is_impossible",
        ),
    ],
)
def test_a_file_that_is_not_squads(tmp_path, text, said):
    (tmp_path / "dev.json").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=said):
        list(records(tmp_path / "dev.json", COLUMNS))


def test_a_question_that_leaves_no_room_is_refused_or_skipped(tmp_path):
    rows = [ROWS[0], {**ROWS[0], "question": "which " * 12}]
    with raises(DataError, "examples.too-long", "of 2", "max_length 16", "2 rows"):
        prepared(tmp_path, rows, folders.word_tokenizer(), max_length=16)
    found = prepared(tmp_path, rows, folders.word_tokenizer(), max_length=16, too_long="skip")
    assert (found.sizes(TEXT) > 0).sum() == 1
    # where all of it fits, no room is needed
    short = [{**rows[1], "context": "red tile", "answers": []}]
    assert len(prepared(tmp_path, short, folders.word_tokenizer(), max_length=70, stride=60)) == 1
    with raises(ConfigError, "examples.windows"):
        prepared(tmp_path, rows, folders.word_tokenizer(), max_length=16, too_long="truncate")
    with raises(ConfigError, "questions.stride", "stride -1"):
        Questions(stride=-1)
