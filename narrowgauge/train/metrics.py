"""The log of a run: one JSON object per line, written unbuffered.

A killed run keeps every finished line. A power cut loses lines that are not synced. The log syncs
before a checkpoint and after the events in SYNCED. Lines of steps after the last checkpoint may be
lost, but the resumed run repeats those steps.

docs/architecture.md lists the events and their keys. `narrowgauge.diagnose.runs` reads the log and
drops lines that a resumed run wrote a second time.
"""

from __future__ import annotations

import errno
import importlib.util
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any, Protocol, Self

from narrowgauge import storage
from narrowgauge.diagnose.metrics_table import METRICS
from narrowgauge.diagnose.runs import encode
from narrowgauge.errors import ConfigError, StorageError
from narrowgauge.storage import reading

SYNCED = frozenset({"checkpoint", "resume", "nonfinite", "done"})
# No limit on the size: the log is only appended to here.
LOG = reading.Kind(
    most_bytes=2**62,
    error=StorageError,
    step="Remove what stands in its place, or choose another --output.",
)
LONGEST_LINE = 16 * reading.MIB
CURVES = {
    "step": ("loss", "grad_norm", "lr", "tokens_per_s", "peak_bytes"),
    "eval": tuple(METRICS),
}


class Curves(Protocol):
    """Receives the events as well (`trackers`). Its methods do not raise."""

    def write(self, event: str, step: int, values: Mapping[str, Any]) -> None: ...

    def close(self, has_failed: bool) -> None: ...


class MetricsLog:
    """Appends events to `path`.

    tensorboard  folder that receives the curves as well; None: no folder
    trackers     experiment trackers that receive them as well; the log closes them
    """

    def __init__(
        self, path: Path, tensorboard: Path | None = None, trackers: Curves | None = None
    ) -> None:
        self.path = path
        self._trackers = trackers
        self._board: Any = None
        self._board_folder = tensorboard or path
        if tensorboard:
            if not importlib.util.find_spec("tensorboard"):
                raise ConfigError(
                    "log.tensorboard = true: the package is not installed. Run: pip install tensorboard.",
                    code="metrics.no-tensorboard",
                )
            from torch.utils.tensorboard import SummaryWriter  # lazy: the import takes 2 s

            self._board = SummaryWriter(str(tensorboard))
        with storage.refusals("append to", path):
            self._file = reading.opened_to_append(path, LOG)
            try:
                _cut_torn_line(self._file, path)
                storage.flush(path.parent)
            except BaseException:
                self._file.close()
                raise

    def write(self, event: str, step: int, **values: Any) -> None:
        """Writes one event, and syncs it if it is in SYNCED.

        Raises StorageError if the write fails.
        """
        line = encode({"event": event, "step": step, **values}).encode() + b"\n"
        with storage.refusals("append to", self.path):
            if self._file.write(line) != len(line):
                # An unbuffered write may be short on a full disk. The next opening removes the torn
                # line.
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if event in SYNCED:
            self.sync()
        if self._board:
            for key in CURVES.get(event, ()):
                if key in values:
                    self._board.add_scalar(f"{event}/{key}", values[key], step)
        if self._trackers:
            self._trackers.write(event, step, values)

    def sync(self) -> None:
        """Waits until all lines so far are on the disk."""
        with storage.refusals("append to", self.path):
            os.fsync(self._file.fileno())

    def close(self, has_failed: bool = False) -> None:
        self._file.close()
        if self._trackers:
            self._trackers.close(has_failed)
        if self._board:
            self._board.close()
            with storage.refusals("write", self._board_folder):
                storage.flush_tree(self._board_folder)
                storage.flush(self._board_folder.parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *exception: object) -> None:
        self.close(has_failed=kind is not None)


def _cut_torn_line(file: IO[bytes], path: Path) -> None:
    """Removes everything after the last newline: a line that a crash cut short."""
    size = file.seek(0, os.SEEK_END)
    start = file.seek(max(0, size - LONGEST_LINE))
    end = file.read(LONGEST_LINE).rfind(b"\n")
    if end < 0 < start:
        raise LOG.refusal(
            path, f"is damaged: its last {LONGEST_LINE} bytes hold no end of a line", "file.form"
        )
    file.truncate(start + end + 1)
