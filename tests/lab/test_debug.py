"""The ladder on runs with a planted fault: what it finds, and that the run stays as it was (exact)."""

from __future__ import annotations

import hashlib
import json
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from narrowgauge import recipes
from narrowgauge.cli import main
from narrowgauge.errors import BusyError, ConfigError
from narrowgauge.formats import E2M1
from narrowgauge.lab import probe, training
from narrowgauge.lab.debug import debug
from narrowgauge.lab.ladder_of_run import steps_taken
from narrowgauge.recipe import Cast, Gemm
from narrowgauge.train.run_folder import RunFolder
from tests.raising import coded, raises, with_code
from tests.train import tiny

SIZES = {
    "hidden_size": 64,
    "heads": 2,
    "intermediate_size": 96,
    "steps": 60,
    "checkpoint_every": 30,
    "keep": 9,
    "learning_rate": 3e-3,
}


def plant(monkeypatch, product):
    """Recipe "sick": one product with E2M1 of a whole tensor, the others in 16 bits."""
    coarse = Cast(format=E2M1)
    sick = replace(recipes.BF16, name="sick", **{product: Gemm(lhs=coarse, rhs=coarse)})
    monkeypatch.setattr(recipes, "ALL", (*recipes.ALL, sick))


def contents(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and not path.name.startswith("debug-")
    }


@pytest.mark.slow
def test_the_sick_product_is_found_and_the_run_is_left_alone(make, monkeypatch, capsys):
    plant(monkeypatch, "output")
    config = make(**SIZES, recipe="sick")
    assert training.run(config) == 0
    run = Path(config.output)
    before = contents(run)
    assert main(["debug", str(run), "--at", "35", "--steps", "20"]) == 0
    said = capsys.readouterr()
    assert "It repeats: the losses that the run has logged of 25 steps, to the bit." in said.out
    assert "The first change that mends it: output alone in 16 bits." in said.out
    fix = " ".join(
        (
            "narrowgauge train",
            f"--from {run}@30",
            "--recipe.switch 'bf16@30:output'",
            "--output NEW",
        )
    )
    assert fix in said.out and "0:00:" in said.err and "Validation at step 30: loss" in said.out
    assert contents(run) == before
    found = json.loads((run / "debug-35.json").read_text())
    assert [each["name"] for each in found["rungs"]][:3] == ["again", "bf16", "control"] and found[
        "fix"
    ] == fix
    assert (run / "debug-35.txt").read_text() == said.out
    page = (run / "debug-35.html").read_text(encoding="utf-8")
    assert "output alone in 16 bits" in page and "product:grad_weight" in page
    new = run.parent / "NEW"
    assert (
        main(
            [
                "train",
                "--from",
                f"{run}@30",
                "--recipe.switch",
                "bf16@30:output",
                "--output",
                str(new),
            ]
        )
        == 0
    )
    mended = {each["name"]: each["losses"] for each in found["rungs"]}["product:output"]
    assert [
        tiny.losses(new)[step] for step in range(31, 56)
    ] == mended  # a rung is what the branch will be


@pytest.mark.slow
def test_a_healthy_run_is_told_so_and_a_kill_is_made_good(make, monkeypatch, capsys, told):
    config = make(**(SIZES | {"steps": 22, "checkpoint_every": 4}), recipe="fp8-row", layers=1)
    assert training.run(config) == 0
    run = Path(config.output)
    real, taken = probe.run_probe, []

    def killed_in_the_third(trainer, *given, **more):
        taken.append(len(taken))
        if len(taken) == 3:
            signal.raise_signal(signal.SIGTERM)
        return real(trainer, *given, **more)

    monkeypatch.setattr(probe, "run_probe", killed_in_the_third)
    assert main(["debug", str(run), "--at", "4", "--steps", "18"]) == 75
    assert with_code(told, "debug.stopped")
    rungs = json.loads((run / "debug-4.json").read_text())["rungs"]
    assert [each["name"] for each in rungs] == ["again", "bf16"]
    assert main(["debug", str(run), "--at", "4", "--steps", "18"]) == 0
    assert [each["name"] for each in json.loads((run / "debug-4.json").read_text())["rungs"]][
        :3
    ] == [
        "again",
        "bf16",
        "control",
    ]
    assert len(taken) >= 4 and json.loads((run / "debug-4.json").read_text())["rungs"][:2] == rungs
    with RunFolder.claim(run, resume=True), raises(BusyError, "run.busy", run):
        debug(run, 4)
    for at, expected in (
        (3, coded("run.no-checkpoint", "step 3", "4, 8")),
        (20, coded("debug.too-few-steps", "2 steps", "20")),
    ):
        with raises(ConfigError, expected):
            debug(run, at)
    with raises(ConfigError, "debug.counts"):
        debug(run, 4, 0)


def test_a_folder_that_is_none_is_named_as_by_other_commands(tmp_path, capsys):
    """And one without a checkpoint says what to do next."""
    assert main(["debug", str(tmp_path / "gone"), "--at", "10"]) == 2
    said = capsys.readouterr().err
    assert (
        f"{tmp_path / 'gone'}: is not there. Name the folder of a run" in said
        and "checkpoint" not in said
    )
    (tmp_path / "empty").mkdir()
    assert main(["debug", str(tmp_path / "empty"), "--at", "10"]) == 2
    assert "has no config.toml. Name the folder of a run" in capsys.readouterr().err


def test_a_run_without_a_checkpoint_is_told_what_to_do(make, capsys):
    folder = RunFolder(Path((config := make()).output))
    folder.path.mkdir()
    folder.write_config(config)
    with raises(ConfigError, "run.no-checkpoint"):
        debug(folder.path, 10)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        # A run of 20 steps after its checkpoint of step 0: the flags ask for too few of them, the run has enough.
        (
            (6, 4, 0, 20, 20),
            coded("debug.stretch", "--at 6", "--steps 4", "10 steps", "step 0"),
        ),
        (
            (18, 100, 10, 20, 20),
            coded("debug.too-few-steps", "10 steps", "step 10", "its end", "--at"),
        ),
        ((20, 100, 20, 20, 20), coded("debug.too-few-steps", "0 steps", "step 20", "its end")),
        ((12, 100, 10, 17, 60), coded("debug.too-few-steps", "7 steps", "step 10", "18")),
    ],
)
def test_too_few_steps_are_counted_where_they_are_missing(tmp_path, asked, words):
    """Steps that the run has and steps that the flags ask for are two numbers with two remedies."""
    with raises(ConfigError, words):
        steps_taken(tmp_path, *asked)


def test_the_advice_on_too_few_steps_is_enough(tmp_path):
    assert (
        steps_taken(tmp_path, 6, 10, 0, 20, 20) == 16
        and steps_taken(tmp_path, 6, 100, 0, 20, 20) == 20
    )
