"""What the command line says is true (exact): the words of errors, and what a killed run leaves."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from narrowgauge import cli, errors, storage
from narrowgauge.data import records
from narrowgauge.data import tokenizer as tokenizers
from narrowgauge.errors import DataError
from narrowgauge.lab.reopen import reopened
from narrowgauge.train import loop, preparation
from narrowgauge.train.checkpoint import store
from narrowgauge.train.checkpoint_ref import CheckpointRef
from tests.raising import raises
from tests.train import tiny


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_text(tmp_path_factory.mktemp("data") / "text")


@pytest.mark.parametrize(
    ("message", "typed", "said"),
    [
        (
            "limit = -1, batch_size = 8: must be",
            ["--limit", "-1"],
            "--limit -1, batch_size = 8: must be",
        ),
        (
            "limit = -1, batch_size = 0: must be",
            ["--limit=-1", "--batch-size=0"],
            "--limit -1, --batch-size 0: must be",
        ),
        ("limit = -1, batch_size = 8: must be", [], "limit = -1, batch_size = 8: must be"),
        ("output = '/a: b': holds a run", ["--output", "/a: b"], "--output '/a: b': holds a run"),
        ("rank 1: steps = 0: is not", ["--steps", "0"], "rank 1: --steps 0: is not"),
        ("tiny.toml:3: steps = 0: is not", ["--steps", "0"], "tiny.toml:3: steps = 0: is not"),
        (
            "from = 'a': cannot have steps = 3, but",
            ["--from", "a"],
            "--from 'a': cannot have steps = 3, but",
        ),
        ("no setting at all. steps = 3: x", ["--steps", "3"], "no setting at all. steps = 3: x"),
    ],
)
def test_a_setting_is_named_as_it_was_typed(message: str, typed: list[str], said: str) -> None:
    """A flag where a flag was typed, a key of the file where it stands there."""
    assert cli.as_typed(message, typed) == said


def test_a_flag_is_named_from_end_to_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["evaluate", str(tmp_path), "--limit", "-1"]) == 2
    assert "--limit -1, batch_size = 8: must be at least 0 and 1" in capsys.readouterr().err


def test_out_of_memory_always_has_words() -> None:
    assert errors.no_memory(MemoryError()) == "out of memory: no details. Lower batch_size."
    assert "out of memory: 4 GiB." in errors.no_memory(MemoryError("4 GiB"))


@pytest.mark.parametrize("count", ["99999999999999999999", "9" * 5000, "1000001"])
def test_a_number_of_classes_that_no_head_has_is_refused_by_its_setting(
    count: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "train",
        "--task",
        "classification",
        "--model",
        "m",
        "--data",
        "a.csv",
        "--classes",
        count,
    ]
    assert cli.main(arguments) == 2
    assert "at most 1,000,000 classes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("module", "install"),
    [("transformers", "'narrowgauge[train]'"), ("yaml", "'narrowgauge[evaluate]'"), ("lm_eval.api", "'narrowgauge[evaluate]'"),
     ("tensorboard", "'narrowgauge[tensorboard]'"), ("PIL", "'narrowgauge[train]'"), ("nobodys_package", "nobodys-package")],
)  # fmt: skip
def test_a_missing_package_is_named_with_the_extra_that_has_it(module: str, install: str) -> None:
    said = errors.missing_package(ModuleNotFoundError("", name=module))
    assert said.endswith(f"Run: pip install {install}."), said


def test_triton_is_not_said_to_come_with_the_command_line() -> None:
    assert errors.missing_package(ModuleNotFoundError("", name="triton")).endswith(
        "Run: pip install triton."
    )


def test_a_json_file_with_a_list_of_objects_is_a_table(tmp_path: Path) -> None:
    """Not SQuAD's: its columns are those of the objects."""
    path = tmp_path / "a.json"
    path.write_text(
        json.dumps([{"text": "a", "label": 1}, {"text": "b", "label": 0, "more": None}])
    )
    assert [row.values for row in records(path, ["label", "text"])] == [
        {"label": 1, "text": "a"},
        {"label": 0, "text": "b"},
    ]
    with raises(
        DataError, "table.no-column", "'txt'", "Closest: 'text'.", "'text', 'label'", "a.json"
    ):
        list(records(path, ["txt"]))
    path.write_text('[{"text": "a"}, 3]')
    with raises(DataError, "squad.no-object", "a number", "a.json", "[1]"):
        list(records(path, ["text"]))


def test_the_tokenizer_of_an_encoder_is_told_from_one_without_an_end() -> None:
    class Encoder:
        name_or_path, eos_token_id, mask_token, mask_token_id = "bert", None, "[MASK]", 4

    with raises(DataError, "tokenizer.encoder", "bert", "'[MASK]'", "--model"):
        tokenizers.end_of_text(Encoder())  # type: ignore[arg-type]


def test_probes_of_killed_processes_go(tmp_path: Path) -> None:
    for name in (".probe-1", ".probe-999999", ".probe-mine", f".probe-{os.getpid()}"):
        (tmp_path / name).write_text("")
    storage.probe(tmp_path)
    assert os.listdir(tmp_path) == [".probe-mine"]


@pytest.mark.slow
def test_superseded_best_weights_go_when_a_killed_run_goes_on(tmp_path: Path, text: Path) -> None:
    """Killed after the checkpoint that names step 4 as the best was saved, and before the best weights of an earlier step were removed."""
    config = tiny.settings(
        text, tmp_path / "run", best="loss", eval_every=2, checkpoint_every=4, steps=4
    )
    assert loop.run(config) == 0
    [kept] = os.listdir(tmp_path / "run" / "best")
    weights = {"weights": store.load(tmp_path / "run" / "best" / kept).tensors["weights"]}
    store.save(tmp_path / "run" / "best", 1, weights, {})
    with reopened(CheckpointRef(tmp_path / "run"), config, preparation.prepare(config)[1]):
        pass
    assert len(os.listdir(tmp_path / "run" / "best")) == 2, "who reads a run alone removes nothing"
    assert loop.run(replace(config, steps=6, resume=True)) == 0
    assert len(os.listdir(tmp_path / "run" / "best")) == 1
