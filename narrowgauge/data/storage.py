"""Files that are either whole or absent: written under another name, flushed to the disk, then renamed."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from narrowgauge.data.text import shown
from narrowgauge.errors import StorageError

# What `temporary` makes of a cache's files, and of the folder of a tokenizer.
ABANDONED = re.compile(r"\.((tokens|examples)-[0-9a-f]{32}|bpe-[0-9]+-[0-9a-f]{16})\..*tmp")
ABANDONED_AFTER_S = 60  # without a write; a maker locks its draft within milliseconds


@contextmanager
def storage(folder: Path) -> Iterator[None]:
    """Turns what the file system refuses below `folder` into a StorageError."""
    try:
        yield
    except OSError as error:
        step = "Free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "Check that it can be written"
        reason = error.strerror or str(error)
        raise StorageError(
            f"{shown(folder)}: the cache cannot be used: {reason}. {step}, or pass another cache folder."
        ) from error


def temporary(path: Path) -> Path:
    """A name beside `path` that no other process uses."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def flush(path: Path) -> None:
    """Waits until the content of this file or folder is on the disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def publish(draft: Path, path: Path) -> None:
    """Renames the flushed file or folder `draft` to `path` and makes the rename last."""
    os.rename(draft, path)
    flush(path.parent)


@contextmanager
def locked(path: Path, needed: bool = True) -> Iterator[None]:
    """Holds the lock by which `sweep` knows that the maker of this file or folder lives.

    BlockingIOError if another process holds it, OSError on a file system without locks; not if it is not `needed`.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        with suppress(*(() if needed else (OSError,))):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


class Draft:
    """A file in the making: under a name of its own beside `path`, hashed as it grows, locked while its process lives."""

    def __init__(self, path: Path):
        self.path, self.name = path, temporary(path)
        self.file = self.name.open("xb")
        self._hash = hashlib.sha256()
        self.size = 0
        with suppress(OSError):  # a file system without locks: `sweep` gets none either, and leaves the draft alone
            fcntl.flock(self.file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def write(self, raw: bytes) -> None:
        self.file.write(raw)
        self._hash.update(raw)
        self.size += len(raw)

    def publish(self) -> None:
        self.file.flush()
        flush(self.name)
        publish(self.name, self.path)
        self.file.close()  # which gives back the lock, so not before the draft has its place

    def discard(self) -> None:
        with suppress(OSError):  # what is still buffered may not fit the disk; it is not wanted either
            self.file.close()
        self.name.unlink(missing_ok=True)


def sweep(folder: Path) -> None:
    """Removes the drafts in a cache folder whose makers were killed: nobody locks them, and nothing writes to them."""
    for path in folder.iterdir():
        if ABANDONED.fullmatch(path.name):
            with suppress(OSError), locked(path):
                if time.time() - path.stat().st_mtime > ABANDONED_AFTER_S:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
