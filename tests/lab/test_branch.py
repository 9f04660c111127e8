"""Branches: a run that goes on from another one's checkpoint in other numbers (exact where nothing is rounded, else bounded)."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path

import pytest
import torch

from narrowgauge.cli import main
from narrowgauge.diagnose.runs import read_metrics, read_run
from narrowgauge.errors import BusyError, ConfigError, DataError
from narrowgauge.lab import training
from narrowgauge.lab.branch import FRESH_OPTIMIZER
from narrowgauge.train.checkpoint import store
from narrowgauge.train.checkpoint_ref import CheckpointRef, branched
from narrowgauge.train.config.settings import replace
from narrowgauge.train.run_folder import RunFolder
from tests.processes import PYTHON, run, run_ok
from tests.raising import cli_raises, coded, raises
from tests.selection import quick
from tests.train import tiny
from tests.train.tasks import folders

SIZES = {
    "hidden_size": 64,
    "heads": 2,
    "intermediate_size": 96,
}  # matrices of 4,096 and more have narrow states


@pytest.fixture
def parent(make):
    """parent(recipe=...): a finished run of six steps with checkpoints after 3 and 6; its folder."""

    def trained(name="parent", **changes):
        config = make(name, **SIZES, checkpoint_every=3, keep=9, **changes)
        assert training.run(config) == 0
        return Path(config.output)

    return trained


def checkpoint(folder, step):
    return store.load(Path(folder) / f"checkpoints/step-{step:08}")


def branch(parent, at, output, **changes):
    config = branched(f"{parent}@{at}", str(output), **changes)
    assert training.run(config) == 0
    return Path(output)


SAME = [
    {"recipe": "fp8-delayed", "states": "8bit", "precision": "bf16-o2"},
    {"recipe": "int4-hq-lss", "states": "4bit"},  # draws noise, samples rows, learns steps
    {"recipe": "nvfp4", "switch": "bf16@2:forward, fp8-current@5", "precision": "bf16-o3"},
    {"recipe": "none", "precision": "amp-fp16", "optimizer": "lion"},
    {"recipe": "fp8-row", "freeze": "layers.0", "held_gradients": "none", "clip_by": "previous"},
]


@pytest.mark.slow
@pytest.mark.parametrize("settings", quick(SAME[:1], SAME), ids=str)
def test_a_branch_with_the_same_settings_has_the_bits_of_its_parent(parent, tmp_path, settings):
    first = parent(**settings)
    second = branch(first, 3, tmp_path / "again")
    assert tiny.losses(second) == {
        step: loss for step, loss in tiny.losses(first).items() if step > 3
    }
    assert tiny.digests(second) == tiny.digests(first)
    begun, going_on = (
        read_metrics(second / "metrics.jsonl")[0],
        read_run(second / "run.json")["parent"],
    )
    assert begun["event"] == "branch" and begun["step"] == 3 and begun["from"] == f"{first}@3"
    assert (
        going_on["fingerprint"]
        == json.loads((first / "checkpoints/step-00000003/manifest.json").read_text())["sha256"]
    )
    assert "bit for bit" in " ".join(begun["carried"]) and begun["changes"] == {}
    assert (second / begun["run"]).resolve() == first.resolve()


@pytest.mark.slow
def test_another_recipe_goes_on_from_the_same_weights_and_moments(parent, tmp_path):
    first = parent(recipe="fp8-delayed")
    second = branch(first, 3, tmp_path / "wide", recipe="bf16")
    before, after = checkpoint(first, 3), checkpoint(second, 3)
    assert before.tensors["weights"].keys() == after.tensors["weights"].keys()
    for group in ("weights", "optimizer", "rng"):
        for name, tensor in before.tensors[group].items():
            assert torch.equal(tensor, after.tensors[group][name]), name
    assert before.tensors["scaling"] and not after.tensors["scaling"]
    assert tiny.losses(second).keys() == {4, 5, 6}
    assert tiny.losses(second)[4] != tiny.losses(first)[4]


@pytest.mark.slow
def test_windows_stay_and_other_state_begins_anew(parent, tmp_path):
    first = parent(recipe="fp8-delayed")
    second = branch(first, 3, tmp_path / "row", states="8bit")
    assert (
        checkpoint(first, 3).tensors["scaling"].keys()
        == checkpoint(second, 3).tensors["scaling"].keys()
    )
    for name, tensor in checkpoint(first, 3).tensors["scaling"].items():
        assert torch.equal(tensor, checkpoint(second, 3).tensors["scaling"][name])
    third = branch(first, 3, tmp_path / "learned", recipe="int4-hq-lss")
    [begun] = tiny.events(third, "branch")
    assert any("Learned steps: 0 layers carried over" in line for line in begun["carried"])
    fourth = branch(third, 3, tmp_path / "learned-again", learning_rate=5e-4)
    scaling = [checkpoint(each, 3).tensors["scaling"] for each in (third, fourth)]
    assert scaling[0].keys() == scaling[1].keys() and all(
        torch.equal(scaling[0][each], scaling[1][each]) for each in scaling[0]
    )


def test_what_a_parent_cannot_give_is_refused_before_anything_is_written(parent, tmp_path):
    first, output = parent(), tmp_path / "new"
    for given in ("--batch.size=8", "--training.seed=1", "--optimizer=lion", "--model.layers=3"):
        key = given.partition("=")[0].removeprefix("--").replace("-", "_")
        command = ["train", "--from", f"{first}@3", "--output", str(output), given]
        cli_raises(command, ConfigError, "branch.changed", f"{key} =")
        assert not output.exists()


def test_places_that_cannot_be_are_refused(parent, tmp_path):
    first = parent()
    for place, words in (
        (f"{first}@4", coded("run.no-checkpoint", "step 4")),
        (f"{first}@best", coded("run.no-best")),
        (f"{first}", coded("branch.past-end", "--training.steps")),
    ):
        with raises(ConfigError, words):
            training.run(branched(place, str(tmp_path / "new")))
        assert not RunFolder(tmp_path / "new").has_run()
    with raises(ConfigError, "run.place", tmp_path / "gone"):
        branched(str(tmp_path / "gone"), str(tmp_path / "new"))
    with raises(ConfigError, "branch.output"):
        branched(f"{first}@3", str(first))


def test_a_parent_in_training_and_other_data_are_refused(parent, own_text, tmp_path):
    first = parent(data=str(own_text))
    with (
        RunFolder.claim(first, resume=True),
        raises(BusyError, "run.busy"),
    ):
        training.run(branched(f"{first}@3", str(tmp_path / "new")))
    (own_text / "00.txt").write_text("Other words.")
    with raises(DataError, "resume.other-data", "tokenizer"):
        training.run(branched(f"{first}@3", str(tmp_path / "new")))
    assert not RunFolder(tmp_path / "new").has_run()


@pytest.mark.slow
@pytest.mark.parametrize("step", [4, 5])
def test_a_branch_is_killed_and_resumed_without_its_parent(parent, before_step, tmp_path, step):
    first = parent(recipe="fp8-delayed")
    whole = branch(first, 3, tmp_path / "whole", states="8bit")
    config = branched(f"{first}@3", str(tmp_path / "killed"), states="8bit")
    before_step(step, lambda trainer: signal.raise_signal(signal.SIGTERM))
    assert training.run(config) == 75
    shutil.move(first, tmp_path / "elsewhere")
    assert main(["train", "--resume", "--output", config.output]) == 0
    assert tiny.losses(Path(config.output)) == tiny.losses(whole)
    assert tiny.digests(Path(config.output)) == tiny.digests(whole)
    assert len(tiny.events(Path(config.output), "branch")) == 1


@pytest.mark.slow
def test_without_an_output_runs_number_themselves(make, tmp_path, monkeypatch):
    """A branch of runs/latest names its parent by number, and a failed start changes nothing."""
    monkeypatch.chdir(tmp_path)
    assert training.run(replace(make(checkpoint_every=3), output="runs/latest")) == 0
    for number in (2, 3):
        command = ["train", "--from", "runs/latest@3", "--recipe", "bf16", "--training.steps", "4"]
        assert main([*command, "--checkpoint.every", "3"]) == 0
        stored = RunFolder(Path("runs", str(number))).config.read_text("utf-8")
        assert f'"runs/{number}"' in stored and f'"runs/{number - 1}@3"' in stored
    assert main(["train", "--resume", "--training.steps", "5"]) == 0
    assert tiny.losses(Path("runs/3")).keys() == {4, 5}
    with raises(DataError, "source.missing"):
        training.run(replace(make(data="nowhere.txt"), output="runs/latest"))
    assert Path("runs/latest").readlink() == Path("3")


@pytest.mark.slow
def test_the_same_command_goes_on_and_another_output_is_not_overwritten(
    parent, before_step, tmp_path, capsys
):
    first = parent()
    command = [
        "train",
        "--resume",
        "--from",
        f"{first}@3",
        "--recipe",
        "bf16",
        "--output",
        str(tmp_path / "new"),
    ]
    before_step(5, lambda trainer: signal.raise_signal(signal.SIGTERM))
    assert main(command) == 75
    assert main(command) == 0
    assert tiny.losses(tmp_path / "new").keys() == {4, 5, 6}
    command[3] = f"{first}@6"
    cli_raises(command, ConfigError, "resume.changed", "from =")
    cli_raises(["train", *command[2:]], ConfigError, "run.exists", tmp_path / "new")
    resumed = ["train", "--resume", "--recipe", "int8", "--output", str(first)]
    cli_raises(resumed, ConfigError, "resume.changed", f" --from {first} ")


@pytest.mark.slow
def test_the_best_weights_go_on_with_a_new_optimizer_where_their_checkpoint_is_gone(
    parent, tmp_path
):
    first = parent(best="loss", eval_every=1)
    best = max(int(path.name[5:]) for path in (first / "best").iterdir())
    weights = store.load(first / f"best/step-{best:08}").tensors["weights"]
    if best in (3, 6):
        shutil.rmtree(first / f"checkpoints/step-{best:08}")
    config = branched(f"{first}@best", str(tmp_path / "new"), steps=9)
    assert training.run(config) == 0
    begun = tiny.events(tmp_path / "new", "branch")[0]
    assert begun["step"] == best and begun["carried"] == [FRESH_OPTIMIZER]
    assert tiny.losses(tmp_path / "new").keys() == set(range(best + 1, 10)) and weights


@pytest.mark.slow
def test_a_guarded_parent_hands_its_guard_on(parent, tmp_path):
    guard = "every=2,steps=2,then=stay"
    first = parent(recipe="fp8-delayed", guard=guard, steps=12, warmup_steps=1)
    second = branch(first, 3, tmp_path / "again")
    assert tiny.losses(second) == {
        step: loss for step, loss in tiny.losses(first).items() if step > 3
    }
    third = branch(first, 3, tmp_path / "wide", recipe="bf16")  # nothing is left to guard
    assert 'checks = ""' in (third / "config.toml").read_text()


@pytest.mark.slow
@pytest.mark.ranks
def test_two_ranks_branch_from_a_run_of_theirs_and_go_on_with_its_bits(text, make, tmp_path):
    launch = [
        PYTHON,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
        "-m",
        "narrowgauge",
        "train",
    ]
    first = make("parent", **SIZES, checkpoint_every=3, keep=9)
    run_ok(
        [
            *launch,
            *tiny.flags(first, text),
            "--checkpoint.keep=9",
            "--parallel.gradients=fp8",
            "--parallel=fsdp",
        ]
    )
    again, wide = tmp_path / "again", tmp_path / "wide"
    run_ok([*launch, "--from", f"{first.output}@3", "--output", again])
    run_ok(
        [
            *launch,
            "--from",
            f"{first.output}@3",
            "--output",
            wide,
            "--recipe",
            "bf16",
            "--parallel",
            "dp",
        ]
    )
    assert tiny.losses(again) == {
        step: loss for step, loss in tiny.losses(Path(first.output)).items() if step > 3
    }
    changes = read_run(wide / "run.json")["parent"]["changes"]
    assert changes == {"recipe": ["fp8-current", "bf16"], "parallel": ["fsdp", "dp"]}
    refused = run([*launch, "--from", f"{first.output}@4", "--output", tmp_path / "gone"])
    assert refused.returncode != 0 and "no checkpoint of step 4" in refused.stderr


@pytest.mark.slow
def test_a_branch_of_a_table_goes_on_at_its_place_in_the_epoch(tmp_path):
    common = {
        "task": "classification",
        "model": folders.bert(tmp_path / "bert"),
        "data": folders.classes_csv(tmp_path / "classes.csv"),
    }
    first = folders.settings(
        tmp_path / "first",
        recipe="fp8-current",
        checkpoint_every=2,
        keep=9,
        cache=tmp_path / "cache",
        **common,
    )
    assert training.run(first) == 0
    second = branched(f"{first.output}@2", str(tmp_path / "second"))
    assert training.run(second) == 0
    assert tiny.losses(Path(second.output)) == {
        step: loss for step, loss in tiny.losses(Path(first.output)).items() if step > 2
    }
    assert tiny.digests(Path(second.output)) == tiny.digests(Path(first.output))


@pytest.mark.slow
def test_recipe_auto_chooses_once_for_a_branch(parent, tmp_path):
    first = parent()
    second = branch(first, 3, tmp_path / "auto", recipe="auto")
    assert read_run(second / "run.json")["auto"] and read_run(second / "run.json")["resumed"] == []
    third = branch(second, 6, tmp_path / "again", steps=7)
    assert read_run(third / "run.json")["auto"] == read_run(second / "run.json")["auto"]


def test_places():
    assert CheckpointRef.of("runs/a@100") == CheckpointRef(Path("runs/a"), 100)
    assert CheckpointRef.of("runs/a@b") == CheckpointRef(Path("runs/a@b"))
    assert CheckpointRef.of("a@best") == CheckpointRef(Path("a"), "best")


@pytest.mark.slow
def test_the_reference_of_a_branch_is_a_branch_too(parent, tmp_path):
    first = parent()
    second = branch(first, 3, tmp_path / "new", learning_rate=5e-4, compare="bf16")
    assert tiny.losses(second / "compare-bf16").keys() == {4, 5, 6}
    config = replace(branched(f"{first}@3", str(tmp_path / "x")), resume=True)
    assert config.compare == ""
