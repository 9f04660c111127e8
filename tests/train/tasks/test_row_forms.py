"""Rows of other trainers' forms give the examples of this one's, and a note says so (exact)."""

from __future__ import annotations

import json

import numpy as np
import pytest

from narrowgauge.errors import ConfigError
from narrowgauge.train.tasks import task_class
from tests.raising import raises
from tests.train.tasks import folders

TURNS = [("Which rule?", "The delta rule"), ("Why {so}?", "It is local")]


def prepared(place, rows, *, template=True, **settings):
    tokenizer = folders.byte_tokenizer("<pad>")
    tokenizer.chat_template = folders.TEMPLATE if template else None
    model = folders.llama(place / f"m{template}", tokenizer, max_position_embeddings=512)
    data = place / "rows.json"
    data.write_text(json.dumps(rows))
    config = folders.settings(
        place / "run", task="causal-lm", model=str(model), data=str(data), cache=str(place / "cache"), **settings
    )  # fmt: skip
    return task_class("causal-lm").prepare(config)


def examples(task):
    both = [*task.train, *task.validation]
    return sorted((each["input_ids"].tolist(), each["labels"].tolist()) for each in both)


def messages(system=""):
    first = [{"role": "system", "content": system}] if system else []
    return [
        {"messages": [*first, {"role": "user", "content": a}, {"role": "assistant", "content": b}]}
        for a, b in TURNS
    ]


@pytest.mark.parametrize("system", ["", "Be brief."])
def test_chats_of_all_forms_are_the_same_examples(tmp_path, system):
    column = {"system": system} if system else {}
    forms = {
        "OpenAI's": messages(system),
        "ShareGPT's": [
            {"conversations": [{"from": "human", "value": a}, {"from": "gpt", "value": b}]} | column
            for a, b in TURNS
        ],
        "Alpaca's": [{"instruction": a, "input": "", "output": b} | column for a, b in TURNS],
    }
    wanted = examples(prepared(tmp_path, messages(system), columns={"messages": "messages"}))
    for name, rows in forms.items():
        task = prepared(tmp_path, rows)
        assert examples(task) == wanted, name
        assert name in task.notes[0] and "rows.json" in task.notes[1]


def test_without_a_template_an_instruction_is_stanfords_prompt(tmp_path):
    rows = [{"instruction": a, "output": b} for a, b in TURNS]
    task = prepared(tmp_path, rows, template=False)
    found = sorted(task.tokenizer.decode(ids) for ids, _ in examples(task))
    assert all("### Response:\n" in text for text in found) and "Why {so}?" in found[1]
    learnt = [np.array(ids)[np.array(labels) != -100] for ids, labels in examples(task)]
    assert sorted(map(task.tokenizer.decode, learnt)) == [
        f"{b}</s>" for _, b in sorted(TURNS, reverse=True)
    ]
    with raises(ConfigError, "chat.no-template"):
        prepared(tmp_path, messages(), template=False)


def test_columns_that_are_named_are_read_as_named(tmp_path):
    """Columns of a form beside: what was typed counts."""
    rows = [{"instruction": a, "output": b, "prompt": b, "completion": a} for a, b in TURNS]
    own = prepared(tmp_path, rows)
    named = prepared(tmp_path, rows, columns={"prompt": "instruction", "completion": "output"})
    assert "form" not in "".join(own.notes + named.notes) and examples(own) != examples(named)
