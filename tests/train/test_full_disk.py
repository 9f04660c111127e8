"""A disk that is full from some write on, in a guarded run and in one that leaves a batch out (exact).

Each kind of write is refused once, and all that follow: the run ends in one sentence, what was saved before is whole, and the run goes on
to the end of one that had room.
"""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from narrowgauge import manifest, storage
from narrowgauge.errors import StorageError
from narrowgauge.lab import training
from narrowgauge.train.metrics import MetricsLog
from tests.lab import spiking_run
from tests.lab.killed_guard import SICK, hurt
from tests.lab.spiking_run import LONG
from tests.train import tiny
from tests.train.test_loop import installed  # noqa: F401


class Disk:
    """Counts writes by what they are for; from the one at `full` on, none succeeds."""

    def __init__(self, patch):
        self.labels, self.full = list[str](), -1
        write_synced, write = storage.write_synced, MetricsLog.write

        def synced(path, data):
            parent = (
                path.parent.parent.name
                if path.parent.name.startswith(".tmp-step")
                else path.parent.name
            )
            self.take(f"{parent}/{path.name}")
            write_synced(path, data)

        def logged(log, event, step, **values):
            with storage.refusals("append to", log.path):
                self.take(event)
            write(log, event, step, **values)

        patch.setattr(storage, "write_synced", synced)
        patch.setattr(MetricsLog, "write", logged)

    def take(self, label):
        self.labels.append(label)
        if 0 <= self.full < len(self.labels):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def has_room(self, full=-1):
        self.labels, self.full = [], full

    def places(self, wanted=lambda label: True):
        """The first and the last write of each kind."""
        kinds = dict.fromkeys(label for label in self.labels if wanted(label))
        last = {label: place for place, label in enumerate(self.labels)}
        return sorted(
            {*(self.labels.index(kind) for kind in kinds), *(last[kind] for kind in kinds)}
        )


@pytest.fixture
def disk(monkeypatch):
    return Disk(monkeypatch)


def ended(config):
    folder = Path(config.output)
    events = [each for kind in ("guard", "spike", "rewind") for each in tiny.events(folder, kind)]
    told = [{key: value for key, value in each.items() if key != "spent_s"} for each in events]
    return tiny.losses(folder), tiny.digests(folder), told


def refused_at(disk, place, config, expected):
    disk.has_room(place)
    with pytest.raises(
        StorageError,
        match=r"(?s)\A[^\n]*No space left on device[^\n]*Free some space, or [^\n]*\.\Z",
    ):
        training.run(config)
    label = disk.labels[place]
    for path in manifest.newest_first(Path(config.output) / "checkpoints"):
        manifest.verify(path)
    disk.has_room()
    assert training.run(replace(config, resume=True)) == 0, label
    assert ended(config) == expected, label


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("share", range(3))
@pytest.mark.parametrize("then", ["stay", "bf16"])
def test_a_guarded_run_on_a_full_disk(make, installed, disk, then, share):  # noqa: F811
    """Also where the reference in BF16 becomes the run. Each check begins at a checkpoint, from which it begins anew."""
    installed(hurt)
    common = {**SICK, "guard": f"every=4,steps=2,margin=0.02%,then={then}", "checkpoint_every": 2}
    whole = make("whole", **common)
    assert training.run(whole) == 0
    expected, places = ended(whole), disk.places()
    names = {disk.labels[place] for place in places}
    assert {"guard", "rewind", "checkpoint", "checkpoints/facts.json"} <= names
    for place in places[share::3]:
        refused_at(disk, place, make(f"at-{place}", **common), expected)


@pytest.mark.slow
def test_a_run_that_leaves_a_batch_out_on_a_full_disk(make, monkeypatch, disk):
    spiking_run.corrupt(monkeypatch)
    common = {**LONG, "on_spike": "skip"}
    whole = make("whole", **common)
    assert training.run(whole) == 0
    expected, first = ended(whole), disk.labels.index("spike")
    assert disk.labels[first : first + 2] == ["spike", "rewind"]
    behind = disk.labels[first:].index("checkpoint") + first
    for place in (first, first + 1, first + 2, behind - 2, behind):
        refused_at(disk, place, make(f"at-{place}", **common), expected)
