"""Files and folders that survive a power cut: written under another name, synced to the disk, then renamed.

A write is on the disk once its file is synced; a name (new, renamed or removed) once the folder that holds it is synced.
So each function here syncs the content, renames, and syncs the parent. When it returns, a power cut changes nothing.

    write beside the place    sync files and folders    rename over the place    sync the parent

An OSError of the file system (full, read-only, not permitted, over a limit, broken) becomes a StorageError.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path

from narrowgauge.errors import StorageError

PROBE_BYTES = 2**20
PROBE = re.compile(r"\.probe-\d+")
FULL = (errno.ENOSPC, errno.EDQUOT)
# Names that `temporary` gives to drafts of cache entries and tokenizers.
ABANDONED = re.compile(r"\.((tokens|examples)-[0-9a-f]{32}|bpe-[0-9]+-[0-9a-f]{16})\..*tmp")
ABANDONED_AFTER_S = 60  # without a write; a maker locks its draft within milliseconds


@contextmanager
def refusals(doing: str, path: Path, instead: str = "choose another --output") -> Iterator[None]:
    """Turns an OSError of the body into a StorageError: "cannot <doing> <path>: <reason>"."""
    try:
        yield
    except OSError as error:
        place = f" ({error.filename})" if error.filename and str(error.filename) != str(path) else ""
        step = "Free some space" if error.errno in FULL else "Check that it can be written"
        raise StorageError(f"cannot {doing} {path}: {error.strerror or error}{place}. {step}, or {instead}.") from error


def storage(folder: Path) -> AbstractContextManager[None]:
    """`refusals` for work below the cache `folder`."""
    return refusals("use the cache", folder, "pass another cache folder")


def require_space(folder: Path, needed_bytes: float, what: str) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise StorageError(
            f"{what} needs {needed_bytes / 2**20:.1f} MiB, but {folder} has {free / 2**20:.1f} MiB free. "
            "Free some space, keep fewer checkpoints, or choose another --output."
        )


def probe(folder: Path) -> None:
    """Writes and removes a small file: a full or read-only disk is found before any work is done."""
    path = folder / f".probe-{os.getpid()}"
    with refusals("write to", folder):
        for left in folder.glob(".probe-*"):  # of processes that were killed: the caller holds the folder's lock
            if PROBE.fullmatch(left.name):
                remove(left)
        try:
            write_synced(path, bytes(PROBE_BYTES))
        finally:
            path.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Waits until the content of a file, or the names in a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        if stat.S_ISREG(mode := os.fstat(descriptor).st_mode) or stat.S_ISDIR(mode):  # a pipe has nothing on a disk
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(folder: Path) -> None:
    """Syncs all files and folders below `folder`, and `folder` itself; of links the name alone."""
    for place, _, files in os.walk(folder, topdown=False):
        for path in (Path(place, name) for name in files):
            if stat.S_ISREG(path.lstat().st_mode):
                flush(path)
        flush(Path(place))


def make_folder(path: Path) -> None:
    """Makes `path` and its parents where they are missing, and syncs each name that is new."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in missing:
        flush(each.parent)


def write_synced(path: Path, data: bytes) -> None:
    """Creates `path`, which must not exist, with `data` on the disk itself. Its mode follows the umask."""
    with open(path, "xb", buffering=0) as file:
        rest = memoryview(data)
        while rest:  # an unbuffered write may be short: Linux stops at 2 GiB
            rest = rest[file.write(rest) :]
        os.fsync(file.fileno())


def replace_file(path: Path, data: str | bytes, instead: str = "choose another --output") -> None:
    """Writes `data` (text as UTF-8) to `path`: a reader, or a crash, sees the old file or the new one."""
    draft = path.with_name(f".{path.name}.tmp")
    with refusals("write", path, instead):
        try:
            draft.unlink(missing_ok=True)
            write_synced(draft, data.encode() if isinstance(data, str) else data)
            os.replace(draft, path)
            flush(path.parent)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise


@contextmanager
def new_folder(path: Path, draft: Path) -> Iterator[Path]:
    """Renames the folder `draft`, which the body makes and syncs, to `path`, as `replace_folder` does; removes it if the body fails."""
    remove(draft)
    try:
        yield draft
        replace_folder(path, draft)
    except BaseException:
        remove(draft)
        raise


def replace_folder(path: Path, draft: Path) -> None:
    """Renames the synced folder `draft` to `path`. What was at `path` goes when the new one is on the disk.

    A crash between the two renames leaves the old one as .old-NAME, which `recover` puts back.
    """
    old = path.with_name(f".old-{path.name}")
    replaces = os.path.lexists(path)
    if replaces:
        remove(old)
        os.rename(path, old)
    try:
        os.rename(draft, path)
    except OSError:
        if replaces:
            os.rename(old, path)
        raise
    flush(path.parent)
    if replaces:
        remove(old)


def recover(folder: Path, names: str) -> None:
    """Clears what a crash left of the folders whose names match the pattern `names`.

    Removes drafts (.tmp-NAME, .tmp-NAME-PID); puts back what `new_folder` had moved aside (.old-NAME).
    The caller holds the lock of the run folder.
    """
    if not folder.is_dir():
        return
    leftover = re.compile(rf"\.tmp-({names})(-\d+)?|\.old-({names})")
    found = [path for path in folder.iterdir() if leftover.fullmatch(path.name) and path.is_dir()]
    with refusals("clear leftovers from", folder):
        for path in found:
            place = path.with_name(path.name.split("-", 1)[1])
            if path.name.startswith(".old-") and not os.path.lexists(place):
                os.rename(path, place)
            else:
                remove(path)
        if found:
            flush(folder)


def discard(path: Path) -> None:
    """Removes a folder that others may read: renamed first, so that a kill leaves no half of it."""
    doomed = path.with_name(f".tmp-{path.name}")
    remove(doomed)
    os.rename(path, doomed)
    remove(doomed)


def remove(path: Path) -> None:
    """Removes a file, a link or a folder, or nothing."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def refuse_shared(folder: Path) -> str:
    """Why programs and pickles in `folder` may be another user's: a clause, or ''. A folder that is missing is made, mode 0700."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        above = [(each, each.stat().st_mode) for each in folder.resolve().parents]
    except OSError as error:
        return f"it cannot be made or read: {error.strerror or error}"
    if found.st_uid != os.getuid():
        return f"it belongs to user {found.st_uid}, and you are user {os.getuid()}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to it (mode {stat.S_IMODE(found.st_mode):04o}, not 0700)"
    open_ones = [each for each, mode in above if mode & stat.S_IWOTH and not mode & stat.S_ISVTX]
    return f"all users may rename what is in {open_ones[0]}" if open_ones else ""


def temporary(path: Path) -> Path:
    """A name beside `path` that no other process uses: several may make the same cache entry."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def publish(draft: Path, path: Path) -> None:
    """Renames the synced file or folder `draft` to `path`, and syncs the name."""
    os.rename(draft, path)
    flush(path.parent)


@contextmanager
def locked(path: Path, needed: bool = True) -> Iterator[None]:
    """Holds the lock by which `sweep` knows that the maker of this file or folder lives.

    BlockingIOError if another process holds it, OSError on a file system without locks; neither if it is not `needed`.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        with suppress(*(() if needed else (OSError,))):
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def sweep(folder: Path) -> None:
    """Removes the drafts in a cache folder whose makers were killed: nobody locks them, and nothing writes to them."""
    for path in folder.iterdir():
        if ABANDONED.fullmatch(path.name):
            with suppress(OSError), locked(path):
                if time.time() - path.stat().st_mtime > ABANDONED_AFTER_S:
                    remove(path)
