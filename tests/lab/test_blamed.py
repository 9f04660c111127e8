"""Blame in a run: found, confirmed by stretches, logged; and the run ends as the one that was not looked at (exact)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from narrowgauge import cli
from narrowgauge.errors import ConfigError
from narrowgauge.lab import training
from narrowgauge.lab.blame import Blame
from narrowgauge.lab.blame_checkpoint import blame_checkpoint
from narrowgauge.lab.blamed import blame_run, logged_baseline
from narrowgauge.train.checkpoint_ref import CheckpointRef
from tests.raising import cli_raises, coded
from tests.selection import quick, slow_on_a_plain_cpu
from tests.train import tiny

SICK = {
    "recipe": "fp8-current",
    "layers_recipe": {"layers.1.mlp.down_proj": "int4-minmax-sr:grad_input"},
}
SUSPECT = "model.layers.1.mlp.down_proj:grad_input"
RUNS = [
    {**SICK, "micro_batches": 2},
    {"recipe": "fp8-delayed", "fuse": True},
    {"recipe": "int4-hq-lss"},
    {"recipe": "nvfp4", "checkpointing": "full"},
    {"recipe": "fp8-delayed", "precision": "amp-fp16"},
    {
        "recipe": "mxfp8",
        "states": "8bit",
        "held_gradients": "none",
        "clip_by": "previous",
        "micro_batches": 2,
    },
    {"recipe": "fp8-row", "states": "8bit", "held_gradients": "none", "clip_by": "two-pass"},
    {"recipe": "fp8-current", "precision": "bf16-o2", "held_gradients": "fp8", "states": "8bit"},
]


class Said:
    def __init__(self):
        self.lines = []

    def say(self, text):
        self.lines.append(str(text))


@pytest.mark.slow
@slow_on_a_plain_cpu
@pytest.mark.parametrize("settings", quick(RUNS[:1], RUNS), ids=str)
def test_a_run_that_is_looked_at_ends_as_the_run_that_is_not(make, before_step, settings, cpu):
    plain = make("plain", **settings)
    training.run(plain)
    found, said = [], Said()
    before_step(3, lambda trainer: found.append(blame_run(trainer, said, steps=2)))
    looked = make("looked", **settings)
    training.run(looked)
    assert tiny.losses(Path(looked.output)) == tiny.losses(Path(plain.output))
    assert tiny.digests(Path(looked.output)) == tiny.digests(Path(plain.output))
    [event] = tiny.events(Path(looked.output), "blame")
    wanted = [SUSPECT] if "layers_recipe" in settings else []
    assert event["step"] == 2 and event["suspects"] == wanted == [
        each.name for each in found[0].suspects
    ]
    assert len(event["errors"]) == len(found[0].findings)
    assert sum(each.recipe != "bf16" for each in found[0].findings) in (
        40,
        42,
    )  # a plain CPU's head has one, and is looked at
    assert said.lines == found[0].sentences()


@pytest.mark.slow
def test_suspects_are_confirmed_by_stretches(make, before_step):
    found = []
    before_step(21, lambda trainer: found.append(blame_run(trainer, steps=20)))
    recipes = {
        "layers.1.mlp.down_proj": "int4-minmax-sr",
        "layers.0.mlp.down_proj": "int4-minmax-sr:grad_input",
    }
    training.run(make(recipe="fp8-current", layers_recipe=recipes, steps=60, learning_rate=1e-2))
    names = {each.name for each in found[0].suspects}
    assert SUSPECT in names and all("down_proj" in name for name in names)
    for each in found[0].confirmations:
        assert each.numbers["steps"] == 20 and each.numbers["noise"] >= 0 and each.hurts is not None
        assert any(each.words in line for line in found[0].sentences())
    assert found[0].sentences()[-1].startswith('recipe.layers = ["model.layers.')


@pytest.mark.slow
def test_a_healthy_step_that_the_run_has_logged_is_the_baseline(make, before_step):
    before_step(2, lambda trainer: blame_run(trainer, confirm=0))
    config = make(recipe="fp8-current", steps=6)
    training.run(config)
    metrics = Path(config.output) / "metrics.jsonl"
    [event] = tiny.events(Path(config.output), "blame")
    healthy = logged_baseline(metrics, 5)
    logged = event["errors"]["model.layers.1.mlp.down_proj:output"]
    assert {
        role: list(each) for role, each in healthy["model.layers.1.mlp.down_proj", "output"].items()
    } == logged
    assert logged_baseline(metrics, event["step"]) is None
    found = blame_checkpoint(CheckpointRef(Path(config.output)), confirm=0)
    worst = found.findings[0]
    assert worst.worse.expected == healthy[worst.layer, worst.product][worst.worse.role].error


@pytest.mark.slow
def test_the_command_looks_at_a_checkpoint_and_writes_nothing(make, capsys):
    config = make(**SICK, steps=8, checkpoint_every=4, keep=3)
    training.run(config)
    run = Path(config.output)
    before = {
        each: each.read_bytes() for each in run.rglob("*") if each.is_file() and each.name != "lock"
    }
    capsys.readouterr()
    assert cli.main(["blame", str(run), "--at", "4", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["step"] == 4 and answer["suspects"] == [SUSPECT]
    assert answer["recipes"] == ["model.layers.1.mlp.down_proj=bf16:grad_input"]
    assert Blame.from_dict(answer).suspects[0].name == SUSPECT
    assert cli.main(["blame", str(run), "--baseline", "4", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert not answer["suspects"], "the step of the baseline has the same fault"
    assert {
        each: each.read_bytes() for each in run.rglob("*") if each.is_file() and each.name != "lock"
    } == before
    for flags, expected in [
        ([str(run), "--at", "5"], coded("run.no-checkpoint", "step 5")),
        ([str(run.parent / "missing")], coded("run.place", run.parent / "missing")),
        ([str(run), "--steps", "-1"], coded("blame.counts", "--steps -1")),
    ]:
        cli_raises(["blame", *flags], ConfigError, expected)


@pytest.mark.slow
def test_the_line_that_it_ends_in_resumes_nothing_but_trains_anew(make, capsys):
    config = make(**SICK, checkpoint_every=3)
    training.run(config)
    line = blame_checkpoint(CheckpointRef(Path(config.output)), confirm=0).recipes
    table = dict(each.split("=") for each in line)
    healed = make("healed", recipe="fp8-current", layers_recipe={**SICK["layers_recipe"], **table})
    training.run(healed)
    assert not blame_checkpoint(CheckpointRef(Path(healed.output)), confirm=0).suspects
