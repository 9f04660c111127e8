"""Experiment trackers: each package's own reader gives back what was logged (exact), once for each step.

Stand-ins for a package test what narrowgauge does around it; the packages themselves are tried where they are installed.
"""

from __future__ import annotations

import json
import struct
import sys
import time
import types
import warnings

import pytest

from narrowgauge.diagnose.runs import read_metrics
from narrowgauge.errors import ConfigError, StorageError
from narrowgauge.train import trackers
from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.metrics import MetricsLog
from tests.raising import raises

STEP = {"grad_norm": 1.5, "lr": 0.25, "tokens": 8}


class Recording:
    """A tracker that keeps what it gets, by run."""

    def __init__(self, name, run, settings, folder):
        self.id, self.closed = run or f"{name}-1", None
        self.runs = RUNS.setdefault(self.id, [])
        OPENED.append(self)
        self.settings = dict(settings)

    def log(self, values, step):
        if step in FAILS_AT:
            raise ConnectionError("no route\nto the host")
        self.runs.extend((step, name, value) for name, value in values.items())

    def close(self, has_failed):
        self.closed = has_failed
        if "close" in FAILS_AT:
            raise ConnectionError("gone")


RUNS: dict[str, list] = {}
OPENED: list[Recording] = []
FAILS_AT: set = set()


@pytest.fixture
def recording(monkeypatch):
    for each in (RUNS, OPENED, FAILS_AT):
        each.clear()
    monkeypatch.setitem(trackers.KINDS, "wandb", Recording)


def logged(folder, *events, names="wandb"):
    """One process of a run: a log with trackers, which gets (event, step, loss)."""
    config = TrainConfig(output=str(folder), log_to=names)
    with MetricsLog(folder / "metrics.jsonl", None, trackers.of_run(config, folder)) as log:
        for event, step, loss in events:
            log.write(event, step, loss=loss, **(STEP if event == "step" else {"tokens": 8}))


def steps(*numbers, loss=1.0):
    return [("step", number, loss / number) for number in numbers]


def sent(run, name="step/loss"):
    return [(step, value) for step, key, value in RUNS[run] if key == name]


def test_a_tracker_gets_the_curves_and_the_settings(recording, tmp_path):
    logged(tmp_path, *steps(1, 2), ("eval", 2, 0.75), ("checkpoint", 2, 0.0))
    [opened], [run] = OPENED, RUNS
    assert sent(run) == [(1, 1.0), (2, 0.5)] and sent(run, "eval/loss") == [(2, 0.75)]
    assert {name for _, name, _ in RUNS[run]} == {"step/loss", "step/grad_norm", "step/lr", "eval/loss"}  # fmt: skip
    assert opened.settings["log.to"] == "wandb" and opened.settings["training.seed"] == 0
    assert all(isinstance(each, bool | int | float | str) for each in opened.settings.values())
    assert opened.closed is False
    assert json.loads((tmp_path / trackers.FILE).read_text()) == {"wandb": run}


def test_a_resumed_run_is_the_same_run_and_has_no_step_twice(recording, tmp_path):
    """Killed after step 5 and resumed from a checkpoint at 3: steps 4 and 5 are repeated."""
    logged(tmp_path, *steps(1, 2, 3, 4, 5), ("eval", 4, 0.5))
    logged(tmp_path, ("resume", 3, 0.0), *steps(4, 5, 6, 7), ("eval", 4, 0.5), ("eval", 6, 0.25))
    [run] = RUNS
    assert sent(run) == [(each, 1.0 / each) for each in range(1, 8)]
    assert sent(run, "eval/loss") == [(4, 0.5), (6, 0.25)]


def test_a_tracker_that_joins_later_gets_the_whole_log(recording, tmp_path):
    logged(tmp_path, *steps(1, 2, 3), names="")
    assert not RUNS and not (tmp_path / trackers.FILE).exists()
    with open(tmp_path / "metrics.jsonl", "ab") as file:
        file.write(b'{"event": "step", "st')  # a killed process
    logged(tmp_path, ("resume", 2, 0.0), *steps(3, 4))
    [run] = RUNS
    assert sent(run) == [(each, 1.0 / each) for each in range(1, 5)]


def test_a_tracker_that_fails_is_dropped_once_and_training_goes_on(recording, tmp_path, capsys):
    FAILS_AT.update({2, 3})
    logged(tmp_path, *steps(1, 2, 3, 4))
    [run] = RUNS
    assert sent(run) == [(1, 1.0)]
    assert len([each for each in read_metrics(tmp_path / "metrics.jsonl")]) == 4
    assert OPENED[-1].closed is True  # as failed: it gets no end otherwise
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1 and "step 2" in told[0] and "ConnectionError: no route (" not in told[0]
    FAILS_AT.clear()
    FAILS_AT.add("close")
    logged(tmp_path, *steps(5))
    assert sent(run) == [(1, 1.0), (5, 0.2)]
    assert "did not end" in capsys.readouterr().err


def test_a_disk_that_refuses_the_ids_ends_the_runs_too(recording, tmp_path, monkeypatch):
    def refuse(*given):
        raise StorageError("the disk is full", code="storage.full")

    monkeypatch.setattr(trackers.storage, "replace_file", refuse)
    with raises(StorageError, "storage.full"):
        logged(tmp_path, *steps(1))
    [opened] = OPENED
    assert opened.closed is True


def test_a_run_that_ends_by_an_error_says_so(recording, tmp_path):
    config = TrainConfig(output=str(tmp_path), log_to="wandb")
    with (
        pytest.raises(ValueError, match="as planned"),
        MetricsLog(tmp_path / "metrics.jsonl", None, trackers.of_run(config, tmp_path)),
    ):
        raise ValueError("as planned")
    assert OPENED[-1].closed is True


def test_what_cannot_begin_is_refused_before_training(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with raises(ConfigError, "trackers.missing-package", "pip install wandb"):
        logged(tmp_path)
    stand_in = types.ModuleType("wandb")
    stand_in.Settings = dict
    stand_in.init = lambda **_: (_ for _ in ()).throw(PermissionError("no API key\nsign in"))
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    with raises(ConfigError, "trackers.not-begun", "PermissionError: no API key"):
        logged(tmp_path)
    assert not (tmp_path / trackers.FILE).exists() and not (tmp_path / "metrics.jsonl").exists()
    with raises(ConfigError, "config.log.to"):
        TrainConfig(log_to="comet")
    (tmp_path / trackers.FILE).write_text("[1]")
    with raises(ConfigError, "file.form", trackers.FILE):
        logged(tmp_path)


def twice(folder, name):
    """A run that was killed after step 3, and resumed from step 2; in the package that `name` names."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logged(folder, *steps(1, 2), ("eval", 2, 0.75), *steps(3), names=name)
        logged(folder, ("resume", 2, 0.0), *steps(3, 4), ("eval", 4, 0.5), names=name)
    return json.loads((folder / trackers.FILE).read_text())[name]


LOSSES = [(1, 1.0), (2, 0.5), (3, 1.0 / 3), (4, 0.25)]
SCORES = [(2, 0.75), (4, 0.5)]


def records_of_wandb(path):
    """wandb's own records, when its process has written the last one: finish() offline does not wait for it."""
    before = time.monotonic()
    while not (found := read_wandb(path.read_bytes())) or not found[-1].HasField("exit"):
        assert time.monotonic() < before + 60
        time.sleep(0.1)
    return found


def read_wandb(data):
    """Records in a file: 7 bytes, then blocks of 32 KiB in LevelDB's log format (crc, length, type)."""
    from wandb.proto import wandb_internal_pb2

    found, place, parts = [], 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        _, size, kind = struct.unpack_from("<IHB", data, place)
        parts += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4) and place <= len(data):  # whole, or the last part
            found.append(wandb_internal_pb2.Record.FromString(parts))
            parts = b""
    return found


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_wandb_reads_back_what_was_logged(monkeypatch, tmp_path):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    run = twice(tmp_path, "wandb")
    found, settings = [], set()
    for path in sorted(tmp_path.glob("wandb/offline-run-*/*.wandb")):
        assert path.name == f"run-{run}.wandb"  # `wandb sync` joins folders of one id
        for record in records_of_wandb(path):
            settings |= {each.key for each in record.run.config.update}
            if record.HasField("history"):
                found.append(
                    {each.key or ".".join(each.nested_key): json.loads(each.value_json) for each in record.history.item}
                )  # fmt: skip
    assert [(row["_step"], row["step/loss"]) for row in found if "step/loss" in row] == LOSSES
    assert [(row["_step"], row["eval/loss"]) for row in found if "eval/loss" in row] == SCORES
    assert {"training.seed", "recipe.name"} <= settings


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_mlflow_reads_back_what_was_logged(monkeypatch, tmp_path):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/store")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri(f"file://{tmp_path}/store")
    (tmp_path / "run").mkdir()
    run = twice(tmp_path / "run", "mlflow")
    client = mlflow.MlflowClient()
    history = {
        key: [(each.step, each.value) for each in client.get_metric_history(run, key)]
        for key in ("step/loss", "eval/loss")
    }
    assert history == {"step/loss": LOSSES, "eval/loss": SCORES}
    found = client.get_run(run)
    assert found.info.status == "FINISHED" and found.data.params["training.seed"] == "0"
    assert found.info.run_name == "run"
    assert client.get_experiment(found.info.experiment_id).name == trackers.PROJECT


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_trackio_reads_back_what_was_logged(monkeypatch, tmp_path):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "store"))
    pytest.importorskip("trackio")
    from trackio import sqlite_storage

    monkeypatch.setattr(sqlite_storage, "TRACKIO_DIR", tmp_path / "store")
    (tmp_path / "run").mkdir()
    run = twice(tmp_path / "run", "trackio")
    rows = sqlite_storage.SQLiteStorage.get_logs(trackers.PROJECT, run)
    for key, expected in (("step/loss", LOSSES), ("eval/loss", SCORES)):
        assert [(row["step"], row[key]) for row in rows if key in row] == expected
