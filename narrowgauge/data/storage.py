"""Files that are either whole or absent: written under another name, flushed to the disk, then renamed."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from narrowgauge.data.text import shown
from narrowgauge.errors import StorageError


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
