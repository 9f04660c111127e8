"""The run folder: one holder, one run, and refusals before any work is done (exact)."""

import dataclasses
import json
import math
import os
import signal
import subprocess
from pathlib import Path

import pytest

from narrowgauge import storage
from narrowgauge.diagnose.runs import read_run
from narrowgauge.errors import BusyError, ConfigError, StorageError
from narrowgauge.train.config import toml
from narrowgauge.train.config.settings import TrainConfig, resolved
from narrowgauge.train.metrics import MetricsLog
from narrowgauge.train.parallel.followers import claimed as claimed_by
from narrowgauge.train.parallel.ranks import Ranks
from narrowgauge.train.run_folder import LATEST, RunFolder, refuse_other_run
from tests.processes import PYTHON, ROOT, as_nobody
from tests.raising import raises

HOLDER = """
import sys
from pathlib import Path
from narrowgauge.train.run_folder import RunFolder
with RunFolder.claim(Path(sys.argv[1]), resume=True):
    print("held", flush=True)
    sys.stdin.read()
"""

STARTER = """
import sys
from narrowgauge.train.run_folder import LATEST, RunFolder
with RunFolder.claim(LATEST, resume=False) as folder:
    print(folder.path, flush=True)
    sys.stdin.read()
"""


def start_holder(path: Path) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [PYTHON, "-c", HOLDER, str(path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
    )
    assert process.stdout and process.stdout.readline() == b"held\n"
    return process


def claimed(path: Path, resume: bool) -> None:
    with RunFolder.claim(path, resume=resume):
        pass


def train_something(folder: RunFolder) -> None:
    with MetricsLog(folder.metrics) as log:
        log.write("step", 1, loss=1.0)


def test_a_new_folder_is_made_with_its_parents(tmp_path):
    config = resolved(TrainConfig(prompt="é\n"))
    with RunFolder.claim(tmp_path / "runs" / "a b é", resume=False) as folder:
        folder.write_config(config)
        folder.write_run({"recipe": "bf16", "unigram_entropy": math.inf})
        assert toml.load(folder.config) == config
        assert read_run(folder.run) == {"recipe": "bf16", "unigram_entropy": math.inf}
        json.loads(folder.run.read_text(), parse_constant=pytest.fail)
    assert sorted(os.listdir(folder.path)) == ["config.toml", "lock", "run.json"]


def test_a_second_process_is_refused_and_a_killed_one_frees_the_folder(tmp_path):
    holder = start_holder(tmp_path)
    try:
        with raises(BusyError, "run.busy", holder.pid, os.uname().nodename) as caught:
            claimed(tmp_path, resume=True)
        assert caught.value.exit_code == 7 and str(tmp_path) in str(caught.value)
    finally:
        holder.send_signal(signal.SIGKILL)
        holder.communicate()
    claimed(tmp_path, resume=True)


def test_the_lock_is_given_back_on_the_way_out_and_after_a_refusal(tmp_path):
    with RunFolder.claim(tmp_path, resume=False) as folder:
        train_something(folder)
    for number in (2, 3):
        with raises(ConfigError, "run.exists", "--resume", f"--output {tmp_path}-{number}"):
            claimed(tmp_path, resume=False)
        tmp_path.with_name(f"{tmp_path.name}-{number}").mkdir()
    with RunFolder.claim(tmp_path, resume=True):
        pass


def test_a_run_in_the_current_folder_names_a_folder_beside_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with RunFolder.claim(Path("."), resume=False) as folder:
        train_something(folder)
    with raises(ConfigError, "run.exists", f"--output {tmp_path}-2"):
        claimed(Path("."), resume=False)


@pytest.mark.parametrize(
    "name", ["config.json", "adapter_config.json", "export.json", "model.gguf"]
)
def test_no_run_begins_in_the_folder_of_a_model(name, tmp_path):
    """Its config.toml would hide the model. A run that is there already goes on."""
    (tmp_path / name).write_text("{}")
    with raises(ConfigError, "run.holds-model", name), claimed_by(tmp_path, False, Ranks()):
        pass
    assert [each.name for each in tmp_path.iterdir()] == [name]
    train_something(RunFolder(tmp_path))
    with claimed_by(tmp_path, True, Ranks()):
        pass


def test_the_same_process_cannot_claim_twice(tmp_path):
    with RunFolder.claim(tmp_path, resume=True), raises(BusyError, "run.busy", os.getpid()):
        claimed(tmp_path, resume=True)


@pytest.mark.parametrize("trace", ["metrics.jsonl", "checkpoints/step-00000001", "final"])
def test_what_was_trained_counts_as_a_run(tmp_path, trace):
    path = tmp_path / trace
    path.parent.mkdir(exist_ok=True)
    if trace == "metrics.jsonl":
        path.write_text("{}\n")
    else:
        path.mkdir()
    with raises(ConfigError, "run.exists"):
        claimed(tmp_path, resume=False)


def test_a_start_that_failed_before_training_is_no_run(tmp_path):
    with RunFolder.claim(tmp_path, resume=False) as folder:
        folder.write_config(TrainConfig())
        folder.checkpoints.mkdir()
        folder.metrics.touch()
    with RunFolder.claim(tmp_path, resume=False):
        pass


def test_leftovers_of_a_crash_are_cleared_and_others_kept(tmp_path):
    for name in (".tmp-step-00000001-7", "mine"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    claimed(tmp_path, resume=False)
    assert os.listdir(tmp_path / "checkpoints") == ["mine"]


def test_a_folder_that_cannot_be_written_is_refused_before_training(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    with raises(StorageError, "storage.refused", "use") as caught:
        claimed(tmp_path / "file" / "run", resume=False)
    assert caught.value.exit_code == 8

    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage, "write_synced", full)
    with raises(StorageError, "storage.refused", "write"):
        claimed(tmp_path / "full", resume=False)
    monkeypatch.undo()
    claimed(tmp_path / "full", resume=False)  # the lock was given back


def test_a_read_only_folder_is_refused(tmp_path):
    tmp_path.chmod(0o555)
    with as_nobody(), pytest.raises(StorageError, match="Permission denied"):
        claimed(tmp_path / "run", resume=False)
    tmp_path.chmod(0o755)
    assert os.listdir(tmp_path) == []


def test_naming_a_folder_touches_nothing(tmp_path):
    folder = RunFolder(tmp_path / "absent")
    assert not folder.has_run() and not folder.path.exists()


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 500},
        {"device": "cpu"},
        {"keep": 5},
        {"output": "moved"},
        {"resume": True},
        {"compare": "bf16"},
    ],
)
def test_a_resumed_run_may_change_how_long_and_where(change):
    refuse_other_run(TrainConfig(), TrainConfig(**change))


def test_a_resumed_run_may_not_become_another():
    stored = TrainConfig()
    free = {"steps", "device", "threads", "compile", "micro_batches", "cache"}
    fixed = {each.name for each in dataclasses.fields(stored) if not each.metadata["free"]} - free
    assert {
        "hidden_size",
        "data",
        "recipe",
        "layers_recipe",
        "precision",
        "batch_size",
        "learning_rate",
        "seed",
    } <= fixed
    with pytest.raises(ConfigError) as caught:
        refuse_other_run(stored, TrainConfig(layers=2, layers_recipe={"lm_head": "bf16"}))
    assert "model.layers = 2, but the run has 6" in str(caught.value)
    assert "recipe.layers = {'lm_head': 'bf16'}, but the run has {}" in str(caught.value)


def begin_numbered(*, trains: bool = True, resume: bool = False) -> str:
    """Path of the folder that a run without --output gets. Without `trains` the start fails."""
    with RunFolder.claim(LATEST, resume=resume) as folder:
        if trains:
            train_something(folder)
        else:
            folder.give_up()
        return str(folder.path)


def test_runs_number_themselves_and_latest_is_a_link_to_the_newest(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    # A failed start leaves no link, and its number for the next one.
    assert begin_numbered(trains=False) == "runs/1" and not os.path.lexists(LATEST)
    assert [begin_numbered() for _ in range(3)] == ["runs/1", "runs/2", "runs/3"]
    assert os.readlink(LATEST) == "3" and RunFolder(LATEST).has_run()
    assert [begin_numbered(trains=False) for _ in range(2)] == ["runs/4", "runs/4"]
    assert os.readlink(LATEST) == "3" and begin_numbered(resume=True) == "runs/3"
    assert begin_numbered() == "runs/4" and os.readlink(LATEST) == "4"
    # Numbers go on above the highest, and other names do not count.
    storage.remove(Path("runs/2"))
    for name in ("007", "9", "x"):
        Path("runs", name).mkdir()
    assert begin_numbered() == "runs/5"
    # The newest run was removed, so the link leads nowhere.
    storage.remove(Path("runs/5"))
    assert begin_numbered() == "runs/5" and os.readlink(LATEST) == "5"


def test_a_number_that_another_process_holds_is_passed_over(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert begin_numbered(trains=False) == "runs/1"
    with RunFolder.claim(LATEST, resume=False) as first:
        assert str(first.path) == "runs/1" and begin_numbered() == "runs/2"
    with RunFolder.claim(LATEST, resume=True), raises(BusyError, "run.busy"):
        begin_numbered(resume=True)


def test_a_folder_of_earlier_versions_or_one_that_is_named_is_not_numbered(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with RunFolder.claim(LATEST.absolute(), resume=False) as folder:
        train_something(folder)
    with raises(ConfigError, "run.exists"):
        begin_numbered()
    assert begin_numbered(resume=True) == "runs/latest"


@pytest.mark.slow
def test_starts_at_the_same_time_get_different_numbers(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    started = [
        subprocess.Popen(
            [PYTHON, "-c", STARTER],
            cwd=tmp_path,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
        )
        for _ in range(6)
    ]
    names = {process.stdout.readline().decode().strip() for process in started if process.stdout}
    for process in started:
        process.communicate()
    assert names == {f"runs/{number}" for number in range(1, 7)}
    assert f"runs/{os.readlink(tmp_path / LATEST)}" in names
