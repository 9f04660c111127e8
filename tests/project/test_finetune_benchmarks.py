"""The fine-tuning benchmarks run from end to end on tiny models, keep what is finished, and refuse to mix settings."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import BertConfig, BertForMaskedLM

from benchmarks import (
    cola_speed,
    cola_variants,
    cumulative,
    made_tasks,
    paired,
    tasks_beside_trainer,
)
from benchmarks.cumulative_row import area_under_roc
from narrowgauge.data import Document
from tests.train.tasks import folders

pytest.importorskip("accelerate")  # which transformers' Trainer needs
# The Trainer's own, of torch's and accelerate's versions.
pytestmark = [pytest.mark.benchmark, pytest.mark.slow, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A tiny BERT, and sentences in CoLA's form."""
    folder = tmp_path_factory.mktemp("benchmarks")
    torch.manual_seed(0)
    sizes = BertConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=2,
        max_position_embeddings=128, pad_token_id=0,
    )  # fmt: skip
    folders.save(folder / "bert", BertForMaskedLM(sizes), folders.word_tokenizer())
    lines = [f"x\t{int('red' in text)}\t\t{text}\n" for text in folders.texts(70)]
    for name in ("in_domain_train.tsv", "in_domain_dev.tsv", "out_of_domain_dev.tsv"):
        (folder / name).write_text(
            "".join(lines[: 70 if "train" in name else 20]), encoding="utf-8"
        )
    return folder


@pytest.fixture
def here(monkeypatch):
    """Runs in this process, which has torch and transformers already."""
    monkeypatch.setattr(cola_speed, "alone", lambda function, *arguments: function(*arguments))
    monkeypatch.setattr(paired, "ProcessPoolExecutor", lambda jobs, context: ThreadPoolExecutor(1))


def cola(monkeypatch, place, tmp_path, *more):
    words = [
        "cola_speed",
        f"--data={place}",
        f"--encoder={place / 'bert'}",
        f"--output={tmp_path / 'runs'}",
    ]
    monkeypatch.setattr(
        sys, "argv", [*words, f"--results={tmp_path / 'results.jsonl'}", "--quick", *more]
    )
    cola_speed.main()


def job(place, **changes):
    sizes = {"epochs": 1, "batch_size": 8, "learning_rate": 1e-3, "threads": 1}
    return cola_variants.Job(data=str(place), encoder=str(place / "bert"), **{**sizes, **changes})


@pytest.mark.parametrize(
    "name", [name for name in cola_variants.VARIANTS if name != "trainer-dynamic-bf16"]
)
def test_every_variant_sees_every_example_once_in_an_epoch(place, name):
    found = cola_variants.run(name, 0, job(place, examples=44), scored=name == "ours-run")
    assert found["examples"] == 44 and found["steps"] == 6  # the last of 4
    assert found["train_s"] > 0 and found["examples_per_s"] == 44 / found["train_s"]
    assert ("in_domain_mcc" in found) == (name == "ours-run")


def test_a_stretch_of_steps_counts_its_examples(place):
    found = cola_variants.run("trainer-fixed128-fp32", 0, job(place, steps=2), scored=False)
    assert found["steps"] == 2 and found["examples"] == 16


def test_the_tables_of_cola_are_made_kept_and_not_mixed(monkeypatch, place, tmp_path, here, capsys):
    variants = [
        "--variants",
        "trainer-dynamic-fp32",
        "ours-run",
        "--quality-variants",
        "trainer-dynamic-fp32",
        "ours-run",
    ]
    cola(monkeypatch, place, tmp_path, *variants)
    printed = capsys.readouterr().out
    assert (
        "ours-run is" in printed
        and "times as fast as trainer-dynamic-fp32 (the fastest rival)" in printed
    )
    lines = [
        json.loads(line) for line in (tmp_path / "results.jsonl").read_text("utf-8").splitlines()
    ]
    speed = [line for line in lines if line["benchmark"] == "cola_speed"]
    assert {(line["case"], line["clock"]) for line in speed} == {
        (case, clock)
        for case in ("trainer-dynamic-fp32", "ours-run")
        for clock in ("train_s", "cpu_s")
    }
    quality = [line for line in lines if line["benchmark"] == "cola_quality"]
    assert [line["recipe"] for line in quality] == ["trainer-dynamic-fp32", "ours-run"]
    monkeypatch.setattr(cola_speed, "run", None)  # nothing is run again
    cola(monkeypatch, place, tmp_path, *variants)
    with pytest.raises(SystemExit, match="holds runs with other batch_size"):
        cola(monkeypatch, place, tmp_path, *variants, "--batch-size=4")


def test_rows_add_up():
    rows = cumulative.cumulated(cumulative.LANGUAGE_MODEL)
    assert [row.padding for row in rows[:5]] == ["fixed", "longest", "longest", "buckets", "packed"]
    assert (
        rows[-2].accumulation == 2
        and rows[-2].recipe
        and rows[-2].states == "8bit"
        and rows[-2].chunked
    )
    assert rows[-1] == cumulative.replace(
        rows[-2], name=rows[-1].name, in_backward=True, accumulation=1
    )


def test_docstrings_are_records_of_prompt_and_completion(monkeypatch):
    text = 'class A:\n    def f(self, x=1):\n        """Adds.\n\n        More."""\n    def g(self):\n        pass\n'
    monkeypatch.setattr("narrowgauge.data.documents", lambda source: [Document(text, "a.py")])
    assert list(cumulative.docstrings()) == [
        {"prompt": "def f(self, x=1):\n", "completion": "Adds."}
    ]


def test_the_area_under_roc() -> None:
    """Against pairs counted by hand: (3 > 1), (3 > 2), (2 > 1), and (2, 2) a tie."""
    scores, labels = torch.tensor([3.0, 1.0, 2.0, 2.0]), torch.tensor([1, 0, 1, 0])
    assert area_under_roc(scores, labels) == 3.5 / 4
    assert area_under_roc(-scores, labels) == 0.5 / 4
    assert area_under_roc(torch.zeros(4), labels) == 0.5


@pytest.mark.parametrize("kind", ["causal-lm", "classification"])
def test_the_cumulative_table(monkeypatch, place, tmp_path, capsys, kind):
    """Every row runs, and each technique shows where it must: in padding, kept bytes, states or trainables."""
    monkeypatch.setattr(cumulative, "alone", lambda function, *arguments: function(*arguments))
    texts = [{"prompt": f"{text}:", "completion": text.split()[1]} for text in folders.texts(120)]
    monkeypatch.setattr(cumulative, "docstrings", lambda: iter(texts))
    words = [
        "cumulative",
        f"--data={place}",
        f"--encoder={place / 'bert'}",
        f"--output={tmp_path / 'runs'}",
        "--quick",
    ]
    monkeypatch.setattr(
        sys, "argv", [*words, f"--only={kind}", f"--results={tmp_path / 'results.jsonl'}"]
    )
    cumulative.main()
    lines = {
        line["row"]: line
        for line in map(json.loads, (tmp_path / "results.jsonl").read_text("utf-8").splitlines())
    }
    names = [
        name
        for name, _ in (cumulative.LANGUAGE_MODEL if kind == "causal-lm" else cumulative.CLASSIFIER)
    ]
    assert list(lines) == names
    printed = capsys.readouterr().out
    assert all(f"| {name} |" in printed for name in names)

    def values(column, *parts):
        return [
            next(line[column] for name, line in lines.items() if part in name) for part in parts
        ]

    fixed, longest, buckets = values("padding", "fixed padding", "defaults", "by length")
    assert fixed > longest > 0 and fixed > buckets
    plain, frozen, narrow = values("optimizer_bytes", "accumulation 2", "frozen", "8-bit")
    assert plain > frozen >= narrow > 0
    whole, part = values("trainable", "accumulation 2", "frozen")
    assert whole > part
    before, checkpointed = values("saved_bytes", "8-bit", "checkpointing")
    assert checkpointed < before
    if kind == "causal-lm":
        [packed] = values("padding", "packing")
        assert packed < longest
        whole, chunked = values("saved_bytes", "packing", "chunked")
        assert chunked != whole
    metric = "loss" if kind == "causal-lm" else "mcc"
    assert all(metric in line for line in lines.values())
    monkeypatch.setattr(cumulative, "measure_row", None)  # nothing is run again
    cumulative.main()


@pytest.mark.parametrize("task", made_tasks.ROWS)
def test_a_plain_script_scores_an_exported_model_as_the_run_did(task, here):
    """Exact: windows, words, choices and metrics of two implementations."""
    settings = {
        "steps": 6, "batch_size": 8, "learning_rate": 5e-3, "warmup_steps": 1, "weight_decay": 0.0, "betas": (0.9, 0.999), "max_length": 32,
        "stride": 8, "rows": 48, "held_out": 40, "order": "length",
    }  # fmt: skip
    found = tasks_beside_trainer.run(tasks_beside_trainer.OURS, 0, task, settings)
    assert found["own_score"] == pytest.approx(found["score"], rel=1e-12)
    plain = tasks_beside_trainer.run(tasks_beside_trainer.PLAIN, 0, task, settings)
    assert 0 <= plain["score"] <= 1
