"""Answers, tags and choices are learnt from random weights, in seconds (bounded: far above what one answer for all would reach)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from narrowgauge.errors import ConfigError, DataError
from narrowgauge.train import loop
from tests.raising import raises
from tests.train import tiny
from tests.train.tasks import folders
from tests.train.tasks.test_runs import AUTO

FAST = {
    "batch_size": 16,
    "learning_rate": 5e-3,
    "warmup_steps": 6,
    "recipe": "fp8-row",
    "from_scratch": True,
}


def trained(make, reports, job, **changes):
    """The last evaluation of a run, and what run.json says of the data."""
    config = make(job, **{**FAST, **changes})
    assert loop.run(config) == 0
    folder = Path(config.output)
    known = json.loads((folder / "run.json").read_text("utf-8"))
    model, found = AUTO[config.task].from_pretrained(folder / "final", output_loading_info=True)
    assert not found["missing_keys"] and not found["unexpected_keys"] and reports == [folder]
    if "classes" in known["data"]:
        assert list(model.config.id2label.values()) == known["data"]["classes"]
    return tiny.events(folder, "eval")[-1], known


@pytest.mark.slow
def test_answers_are_found_and_none_is_given_where_there_is_none(make, reports, tmp_path):
    """Which colour is the first: one text in four has none."""
    data = folders.first_things(tmp_path / "many.jsonl", 300)
    found, known = trained(make, reports, "questions", data=data, steps=60, max_length=20)
    assert known["data"]["unanswerable"] == 75 and known["best"] == "f1"
    assert found["exact_match"] > 0.85 and found["f1"] >= found["exact_match"]


@pytest.mark.slow
def test_tags_are_learnt(make, reports, tmp_path):
    found, known = trained(
        make,
        reports,
        "tags",
        data=folders.tagged(tmp_path / "many.jsonl", 200),
        steps=30,
        learning_rate=1e-2,
    )
    assert found["f1"] > 0.9 and found["accuracy"] > 0.9 and found["precision"] > 0.85
    assert known["data"]["classes"] == ["B-hue", "B-join", "I-hue", "I-join", "O"]


@pytest.mark.slow
def test_choices_are_learnt(make, reports, tmp_path):
    """Which of two to four sentences has "red" in it: 0.36 by chance."""
    found, _ = trained(
        make, reports, "choices", data=folders.red_ones(tmp_path / "many.jsonl", 200), steps=30
    )
    assert found["accuracy"] > 0.9


def test_tags_that_mark_no_spans_are_scored_by_words(make, tmp_path):
    rows = [
        {"tokens": text.split(), "tags": [word[:1].upper() for word in text.split()]}
        for text in folders.texts()
    ]
    config = make("tags", data=folders.jsonl(tmp_path / "letters.jsonl", rows), steps=1)
    assert loop.run(config) == 0
    [found] = tiny.events(Path(config.output), "eval")
    known = json.loads(Path(config.output, "run.json").read_text("utf-8"))
    assert "f1" not in found and known["best"] == "accuracy"


def test_a_tag_of_the_validation_data_that_nobody_learns(make, tmp_path):
    rows = [{"tokens": ["red"], "tags": ["B-hot"]}]
    config = make("tags", validation_data=folders.jsonl(tmp_path / "other.jsonl", rows))
    with raises(DataError, "tagging.tag", "word 1", "'red'", "'B-hot'", "the 5"):
        loop.run(config)


@pytest.mark.slow
def test_the_default_of_what_windows_share_gives_way_to_short_ones(make, capfd):
    config = make("questions", stride=128, max_length=24, steps=1)
    assert loop.run(config) == 0
    assert (
        "Neighbouring windows share 6 tokens: 128, the default, is more than half of one."
        in capfd.readouterr().err
    )
    same = make("questions", "given", stride=6, max_length=24, steps=1)
    assert loop.run(same) == 0
    assert tiny.losses(Path(config.output)) == tiny.losses(Path(same.output))


@pytest.mark.parametrize(
    ("job", "changes", "said"),
    [
        ("questions", {"too_long": "truncate"}, "too_long ="),
        ("questions", {"stride": 22}, r"task.stride = 22: more than half of a window of 24 tokens \(data.max_length\)"),
        ("questions", {"columns": {"context": ""}}, "data.columns.context = ''"),
        ("questions", {"packing": 64}, "batch.packing = 64: has no effect with task = 'question-answering'"),
        ("questions", {"best": "mcc"}, "task.best = 'mcc': is measured by classification .*alone. Take task.best = 'loss', "
                                       "'exact_match', 'f1'"),
        ("choices", {"columns": {"context": "", "question": ""}}, "data.columns.context "),
        ("choices", {"packing": 64}, "has no effect with task = 'multiple-choice'"),
        ("choices", {"token_budget": 40}, "batch.token_budget = 40: 4 choices"),
        ("tags", {"classes": "5"}, "task.classes = '5': "),
        ("tags", {"columns": {"text": "sentence"}}, "needs data.columns.spans"),
        ("tags", {"columns": {"spans": "spans", "tags": "marks"}}, "data.columns.tags = 'marks': has no effect with data.columns.spans"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_are_refused_before_the_first_step(make, job, changes, said):
    with pytest.raises((ConfigError, DataError), match=said):
        loop.run(make(job, **changes))
