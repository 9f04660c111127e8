"""One model of each kind and one table for each task, for all runs of these tests; and no way to the network."""

from __future__ import annotations

import shutil
from importlib import import_module

import pytest

from tests.train.tasks import folders


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture(scope="session")
def place(tmp_path_factory):
    """A folder with models and tables."""
    folder = tmp_path_factory.mktemp("tasks")
    for build in (folders.bert, folders.llama, folders.t5, folders.marian, folders.vit):
        build(folder / build.__name__)
    folders.classes_csv(folder / "classes.csv")
    folders.prompts(folder / "prompts.jsonl")
    folders.chats(folder / "chats.jsonl")
    folders.pairs(folder / "pairs.jsonl")
    folders.pictures(folder / "pictures")
    folders.two_texts(folder / "two-texts.jsonl")
    folders.questions(folder / "questions.jsonl", unanswerable=5)
    folders.tagged(folder / "tagged.jsonl")
    folders.choices(folder / "choices.jsonl")
    return folder


@pytest.fixture
def jobs(place):
    """Settings by the name of a job; one for each kind of model, one more for chats, packed rows and a token budget.

    A task that has none here brings its own: `job(place)` in its test file, `test_NAME.py`, which writes a table into the folder and
    returns the settings of a tiny run.
    """
    known = {
        "classification": {"task": "classification", "model": place / "bert", "data": place / "classes.csv"},
        "pairs of a decoder": {
            "task": "classification", "model": place / "llama", "data": place / "two-texts.jsonl", "columns": {"pair": "other"},
        },
        "completion": {"task": "causal-lm", "model": place / "llama", "data": place / "prompts.jsonl"},
        "packed": {
            "task": "causal-lm", "model": place / "llama", "data": place / "prompts.jsonl", "packing": 64, "batch_size": 2,
        },
        "chat": {
            "task": "causal-lm", "model": place / "llama", "data": place / "chats.jsonl", "columns": {"messages": "messages"},
            "token_budget": 256,
        },
        "pictures": {"task": "image-classification", "model": place / "vit", "data": place / "pictures"},
        "t5": {"task": "seq2seq", "model": place / "t5", "data": place / "pairs.jsonl"},
        "questions": {
            "task": "question-answering", "model": place / "bert", "data": place / "questions.jsonl", "max_length": 24, "stride": 6,
            "batch_size": 12,
        },
        "tags": {"task": "tagging", "model": place / "bert", "data": place / "tagged.jsonl"},
        "packed tags": {"task": "tagging", "model": place / "bert", "data": place / "tagged.jsonl", "packing": 64, "batch_size": 2},
        "choices": {"task": "multiple-choice", "model": place / "bert", "data": place / "choices.jsonl"},
        "translated": {
            "task": "seq2seq", "model": place / "marian", "data": place / "pairs.jsonl", "translate": 9, "bleu_words": "none",
        },
        "marian": {"task": "seq2seq", "model": place / "marian", "data": place / "pairs.jsonl"},
    }  # fmt: skip
    return known | {
        name: import_module(f"tests.train.tasks.test_{name.replace('-', '_')}").job(place)
        for name in folders.WITH_OWN_JOB
    }


@pytest.fixture
def make(jobs, place, tmp_path):
    """make("chat", steps=3): the configuration of a tiny run; all share one cache of examples."""

    def settings(job, name="run", **changes):
        return folders.settings(
            tmp_path / name, **{"cache": place / "cache", **jobs[job], **changes}
        )

    return settings


@pytest.fixture
def copy_of(place, tmp_path):
    """copy_of("llama"): a model's folder that a test may spoil."""
    return lambda name: shutil.copytree(place / name, tmp_path / f"own-{name}")
