"""The folder of a run: paths of its files, its number, the lock, and checks that a resumed run is the same run.

The layout is in docs/architecture.md. One process holds a run at a time. It locks the file `lock`
with flock, which the kernel releases when the process ends, even by kill -9.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import IO, Any, Self

from narrowgauge import storage
from narrowgauge.diagnose.runs import encode
from narrowgauge.errors import BusyError, ConfigError, StorageError
from narrowgauge.manifest import STEP
from narrowgauge.storage import reading
from narrowgauge.train.config import toml
from narrowgauge.train.config.settings import TrainConfig, differences

# The default of `output`. New runs there are numbered, and it is a link to the newest.
LATEST = Path(TrainConfig.output)
LOCK = reading.Kind(
    most_bytes=reading.MIB,
    error=StorageError,
    step="Remove it if no run uses the folder, or choose another --output.",
)
# Settings that may change when a run resumes, besides those that are declared `free`: they decide
# on which machine and how long it trains. A branch inherits them.
MAY_CHANGE = frozenset(
    {
        "steps",
        "device",
        "threads",
        "compile",
        "keep_freed",
        # The checkpoint itself refuses another value. Older checkpoints lack the key and resume
        # with "none" alone.
        "keep_float32",
        "micro_batches",
        "cache",
        "checkpointing",
        "epochs",
        "cuda_graph",
        "parallel",
        "schedule",
    }
)


# Files of a model, an adapter or an export. A run's config.toml beside them would hide them.
OF_MODELS = (
    "config.json", "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "adapter_config.json", "export.json",
    "model.gguf",
)  # fmt: skip


def refuse_model(path: Path) -> None:
    """Raises ConfigError if a new run or study would begin in the folder of a model."""
    found = next((name for name in OF_MODELS if os.path.lexists(path / name)), "")
    if found:
        raise ConfigError(
            f"output = '{path}': holds a model ({found}), which a run's files would hide. Choose another --output.",
            code="run.holds-model",
        )


def _next_free(path: Path) -> str:
    """The first of runs/mine-2, runs/mine-3, ... that does not exist, as a shell takes it."""
    base = path if path.name else path.absolute()  # "." has no name of its own
    names = (base.parent / f"{base.name}-{number}" for number in count(2))
    return shlex.quote(str(next(each for each in names if not os.path.lexists(each))))


def is_numbered(path: Path) -> bool:
    """True if a new run at `path` takes a number: runs/1, runs/2, ... at runs/latest.

    False for a folder of this name, which earlier versions made.
    """
    return path == LATEST and (path.is_symlink() or not os.path.lexists(path))


def _numbers(runs: Path) -> Iterator[Path]:
    """Folders for the next run: the numbers above all runs of the folder `runs`.

    The folder of a failed start, in which nothing was trained, is used again.
    """
    names = os.listdir(runs) if runs.is_dir() else []
    there = sorted(
        (int(name) for name in names if re.fullmatch("[1-9][0-9]{0,8}", name)), reverse=True
    )
    newest = next((number for number in there if RunFolder(runs / str(number)).has_run()), 0)
    yield from (runs / str(number) for number in count(newest + 1))


def _target(link: Path) -> str:
    """Name of the folder that `link` names; '' if there is no link."""
    return os.readlink(link) if link.is_symlink() else ""


class RunFolder:
    """Paths of a run.

    `RunFolder(path)` creates nothing; `RunFolder.claim` creates the folder and locks it.

    at  the only step whose checkpoint is loaded; 0: no checkpoint; None: the newest
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.toml"
        self.run = path / "run.json"
        self.metrics = path / "metrics.jsonl"
        self.checkpoints = path / "checkpoints"
        self.best = path / "best"
        self.guard = path / "guard"
        self.final = path / "final"
        self.merged = path / "merged"
        self.lock = path / "lock"
        self.tensorboard = path / "tensorboard"
        self.at: int | None = None
        self._before: str | None = None  # of a numbered run: the run before it, '' if none

    @classmethod
    @contextmanager
    def reading(cls, path: Path) -> Iterator[Self]:
        """The folder of a run, for reading only. Raises BusyError if another process trains there.

        The shared lock keeps training out while the block runs.
        """
        with ExitStack() as held:
            if os.path.lexists(path / "lock"):
                lock = held.enter_context(reading.opened(path / "lock", LOCK))
                try:
                    fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise BusyError(
                        f"{path}: {_holder(lock)} is training there, and removes checkpoints as it goes. Wait for it, or stop it: "
                        "it goes on with --resume.",
                        code="run.busy",
                    ) from None
            yield cls(path)

    @classmethod
    @contextmanager
    def claim(cls, path: Path, resume: bool) -> Iterator[Self]:
        """Creates (if necessary) and locks the run folder.

        Tests that it is writable, and removes leftovers of a crash.

        A new run at runs/latest gets the next number as its folder, and runs/latest becomes a link to it.
        A resumed run there gets the folder that the link names. So `path` of the result may differ.

        Raises BusyError if another process holds the folder, ConfigError if it holds a run and
        `resume` is false, and StorageError if it is not writable.
        """
        if not is_numbered(path):
            with cls._claim(path, resume) as folder:
                yield folder
        elif resume:
            with cls._claim(
                path.parent / os.readlink(path) if path.is_symlink() else path, resume
            ) as folder:
                yield folder
        else:
            with ExitStack() as held:
                folder = cls._claim_number(path.parent, held)
                folder._before = _target(path)
                storage.replace_link(path, folder.path.name)
                yield folder

    @classmethod
    def _claim_number(cls, runs: Path, held: ExitStack) -> Self:
        for path in _numbers(runs):
            try:
                return held.enter_context(cls._claim(path, resume=False))
            except BusyError:  # another run begins there
                continue
            except ConfigError as error:  # another run has begun there since
                if error.code != "run.exists":
                    raise
        raise AssertionError("numbers have no end")

    def give_up(self) -> None:
        """After a numbered run failed before it trained: runs/latest names the run before it again."""
        if self._before is None or self.has_run() or _target(LATEST) != self.path.name:
            return
        if self._before:
            storage.replace_link(LATEST, self._before)
        else:
            LATEST.unlink()

    @classmethod
    @contextmanager
    def _claim(cls, path: Path, resume: bool) -> Iterator[Self]:
        folder = cls(path)
        with ExitStack() as held:
            with storage.refusals("use the run folder", path):
                storage.make_folder(path)
                # Closing releases the lock. Do not unlink the file: another process may hold a lock
                # on it already.
                lock = held.enter_context(reading.opened_to_append(folder.lock, LOCK))
                hold(lock, path)
            if folder.has_run() and not resume:
                raise ConfigError(
                    f"output = '{path}': holds a run already. Continue it with --resume, or take another, as --output {_next_free(path)}.",
                    code="run.exists",
                )
            storage.probe(path)
            for checkpoints in (folder.checkpoints, folder.best, folder.guard):
                storage.recover(checkpoints, STEP.pattern)
            # A power cut during the export may have left the older final/ under another name.
            for exported in (folder.final, folder.merged):
                storage.recover(path, exported.name)
            yield folder

    def has_run(self) -> bool:
        """True if something was trained here.

        A failed start, which leaves only a configuration, does not count.
        """
        if os.path.lexists(self.final) or (
            os.path.lexists(self.metrics) and self.metrics.lstat().st_size > 0
        ):
            return True
        return self.checkpoints.is_dir() and any(
            STEP.fullmatch(each.name) for each in self.checkpoints.iterdir()
        )

    def write_config(self, config: TrainConfig) -> None:
        storage.replace_file(self.config, toml.dump(config))

    def write_run(self, facts: Mapping[str, Any]) -> None:
        storage.replace_file(self.run, encode(facts, indent=1) + "\n")


def hold(lock: IO[bytes], path: Path) -> None:
    """Locks the folder at `path` and writes the holder's pid and host.

    Raises BusyError if another process holds it.
    """
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise BusyError(
            f"output = '{path}': {_holder(lock)} is training there. Wait for it, stop it, or choose another --output.",
            code="run.busy",
        ) from None
    lock.truncate(0)
    lock.write(json.dumps({"pid": os.getpid(), "host": os.uname().nodename}).encode())


def _holder(lock: IO[bytes]) -> str:
    """Describes the process that holds the lock."""
    lock.seek(0)
    try:
        holder = reading.strict_json(lock.read(LOCK.most_bytes))
        return f"process {holder['pid']} on {holder['host']}"
    # The holder has the lock but has not written its name yet
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def refuse_other_run(stored: TrainConfig, config: TrainConfig) -> None:
    """Raises ConfigError if `config` would change a setting that a resumed run must keep."""
    changes = differences(
        config,
        stored,
        "the run",
        lambda each: (
            (not each.metadata["free"] or each.name == "parent") and each.name not in MAY_CHANGE
        ),
    )
    if changes:
        listed = "; ".join(changes)
        raise ConfigError(
            f"output = '{config.output}': cannot resume with {listed}. Drop the change, or start a branch, which has a folder and a log of "
            f"its own: narrowgauge train --from {shlex.quote(config.output)} --output NEW, with the changes.",
            code="resume.changed",
        )
