"""Whole studies of runs of a second: killed, stopped, gone on with, and judged (exact, but for the statistics of the verdict)."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from narrowgauge.cli import main
from narrowgauge.diagnose.runs import read_metrics
from narrowgauge.errors import EXIT_CANNOT_TELL
from narrowgauge.lab.study import runner
from narrowgauge.lab.study.plan import Study
from narrowgauge.train.config import toml
from narrowgauge.train.config.settings import replace
from tests.processes import ROOT, run_ok
from tests.train import tiny

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(900),
]  # a dozen processes that import torch, one after the other
# One of the 128 targets that are evaluated weighs more than 0.25 % of the loss: such a study cannot tell.
SETTINGS = {"steps": 60, "eval_every": 20, "checkpoint_every": 10}


@pytest.fixture
def file(text, tmp_path):
    config = tiny.settings(text, tmp_path / "none", **SETTINGS)
    path = tmp_path / "settings.toml"
    path.write_text(toml.dump(config), encoding="utf-8")
    return path


def command(file, study, seeds=2):
    return [
        "study",
        str(file),
        "--recipes=bf16,fp8-current",
        f"--seeds={seeds}",
        f"--output={study}",
        "--parallel=2",
    ]


def start(file, study):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-m", "narrowgauge", *command(file, study)], env=environment
    )


def wait_for(study, found):
    """Until `found` is true of an event of a run."""
    until_s = time.monotonic() + 240
    while time.monotonic() < until_s:
        if any(
            found(event)
            for path in study.glob("*-seed*/metrics.jsonl")
            for event in read_metrics(path)
        ):
            return
        time.sleep(0.02)
    raise AssertionError("no run came so far")


def losses(folder):
    return {
        (event["event"], event["step"]): event["loss"]
        for event in read_metrics(folder / "metrics.jsonl")
        if "loss" in event
    }


def test_killed_and_stopped_studies_end_as_undisturbed_runs(file, tmp_path):
    study = tmp_path / "study"
    first = start(file, study)
    wait_for(study, lambda event: event["event"] == "step" and event["step"] >= 5)
    first.kill()
    first.wait()
    second = start(file, study)  # at once: the runs that were left alone end by themselves
    wait_for(study, lambda event: event["event"] == "resume")  # its handlers stand long before
    second.send_signal(signal.SIGINT)
    assert second.wait() == 130
    assert main(command(file, study)) == EXIT_CANNOT_TELL
    folder, alone = study / "fp8-current-seed0", tmp_path / "alone"
    assert any(event["event"] == "resume" for event in read_metrics(folder / "metrics.jsonl"))
    run_ok(
        [sys.executable, "-m", "narrowgauge", "train", folder / "asked.toml", f"--output={alone}"]
    )
    assert losses(folder) == losses(alone) and tiny.digests(folder) == tiny.digests(alone)
    [event] = [
        event for event in read_metrics(study / "metrics.jsonl") if event["event"] == "study"
    ]
    [verdict] = event["verdicts"]
    assert (
        verdict["seeds"] == [0, 1]
        and len(verdict["differences"]) == 2
        and event["reference"] == "bf16"
    )
    assert (study / "report.html").stat().st_size > 10_000


def test_a_finished_study_trains_nothing_and_one_seed_more_trains_that(file, tmp_path):
    study = tmp_path / "study"
    assert main(command(file, study)) == EXIT_CANNOT_TELL
    before = {path: path.stat().st_mtime_ns for path in study.glob("*-seed*/metrics.jsonl")}
    config = replace(toml.load(file), resume=False)
    asked = Study(
        config=config, recipes=("bf16", "fp8-current"), seeds=(0, 1, 2), output=study, margin="5%"
    )
    result = runner.run(asked)
    assert result.exit_code in (
        0,
        EXIT_CANNOT_TELL,
    )  # by what three seeds of so short runs show of the control
    assert [verdict.seeds for verdict in result.verdicts] == [(0, 1, 2)]
    assert {path: path.stat().st_mtime_ns for path in before} == before
    facts = json.loads((study / "study.json").read_text())
    assert facts["looks"] == [2, 3] and facts["margins"] == ["0.25%", "5%"]
    page = (study / "report.html").read_text(encoding="utf-8")
    assert "2, then 3" in page and "0.25%" in page


def test_data_that_have_changed_are_refused(own_text, tmp_path):
    file, study = tmp_path / "settings.toml", tmp_path / "study"
    file.write_text(
        toml.dump(tiny.settings(own_text, tmp_path / "none", steps=2)), encoding="utf-8"
    )
    assert main(command(file, study)) == EXIT_CANNOT_TELL
    (Path(own_text) / "more.txt").write_text("Another document.\n" * 40, encoding="utf-8")
    assert main(command(file, study, seeds=3)) == 3
    assert not (study / "bf16-seed2").exists()
