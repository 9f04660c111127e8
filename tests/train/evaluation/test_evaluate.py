"""Scores of what a run has saved: as the run scored itself, on any checkpoint, and by tasks of lm-eval as transformers' own model."""

from __future__ import annotations

import json
import shutil
import statistics
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from narrowgauge import cli
from narrowgauge.errors import CheckpointError, ConfigError, DataError
from narrowgauge.lab import blame_checkpoint, training
from narrowgauge.train.checkpoint_ref import CheckpointRef
from narrowgauge.train.evaluation import command
from narrowgauge.train.evaluation.command import Asked, evaluate, rendered
from narrowgauge.train.evaluation.lm_tasks import LmTasks, Scores
from narrowgauge.train.evaluation.saved import SavedRun, versions
from narrowgauge.train.run_folder import RunFolder
from tests.lab.killed_guard import SICK, hurt
from tests.raising import coded, raises
from tests.train import tiny
from tests.train.test_loop import installed  # noqa: F401

CHOICES = """task: words
dataset_path: json
dataset_kwargs: {data_files: {test: words.jsonl}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: gold
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]
"""
ROLLING = """task: prose
dataset_path: json
dataset_kwargs: {data_files: {test: words.jsonl}}
output_type: loglikelihood_rolling
test_split: test
doc_to_text: ""
doc_to_target: "{{question}} {{choices[0]}}"
metric_list: [{metric: bits_per_byte}]
"""


@pytest.fixture(scope="module")
def trained(text, tmp_path_factory):
    """A run of twelve steps with three checkpoints."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    config = tiny.settings(
        text,
        folder,
        recipe="fp8-delayed",
        steps=12,
        checkpoint_every=4,
        keep=3,
        eval_every=4,
        eval_wide=True,
        learning_rate=5e-3,
    )
    assert training.run(config) == 0
    return folder


@pytest.fixture
def run(trained, tmp_path):
    """A copy that a test may change."""
    return shutil.copytree(trained, tmp_path / "run")


@pytest.fixture
def task_files(tmp_path):
    """Two task files, and their data beside them, which are not in the current folder."""
    folder = tmp_path / "tasks"
    folder.mkdir()
    (folder / "words.yaml").write_text(CHOICES)
    (folder / "prose.yaml").write_text(ROLLING)
    rows = [
        {"question": f"the {a}", "choices": [f" {a}", f" {b}"], "gold": place % 2}
        for place, (a, b) in enumerate(zip(tiny.WORDS, tiny.WORDS[1:], strict=False))
    ]
    (folder / "words.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    return folder


@pytest.mark.slow
def test_a_run_that_its_guard_has_widened_scores_as_it_did(make, installed):  # noqa: F811
    installed(hurt)
    guard = "every=4,steps=2,margin=0.02%,then=bf16"
    config = make(
        **{**SICK, "recipe": "mxfp4", "guard": guard},
        checkpoint_every=8,
        keep=9,
        eval_every=8,
        best="loss",
    )
    assert training.run(config) == 0
    folder = Path(config.output)
    [switch] = tiny.events(folder, "switch")
    assert switch["step"] == 11
    logged = {event["step"]: event["loss"] for event in tiny.events(folder, "eval")}
    for which in ("16", "best"):
        [row] = evaluate(folder, Asked(checkpoints=which, device="cpu"))["checkpoints"]
        assert row["step"] > 11 and "narrow" not in row, "every product is BF16's from there on"
        assert row["16_bits"]["validation"]["values"]["loss"] == pytest.approx(
            logged[row["step"]], abs=1e-12
        )


@pytest.mark.slow
def test_a_saved_run_computes_with_its_own_threads(run, monkeypatch):
    seen, before = [], torch.get_num_threads()
    settings = (run / "config.toml").read_text()
    assert "threads = 1\n" in settings
    (run / "config.toml").write_text(settings.replace("threads = 1\n", f"threads = {before + 1}\n"))
    monkeypatch.setattr(
        command,
        "_of_checkpoint",
        lambda *given: seen.append(torch.get_num_threads()) or {"16_bits": {}, "not_narrow": ""},
    )
    evaluate(run, Asked(device="cpu"))
    monkeypatch.setattr(
        blame_checkpoint, "blame_run", lambda *given, **named: seen.append(torch.get_num_threads())
    )
    blame_checkpoint.blame_checkpoint(CheckpointRef(run))
    assert seen == [before + 1] * 2 and torch.get_num_threads() == before


@pytest.mark.parametrize("device", ["tpu", "meta", "", "cuda:x"])
def test_a_device_that_is_none_is_refused(run, device):
    with raises(ConfigError, "device.name", device):
        evaluate(run, Asked(device=device))


def test_a_checkpoint_scores_as_the_run_did(run) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    result = evaluate(run, Asked(checkpoints="all", device="cpu"))
    logged = tiny.events(run, "eval")
    assert (
        [row["step"] for row in result["checkpoints"]]
        == [4, 8, 12]
        == [event["step"] for event in logged]
    )
    for row, event in zip(result["checkpoints"], logged, strict=True):
        narrow, wide = (
            row[version]["validation"]["values"]["loss"] for version in ("narrow", "16_bits")
        )
        assert (narrow, wide) == (event["loss"], event["wide"]["loss"])
        assert row["difference"]["validation"]["loss"]["mean"] == narrow - wide
    assert "over 3 checkpoints narrow lies" in result["text"]
    kept = json.loads((run / "evaluation.json").read_text())["results"]
    assert [each["tasks"] for each in kept] == [["validation"]]
    evaluate(run, Asked(checkpoints="all", device="cpu"))  # asked again, it is kept once
    assert len(json.loads((run / "evaluation.json").read_text())["results"]) == 1
    assert before == {
        path: path.read_bytes()
        for path in run.rglob("*")
        if path.is_file() and path.name != "evaluation.json"
    }


def test_the_error_of_a_difference_is_that_of_its_pairs() -> None:
    """Of three examples one fell from right to wrong: mean -1/3, and the error of -1, 0, 0."""

    def scored(*values: float) -> Scores:
        mean = statistics.fmean(values)
        return Scores({"acc": mean}, {"acc": None}, {"acc": dict(enumerate(values))})

    [(metric, found)] = command._differences(scored(0.0, 1.0, 0.0), scored(1.0, 1.0, 0.0)).items()
    assert metric == "acc" and found["mean"] == pytest.approx(-1 / 3)
    assert found["stderr"] == pytest.approx(1 / 3)
    assert (found["changed"], found["examples"]) == (1, 3)


def test_a_damaged_checkpoint_is_passed_over_and_named(run) -> None:
    weights = run / "checkpoints" / "step-00000008" / "weights-0.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    result = evaluate(run, Asked(checkpoints="all", device="cpu"))
    assert [row["step"] for row in result["checkpoints"]] == [4, 12]
    assert [*result["passed_over"]] == ["checkpoints/step-00000008"]
    with raises(CheckpointError, "evaluate.no-checkpoint", "checkpoint '8' cannot be scored"):
        evaluate(run, Asked(checkpoints="8", device="cpu"))


def test_where_the_newest_is_damaged_the_next_that_is_intact_is_named(run) -> None:
    """With the option that scores it; a damaged one is not, and where none is left that is said."""
    for step, instead in (
        (12, ["step-00000008", "--checkpoints 8"]),
        (8, ["step-00000004", "--checkpoints 4"]),
        (4, []),
    ):
        weights = run / "checkpoints" / f"step-{step:08}" / "weights-0.safetensors"
        weights.write_bytes(weights.read_bytes()[:-1] + b"x")
        with raises(CheckpointError, "evaluate.no-checkpoint", *instead) as caught:
            evaluate(run, Asked(device="cpu"))
        assert bool(instead) == ("--checkpoints" in str(caught.value))


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        (Asked(dtype="float61"), coded("evaluate.dtype", "float61", "bfloat16")),
        (Asked(limit=-1), coded("evaluate.counts", "limit = -1")),
        (Asked(limit=3), coded("evaluate.limit", "limit = 3")),
        (Asked(checkpoints="4,5"), coded("evaluate.checkpoints", "4, 8, 12")),
        (Asked(checkpoints="best"), coded("evaluate.checkpoints", "4, 8, 12")),
        (Asked(tasks=("nowhere.yaml",)), coded("file.unreadable", "nowhere.yaml")),
    ],
)
def test_bad_questions_are_refused(trained, asked, expected) -> None:
    with raises(ConfigError, expected):
        evaluate(trained, asked)


@pytest.mark.parametrize("dtype", ["", "bfloat16"])
def test_weights_are_scored_in_the_dtype_that_was_asked_for(run, monkeypatch, dtype) -> None:
    seen = []

    def scored(saved, model, given):
        seen.append({parameter.dtype for parameter in model.parameters()})
        return Scores({"loss": 1.0}, {}, {})

    monkeypatch.setattr(command, "_on_own_data", scored)
    evaluate(run, Asked(dtype=dtype, device="cpu"))
    assert seen == [{torch.bfloat16 if dtype else torch.float32}] * 2


def test_a_folder_without_a_run_is_refused(tmp_path) -> None:
    with raises(ConfigError, "run.none"):
        evaluate(tmp_path)


def test_float16_of_weights_trained_in_bfloat16_is_warned_of(trained, capsys) -> None:
    saved = SavedRun.open(trained, torch.device("cpu"))
    assert saved.paths("newest")[0].name == "step-00000012"
    assert cli.main(["evaluate", str(trained), "--dtype", "float16", "--device", "cpu"]) == 0
    told = capsys.readouterr()
    assert "WARNING: " in told.err and "65,504" in told.err and "Scored in float16." in told.out


@pytest.mark.slow
def test_weights_alone_have_no_narrow_score_where_steps_were_learnt(make, tmp_path) -> None:
    config = make(recipe="int4-hq-lss", best="loss", steps=2, eval_every=1)
    assert training.run(config) == 0
    saved = SavedRun.open(tmp_path / "run", torch.device("cpu"))
    [best], [newest] = saved.paths("best"), saved.paths("newest")
    model, _, why = saved.model(best)
    assert best.name in why and [name for name, _ in versions(model, why)] == ["16 bits"]
    model, _, why = saved.model(newest)
    assert not why and [name for name, _ in versions(model, why)] == ["narrow", "16 bits"]


@pytest.mark.slow  # importing lm-eval takes seconds
def test_the_suspended_model_scores_as_transformers_bfloat16_model(run, task_files) -> None:
    import transformers

    files = tuple(str(task_files / name) for name in ("words.yaml", "prose.yaml"))
    drawn = torch.get_rng_state()
    [row] = evaluate(run, Asked(files, device="cpu"))["checkpoints"]
    assert torch.equal(drawn, torch.get_rng_state())
    final = run / "final"
    model = transformers.AutoModelForCausalLM.from_pretrained(final, dtype=torch.bfloat16).eval()
    theirs = LmTasks(files, 0, 8).scores(model, transformers.AutoTokenizer.from_pretrained(final))
    for task, metric in (("words", "acc"), ("prose", "bits_per_byte")):
        ours = row["16_bits"][task]["values"][metric]
        assert ours == pytest.approx(
            theirs[task].values[metric], rel=1e-3 if metric == "bits_per_byte" else 0
        )
    assert row["narrow"]["prose"]["values"] != row["16_bits"]["prose"]["values"]
    paired = row["difference"]["words"]["acc"]
    assert (
        paired["examples"] == len(tiny.WORDS) - 1 and 0 <= paired["changed"] <= paired["examples"]
    )


@pytest.mark.slow
def test_task_files_that_cannot_be_loaded_are_refused(run, task_files, make) -> None:
    (task_files / "words.jsonl").unlink()
    with raises(DataError, "lm-eval.unloadable", task_files / "words.yaml"):
        evaluate(run, Asked((str(task_files / "words.yaml"),), device="cpu"))
    (task_files / "none.yaml").write_text("group_of: nothing\n")
    with raises(ConfigError, "lm-eval.no-task-key", task_files / "none.yaml"):
        evaluate(run, Asked((str(task_files / "none.yaml"),), device="cpu"))


def test_the_folder_of_a_study_is_none_of_a_run(tmp_path):
    """It has a config.toml too, and its runs have the checkpoints."""
    (tmp_path / "study.json").write_text("{}")
    run = tmp_path / "bf16-seed0"
    run.mkdir(parents=True)
    (run / "config.toml").touch()
    with raises(ConfigError, "evaluate.study", run):
        SavedRun.paths(SimpleNamespace(folder=RunFolder(tmp_path)), "newest")


@pytest.mark.parametrize("has_more", [False, True])
def test_more_checkpoints_are_advised_where_there_are_some(has_more):
    gap = {"task": {"loss": {"mean": 0.1}}}
    scores = {"task": {"values": {"loss": 1.0}, "stderr": {}}}
    row = {
        "checkpoint": "step-1",
        "not_narrow": "",
        "narrow": scores,
        "16_bits": scores,
        "difference": gap,
    }
    result = {"recipe": "fp8-row", "dtype": "bfloat16", "checkpoints": [row], "passed_over": {}}
    assert ("--checkpoints all" in rendered(result, has_more)) == has_more
