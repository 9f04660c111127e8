"""What is wrong with a model's or a file's name is said before torch is imported (exact).

A first look reads one row, and names the flag or key to change.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from dataclasses import replace

import pytest

from narrowgauge.data import hub
from narrowgauge.errors import ConfigError, DataError, NarrowgaugeError
from narrowgauge.train import first_look
from narrowgauge.train.config.settings import TASKS, TrainConfig, resolved
from narrowgauge.train.tasks import task_class
from tests.processes import ROOT
from tests.raising import raises
from tests.train.tasks import folders

NAMED = {
    "causal-lm": ({}, {"messages": "chat"}),
    "regression": ({}, {"label": "a, b"}),
    "multiple-choice": ({}, {"choices": "a,b", "question": ""}),
    "tagging": ({}, {"spans": "spans"}),
    "classification": ({}, {"pair": "b"}),
}


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr(hub, "unreachable", lambda: "no network")


def test_nothing_heavy_is_imported():
    program = "import narrowgauge.train.first_look, sys; print('torch' in sys.modules, 'numpy' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=True
    )
    assert done.stdout == "False False\n"


@pytest.mark.parametrize("task", [name for name, entry in TASKS.items() if entry.source == "table"])
def test_columns_that_are_looked_for_are_those_that_the_task_reads(task, tmp_path):
    """The task's class needs torch, and its entry does not."""
    model = str(folders.bert(tmp_path / "m"))
    for columns in NAMED.get(task, ({},)):
        config = TrainConfig(task=task, model=model, data="d", columns=columns, classes="")
        config = replace(config, classes="A,B") if task in ("classification", "tagging") else config
        roles, _ = task_class(task).columns_and_model(resolved(config), folders.word_tokenizer())
        assert {*TASKS[task].columns_read(resolved(config)).values()} == {*roles.columns}


@pytest.mark.parametrize(
    ("settings", "error", "code", "words"),
    [
        ({"data": "absent.jsonl"}, DataError, "source.missing", "data = 'absent.jsonl': no such"),
        ({"data": "a.jsonl", "column": "x"}, DataError, "table.no-column", "data.column = 'x': a.jsonl:1"),
        ({"data": "a.jsonl"}, DataError, "table.which-column", "data.column"),
        ({"data": "chats.json"}, DataError, "table.chats", "causal-lm"),
        ({"data": "hf:some/set"}, DataError, "hub.unreachable", "data = 'hf:some/set'"),
        ({"model": "./absent"}, ConfigError, "model.no-folder", "model = './absent'"),
        ({"model": "some/model"}, DataError, "hub.unreachable", "model = 'some/model'"),
        ({"tokenizer": "some/model"}, DataError, "hub.unreachable", "data.tokenizer = 'some/model'"),
        (
            {"task": "classification", "model": "m", "data": "a.jsonl", "columns": {"text": "body"}},
            DataError, "table.no-column", "data.columns.label = 'label': a.jsonl:1: no such column",
        ),
        (
            {"task": "causal-lm", "model": "m", "data": "a.jsonl"},
            DataError, "table.no-column", "data.columns.prompt = 'prompt'",
        ),
        (
            {"task": "causal-lm", "model": "m", "data": "chats.json", "validation_data": "b.jsonl"},
            DataError, "source.missing", "data.validation_data = 'b.jsonl'",
        ),
    ],
)  # fmt: skip
def test_an_error_names_the_setting(settings, error, code, words, tmp_path, monkeypatch):
    (tmp_path / "m").mkdir()
    (tmp_path / "a.jsonl").write_text(json.dumps({"title": "x", "body": "y"}))
    (tmp_path / "chats.json").write_text(json.dumps([{"conversations": []}]))
    monkeypatch.chdir(tmp_path)
    with raises(error, code) as caught:
        first_look.refuse(TrainConfig(**settings))
    assert words in str(caught.value)
    assert not re.search(r"('[^']+').*: no column \1", str(caught.value))  # no name twice


@pytest.mark.parametrize("task", ["text", "causal-lm", "image-classification"])
def test_what_is_there_passes(task, tmp_path, monkeypatch):
    model, data = folders.llama(tmp_path / "m"), folders.prompts(tmp_path / "p.jsonl")
    source = {"text": "stdlib", "causal-lm": data, "image-classification": "digits"}[task]
    shape = {} if task != "image-classification" else {"model": ""}
    first_look.refuse(TrainConfig(task=task, data=str(source), **({"model": str(model)} | shape)))


def test_a_name_that_is_cached_passes(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "_is_cached", lambda name, file: True)
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
    (tmp_path / "some___set").mkdir()
    first_look.refuse(TrainConfig(model="some/model", data="hf:some/set"))


def test_a_first_look_is_short_however_long_the_file(tmp_path):
    """Rows behind the first are not read: the second is damaged."""
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "completion": "b"}\n{"prompt')
    config = TrainConfig(task="causal-lm", model=str(tmp_path), data=str(path))
    first_look.refuse(config)
    with pytest.raises(NarrowgaugeError):
        first_look.refuse(replace(config, columns={"prompt": "absent"}))
