"""A run that was stopped and resumed is, bit for bit, the run that never was (exact).

Compared are the loss of every step in metrics.jsonl and SHA-256 over every tensor of the last checkpoint: weights, amax windows,
optimizer, generators. Two combinations stop and go on in processes of their own, the others in this one.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from narrowgauge.cli import main
from narrowgauge.errors import CheckpointError, ConfigError, DataError, StorageError
from narrowgauge.train import loop, run_metadata
from narrowgauge.train.checkpoint import store
from narrowgauge.train.config.settings import replace
from narrowgauge.train.run_checkpoints import RunCheckpoints
from tests.processes import PYTHON, ROOT
from tests.raising import coded, raises
from tests.selection import quick
from tests.train import tiny


def same_run(folder, reference):
    assert tiny.losses(folder) == tiny.losses(reference)
    assert tiny.digests(folder) == tiny.digests(reference)


def stop(number):
    """Sends a real signal to this process, just before a step: it is finished, and saved."""
    return lambda trainer: signal.raise_signal(number)


# --- in this process ------------------------------------------------------------------------------------------------------

COMBINATIONS = [
    ("fp8-delayed", "amp-bf16", 1),
    ("fp8-current", "bf16-o2", 1),
    ("mxfp8", "amp-fp16", 1),
    ("fp8-delayed", "bf16-o3", 2),
    ("fp8-delayed", "amp-fp16", 2),
    ("fp8-row", "fp32", 1),
]


OPTIMIZERS = [
    {"optimizer": "adamw", "states": "8bit"},
    {"optimizer": "adamw", "states": "fp8-lm", "precision": "bf16-o2", "master": "fp16-scaled"},
    {"optimizer": "lion", "states": "4bit", "precision": "bf16-o2", "master": "bf16-remainder"},
    {"optimizer": "sgd", "states": "fp8", "precision": "bf16-o3"},
]


OTHERS = [
    {"states": "8bit", "loss": "slices", "precision": "bf16-o2", "keep_float32": "norms,lm_head"},
    {"states": "8bit", "loss": "whole"},
]


@pytest.mark.parametrize("settings", quick(OPTIMIZERS[2:3], OPTIMIZERS + OTHERS), ids=str)
def test_every_kind_of_optimizer_resumes_exactly(make, before_step, settings):
    # Matrices of 4,096 and more.
    sizes = {"hidden_size": 64, "heads": 2, "intermediate_size": 96, "recipe": "fp8-current"}
    reference = make("reference", **sizes, **settings)
    assert loop.run(reference) == 0
    config = make("stopped", **sizes, **settings)
    before_step(3, stop(signal.SIGTERM))
    assert loop.run(config) == 75
    assert loop.run(replace(config, resume=True)) == 0
    assert tiny.digests(Path(config.output)) == tiny.digests(Path(reference.output))
    with raises(ConfigError, "resume.changed", "optimizer.states = 'fp32'"):
        loop.run(replace(config, resume=True, states="fp32", steps=9))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "precision", "micro_batches"), quick(COMBINATIONS[3:4], COMBINATIONS)
)
def test_stopped_twice_and_resumed(make, before_step, recipe, precision, micro_batches):
    common = {"recipe": recipe, "precision": precision, "micro_batches": micro_batches}
    reference = make("reference", **common)
    assert loop.run(reference) == 0
    config = make("stopped", **common)
    before_step(2, stop(signal.SIGTERM))
    assert loop.run(config) == 75
    before_step(5, stop(signal.SIGINT))
    assert loop.run(replace(config, resume=True)) == 130
    assert loop.run(replace(config, resume=True)) == 0
    folder = Path(config.output)
    same_run(folder, Path(reference.output))
    assert [event["step"] for event in tiny.events(folder, "resume")] == [2, 5]
    done = [
        json.loads(line)
        for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()
        if '"done"' in line
    ]
    assert [(event["reason"], event["step"], event["exit_code"]) for event in done] == [
        ("preempted", 2, 75), ("interrupted", 5, 130), ("finished", 6, 0),
    ]  # fmt: skip


def test_a_request_after_the_step_had_looked_is_saved_too(make, monkeypatch):
    """The signal comes when step 2 is done and its checkpoint was not due."""
    config = make(steps=4)
    looks = []

    class LateStop(loop.StopRequest):
        @property
        def requested(self):
            looks.append(1)
            return (
                "preempted" if len(looks) > 6 else ""
            )  # three looks a step: twice before it, and whether to save

        @requested.setter
        def requested(self, value):
            pass

        exit_code = 75

    monkeypatch.setattr(loop, "StopRequest", LateStop)
    assert loop.run(config) == 75
    [saved] = (Path(config.output) / "checkpoints").iterdir()
    assert saved.name == "step-00000002"


def test_a_finished_run_resumed_changes_nothing(make):
    config = make(steps=2)
    loop.run(config)
    before = tiny.digests(Path(config.output))
    assert loop.run(replace(config, resume=True)) == 0
    assert (
        tiny.digests(Path(config.output)) == before and len(tiny.losses(Path(config.output))) == 2
    )


def test_more_steps_than_were_asked_for_first(make):
    config = make(steps=2, min_learning_rate=1e-3)
    loop.run(config)
    assert loop.run(replace(config, steps=3, resume=True)) == 0
    folder = Path(config.output)
    assert list(tiny.losses(folder)) == [1, 2, 3]
    assert json.loads((folder / "run.json").read_text("utf-8"))["steps"] == 3


def test_a_run_goes_on_without_its_run_json(make):
    """As the message about a damaged one advises."""
    config = make(steps=2)
    loop.run(config)
    run = Path(config.output, "run.json")
    whole = run.read_bytes()
    run.write_bytes(whole[:-40])
    with pytest.raises(ConfigError, match=r"damaged.*or remove it"):
        loop.run(replace(config, steps=3, resume=True))
    run.unlink()
    assert loop.run(replace(config, steps=3, resume=True)) == 0
    assert (
        list(tiny.losses(Path(config.output))) == [1, 2, 3]
        and json.loads(run.read_bytes())["steps"] == 3
    )


def test_a_resumption_that_is_refused_leaves_the_run_as_it_was(make):
    """Its settings too: the next one, without a flag, goes on as before."""
    config = make(steps=2)
    loop.run(config)
    stored = Path(config.output, "config.toml")
    before = stored.read_text("utf-8")
    with raises(ConfigError, "resume.steps", "--training.steps 2"):
        loop.run(replace(config, steps=1, resume=True))
    with raises(StorageError, "storage.refused", "use"):
        loop.run(replace(config, cache="/dev/null/cache", resume=True))
    assert stored.read_text("utf-8") == before
    assert loop.run(replace(config, eval_every=1, resume=True)) == 0
    assert "\nevery = 1\n" in stored.read_text("utf-8")


@pytest.mark.slow
def test_what_is_shown_before_the_first_step_draws_nothing_from_the_run(
    make, before_step, monkeypatch
):
    """A library may draw when it is imported (rich does), which happens anew in the process that resumes."""
    reference, config = make("reference", steps=3), make("stopped", steps=3)
    assert loop.run(reference) == 0
    announce = run_metadata.announce

    def drawing(trainer, *shown):
        announce(trainer, *shown)
        random.random(), np.random.rand(), torch.rand(1)

    monkeypatch.setattr(run_metadata, "announce", drawing)
    before_step(2, stop(signal.SIGTERM))
    assert loop.run(config) == 75
    assert loop.run(replace(config, resume=True)) == 0
    same_run(Path(config.output), Path(reference.output))


def test_a_torn_line_of_metrics(make, before_step):
    config = make(steps=3)
    before_step(2, stop(signal.SIGTERM))
    loop.run(config)
    metrics = Path(config.output) / "metrics.jsonl"
    with metrics.open("ab") as file:
        file.write(b'{"event": "step", "step": 3, "lo')
    assert loop.run(replace(config, resume=True)) == 0
    assert list(tiny.losses(metrics.parent)) == [1, 2, 3]
    assert all(json.loads(line) for line in metrics.read_text("utf-8").splitlines())


def test_steps_of_a_run_that_died_before_its_first_checkpoint_do_not_count(make):
    config = make(steps=2)
    folder = Path(config.output)
    folder.mkdir()
    (folder / "metrics.jsonl").write_text(
        '{"event": "step", "step": 7, "loss": 1.0}\n', encoding="utf-8"
    )
    assert loop.run(replace(config, resume=True)) == 0
    assert list(tiny.losses(folder)) == [1, 2]


# --- damaged and foreign checkpoints --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finished(text, tmp_path_factory):
    config = tiny.settings(
        text, tmp_path_factory.mktemp("finished") / "run", steps=4, checkpoint_every=2
    )
    assert loop.run(config) == 0
    return config


@pytest.fixture
def copy(finished, tmp_path):
    """A copy of a run of 4 steps with checkpoints at 2 and 4."""
    return replace(
        finished, output=str(shutil.copytree(finished.output, tmp_path / "copy")), resume=True
    )


def damage(config, step):
    path = Path(config.output, "checkpoints", f"step-{step:08}", "weights-0.safetensors")
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def command(config, text):
    return ["train", *tiny.flags(config, text), "--resume"]


def test_a_damaged_checkpoint_is_passed_over_loudly(copy, finished, capfd):
    damage(copy, 4)
    assert loop.run(copy) == 0
    warned = [line for line in capfd.readouterr().err.splitlines() if "WARNING" in line]
    assert (
        len(warned) == 1 and "step-00000004" in warned[0] and "weights-0.safetensors" in warned[0]
    )
    [event] = tiny.events(Path(copy.output), "resume")
    assert event["path"] == "checkpoints/step-00000002" and event["skipped"] == ["step-00000004"]
    same_run(Path(copy.output), Path(finished.output))


def test_all_damaged(copy, text, capfd):
    damage(copy, 2)
    damage(copy, 4)
    metrics = Path(copy.output, "metrics.jsonl").read_bytes()
    assert main(command(replace(copy, steps=4), text)) == 4
    printed = capfd.readouterr().err
    assert "none of the 2 checkpoints is intact" in printed and "Traceback" not in printed
    assert Path(copy.output, "metrics.jsonl").read_bytes() == metrics


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"hidden_size": 64}, coded("checkpoint.other-model", "64")),
        (
            {"recipe": "fp8-delayed"},
            coded("resume.other-settings", "recipe = 'fp8-current'", "'fp8-delayed'"),
        ),
        ({"recipe": "mxfp8"}, coded("resume.other-settings", "recipe = 'fp8-current'", "'mxfp8'")),
        (
            {"layers_recipe": {"lm_head": "bf16"}},
            coded("resume.other-settings", "recipe.layers = {}", "{'lm_head': 'bf16'}"),
        ),
        (
            {"precision": "bf16-o2"},
            coded("resume.other-settings", "recipe.precision = 'amp-bf16'", "'bf16-o2'"),
        ),
    ],
    ids=["size", "windows", "recipe", "recipes", "precision"],
)
def test_a_checkpoint_of_another_run_is_refused(copy, change, expected):
    """Twice: against config.toml, and, should that be lost, against the checkpoint."""
    folder = Path(copy.output)
    before = {
        path: path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file() and path.name != "lock"
    }
    with raises(ConfigError, "resume.changed"):
        loop.run(replace(copy, **change))
    assert {path: path.read_bytes() for path in before} == before
    (folder / "config.toml").unlink()
    with raises(CheckpointError, expected):
        loop.run(replace(copy, **change))
    rest = {path: data for path, data in before.items() if path.name != "config.toml"}
    assert {path: path.read_bytes() for path in rest} == rest


@pytest.mark.slow
def test_a_checkpoint_of_before_the_keep_list_resumes_with_none(make, monkeypatch):
    """Then norms were bfloat16 under bf16-o2, and neither the checkpoint nor config.toml said anything of it."""
    plain = make("plain", precision="bf16-o2", keep_float32="none", steps=2)
    own = RunCheckpoints._numeric_settings
    with monkeypatch.context() as patch:
        said = ("keep_float32", "loss")
        patch.setattr(
            RunCheckpoints,
            "_numeric_settings",
            lambda self: {k: v for k, v in own(self).items() if k not in said},
        )
        assert loop.run(plain) == 0
    config = Path(plain.output, "config.toml")
    config.write_text(config.read_text("utf-8").replace('keep_float32 = "none"', ""), "utf-8")
    changed = replace(plain, keep_float32="", resume=True, steps=3)
    with raises(
        CheckpointError, "resume.other-settings", "recipe.keep_float32 = 'none'", "'norms,softmax'"
    ):
        loop.run(changed)
    assert loop.run(replace(changed, keep_float32="none")) == 0


def test_changed_data(finished, own_text, tmp_path, text):
    output = shutil.copytree(finished.output, tmp_path / "copy")
    (output / "config.toml").unlink()
    (own_text / "00.txt").write_text(
        "Other words stand here now, and nothing is as it was.\n", encoding="utf-8"
    )
    config = replace(finished, output=str(output), data=str(own_text), resume=True)
    with raises(DataError, "resume.other-data", "tokenizer") as caught:
        loop.run(config)
    assert caught.value.exit_code == 3


@pytest.mark.slow
def test_changed_data_with_the_same_tokenizer(finished, own_text, tmp_path):
    """Through the command line, where the data's path is the same and its content is not."""
    own = replace(finished, output=str(tmp_path / "first"), data=str(own_text), steps=1)
    loop.run(own)
    shutil.copytree(tmp_path / "first" / "final", tmp_path / "tokenizer")
    config = replace(
        own, output=str(tmp_path / "second"), tokenizer=str(tmp_path / "tokenizer"), vocab_size=4096
    )
    loop.run(config)
    (own_text / "01.txt").write_text("the of and\n", encoding="utf-8")
    with raises(DataError, "resume.other-data", "data content"):
        loop.run(replace(config, resume=True))


# --- in processes of their own --------------------------------------------------------------------------------------------


def start(config, text, *more):
    words = [PYTHON, "-m", "narrowgauge", "train", *tiny.flags(config, text), *more]
    return subprocess.Popen(
        words, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8",
    )  # fmt: skip


def signal_after(process, folder, first, then, number):
    """Sends the signal as soon as the log holds `first` and, after that, `then`; returns the exit code and the output."""
    metrics = folder / "metrics.jsonl"

    def seen():
        log = metrics.read_text("utf-8") if metrics.exists() else ""
        return first in log and then in log[log.index(first) :]

    while not seen():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.005)
    process.send_signal(number)
    printed = process.communicate()[0]
    return process.returncode, printed


@pytest.mark.slow
def test_killed_in_another_process_and_resumed_in_this_one(make, text):
    """Nothing but the folder passes between the two: stochastic rounding and narrow states go on with their own bits."""
    common = {
        "recipe": "mxfp8",
        "precision": "bf16-o3",
        "states": "8bit",
        "steps": 40,
        "checkpoint_every": 4,
        "layers": 1,
    }
    reference, config = make("reference", **common), make("killed", **common)
    assert loop.run(reference) == 0
    folder = Path(config.output)
    code, printed = signal_after(
        start(config, text, "--optimizer.states=8bit"),
        folder,
        "",
        '"checkpoint", "step": 4',
        signal.SIGKILL,
    )
    assert code == -signal.SIGKILL, printed
    assert 4 <= store.newest_valid(folder / "checkpoints")[0].step < 40
    assert loop.run(replace(config, resume=True)) == 0
    same_run(folder, Path(reference.output))


@pytest.mark.slow
def test_kill_then_sigterm_then_the_rest_each_in_a_new_process(make, text):
    common = {"recipe": "fp8-delayed", "precision": "amp-bf16", "steps": 40, "checkpoint_every": 4}
    reference, config = make("reference", **common), make("killed", **common)
    assert loop.run(reference) == 0
    folder = Path(config.output)
    code, printed = signal_after(
        start(config, text), folder, "", '"checkpoint", "step": 4', signal.SIGKILL
    )
    assert code == -signal.SIGKILL, printed
    first = store.newest_valid(folder / "checkpoints")[0].step
    assert 4 <= first < 40

    code, printed = signal_after(
        start(config, text, "--resume"), folder, '"resume"', '"event": "step"', signal.SIGTERM
    )
    assert code == 75, printed
    second, skipped = store.newest_valid(folder / "checkpoints")
    assert first < second.step < 40 and not skipped
    assert tiny.events(folder, "done")[-1] == {
        "event": "done", "step": second.step, "reason": "preempted", "exit_code": 75
    }  # fmt: skip
    assert max(tiny.losses(folder)) == second.step  # saved at the step that was finished

    process = start(config, text, "--resume")
    printed = process.communicate()[0]
    assert process.returncode == 0, printed
    assert f" {second.path}" in printed
    same_run(folder, Path(reference.output))


@pytest.mark.slow
def test_stochastic_rounding_in_a_new_process(make, text, before_step):
    common = {"recipe": "mxfp8", "precision": "bf16-o3"}
    reference, config = make("reference", **common), make("stopped", **common)
    assert loop.run(reference) == 0
    before_step(3, stop(signal.SIGINT))
    assert loop.run(config) == 130
    process = start(config, text, "--resume")
    printed = process.communicate()[0]
    assert process.returncode == 0, printed
    same_run(Path(config.output), Path(reference.output))
