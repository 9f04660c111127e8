"""A run on a disk that loses its power at every sync and rename: what was acknowledged is there, the rest is whole or absent (exact)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from transformers import AutoTokenizer, LlamaForCausalLM

from narrowgauge import manifest, storage
from narrowgauge.diagnose.runs import read_metrics, read_run
from narrowgauge.train import loop
from narrowgauge.train.checkpoint import store
from narrowgauge.train.config import toml
from narrowgauge.train.config.settings import replace
from narrowgauge.train.metrics import MetricsLog
from tests.power import PowerCuts
from tests.train import tiny

NAMES = ("synced", "now")
LOSABLE = {"lock"}  # of no use to the next process
ENTRIES = {"final", "checkpoints", "best", "metrics.jsonl", "report.html", "run.json"}


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_finished_run_is_on_the_disk_and_its_model_loads(make, tmp_path, with_report):
    """Exit code 0 is an acknowledgement: every file of the run is as it was, but for its lock."""
    config = make(
        "runs/new/run",
        steps=3,
        layers=1,
        checkpoint_every=2,
        eval_every=1,
        best="loss",
        sample_tokens=4,
    )
    folder = Path(config.output)
    with PowerCuts() as disk:
        assert loop.run(config) == 0
        left = [disk.left(folder, names) for names in NAMES]
        finals = [disk.restore(folder, tmp_path / names, names) / "final" for names in NAMES]
        above = disk.left(folder.parents[1], "synced")
    written = contents(folder)
    for files in left:
        assert {name for name in written if files.get(name) != written[name]} <= LOSABLE
        assert {name.split("/")[0] for name in files} >= ENTRIES
    for final in finals:
        LlamaForCausalLM.from_pretrained(final)
        assert len(AutoTokenizer.from_pretrained(final)) == 300
    assert {
        "new/run/report.html",
        "new/run/final/config.json",
        "new/run/metrics.jsonl",
    } <= above.keys()


@pytest.mark.slow
def test_at_every_moment_the_run_can_go_on_and_nothing_is_half_there(make, tmp_path, with_report):
    """A cut after each sync and each rename. The oracle: what the log says of checkpoints is what a user was told."""
    config = make(steps=2, layers=1, checkpoint_every=1, keep=1, eval_every=1, best="loss")
    folder, left = Path(config.output), tmp_path / "left"
    told, moments = [0], [0]
    save = store.save

    def look(what: str) -> None:
        if folder.is_dir():
            moments[0] += 1
            for names in NAMES:
                look_at(names)

    def look_at(names: str) -> None:
        shutil.rmtree(left, ignore_errors=True)
        left.mkdir()
        disk.restore(folder, left, names)
        storage.recover(left / "checkpoints", manifest.STEP.pattern)
        storage.recover(left, "final")
        found, skipped = store.newest_valid(left / "checkpoints")
        assert not skipped and (found.step if found else 0) >= told[0]
        logged = {
            event["step"]
            for event in read_metrics(left / "metrics.jsonl")
            if event["event"] == "step"
        }
        if found is not None:
            assert logged >= set(range(1, found.step + 1))
            if best := found.facts["best"]:
                manifest.verify(left / "best" / f"step-{best['step']:08}")
        for name, read in (("config.toml", toml.load), ("run.json", read_run)):
            if (left / name).exists():
                read(left / name)
        if (left / "final").exists():
            for path in (left / "final").iterdir():
                assert path.stat().st_size, path.name
            json.loads((left / "final" / "config.json").read_text())

    def saving(place: Path, step: int, *rest):
        path = save(place, step, *rest)
        if place.name == "checkpoints":
            told[0] = step
        return path

    with PowerCuts(look) as disk, pytest.MonkeyPatch.context() as patch:
        patch.setattr(store, "save", saving)
        assert loop.run(config) == 0
        assert loop.run(replace(config, resume=True, steps=3)) == 0  # replaces final and report
    assert told == [3] and moments[0] > 60


def test_a_line_of_a_checkpoint_that_a_kill_has_lost_is_written_again(make, monkeypatch):
    """Killed between the checkpoint and its line; and a run that lost nothing gets no second line."""
    config = make(steps=4, layers=1, checkpoint_every=2)
    write = MetricsLog.write

    def killed(log, event, step, **values):
        if event == "checkpoint":
            raise KeyboardInterrupt
        write(log, event, step, **values)

    with monkeypatch.context() as patch:
        patch.setattr(MetricsLog, "write", killed)
        with pytest.raises(KeyboardInterrupt):
            loop.run(config)
    folder = Path(config.output)
    assert not tiny.events(folder, "checkpoint")
    for _ in range(2):
        assert loop.run(replace(config, resume=True)) == 0
        raw = [
            json.loads(line) for line in (folder / "metrics.jsonl").read_text("utf-8").splitlines()
        ]
        saved = [(event["step"], event["path"]) for event in raw if event["event"] == "checkpoint"]
        assert saved == [(2, "checkpoints/step-00000002"), (4, "checkpoints/step-00000004")]


def test_a_file_that_is_never_synced_is_lost(tmp_path):
    """The simulation itself: a test that no run could fail would prove nothing."""
    with PowerCuts() as disk:
        (tmp_path / "lost").write_bytes(b"never synced")
        storage.write_synced(tmp_path / "nameless", b"synced, but its folder is not")
        assert disk.left(tmp_path, "synced") == {}
        assert disk.left(tmp_path, "now") == {
            "lost": b"",
            "nameless": b"synced, but its folder is not",
        }
        storage.replace_file(tmp_path / "kept", "synced")
        (tmp_path / "kept").write_bytes(b"written over")
        assert disk.left(tmp_path, "synced")["kept"] == b"synced"
        storage.make_folder(tmp_path / "a" / "b")
        (tmp_path / "a" / "b" / "c").write_bytes(b"x")
        storage.flush_tree(tmp_path / "a")
        assert disk.left(tmp_path, "synced")["a/b/c"] == b"x"
