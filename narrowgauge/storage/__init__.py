"""Crash-safe files and folders: written under a temporary name, synced to disk, then renamed.

A write is durable after its file is synced. A name (new, renamed or removed) is durable after its
folder is synced. Each function here therefore syncs the content, renames, and syncs the parent.
After the return, a power cut changes nothing.

    write beside the target    sync files and folders    rename over the target    sync the parent

An OSError of the file system (full, read-only, not permitted, over a limit, broken) becomes a
StorageError.
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
# Names that `temporary` gives to drafts of cache entries and tokenizers. Anything else in a cache
# folder is left alone.
ABANDONED = re.compile(r"\.((tokens|examples|images)-[0-9a-f]{32}|bpe-[0-9]+-[0-9a-f]{16})\..*tmp")
# Age without a write from which an unlocked draft counts as abandoned. Its writer locks a draft
# within milliseconds, but not atomically with its creation.
ABANDONED_AFTER_S = 60


@contextmanager
def refusals(doing: str, path: Path, instead: str = "choose another --output") -> Iterator[None]:
    """Converts an OSError of the body to a StorageError: "cannot <doing> <path>: <reason>"."""
    try:
        yield
    except OSError as error:
        place = (
            f" ({error.filename})" if error.filename and str(error.filename) != str(path) else ""
        )
        step = "Free some space" if error.errno in FULL else "Check that it can be written"
        raise StorageError(
            f"cannot {doing} {path}: {error.strerror or error}{place}. {step}, or {instead}.",
            code="storage.refused",
        ) from error


@contextmanager
def library_errors(path: Path) -> Iterator[None]:
    """Converts disk errors of safetensors and tokenizers in the body to OSError.

    Both raise their own exceptions, with the error code in the text alone.
    """
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        code = re.search(r"os error (\d+)", str(error))
        if code is None:
            raise
        raise OSError(int(code[1]), os.strerror(int(code[1])), str(path)) from error


def storage(folder: Path) -> AbstractContextManager[None]:
    """`refusals` for work in the cache folder `folder`."""
    return refusals("use the cache", folder, "pass another cache folder")


def require_space(folder: Path, needed_bytes: float, what: str) -> None:
    """Raises StorageError if the file system of `folder` has less than `needed_bytes` free."""
    free = shutil.disk_usage(folder).free
    if free < needed_bytes:
        raise StorageError(
            f"{what} needs {needed_bytes / 2**20:.1f} MiB, but {folder} has {free / 2**20:.1f} MiB free. "
            "Free some space, keep fewer checkpoints, or choose another --output.",
            code="storage.full",
        )


def probe(folder: Path) -> None:
    """Writes and removes a small file, to find a full or read-only disk before any work is done."""
    path = folder / f".probe-{os.getpid()}"
    with refusals("write to", folder):
        # Probes of killed processes. The caller holds the folder's lock, so none is in use.
        for left in folder.glob(".probe-*"):
            if PROBE.fullmatch(left.name):
                remove(left)
        try:
            write_synced(path, bytes(PROBE_BYTES))
        finally:
            path.unlink(missing_ok=True)


def flush(path: Path) -> None:
    """Waits until a file's content, or the names in a folder, are on disk."""
    # O_NONBLOCK: opening a named pipe would block.
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        # fsync fails on pipes and devices, which have nothing to sync.
        if stat.S_ISREG(mode := os.fstat(descriptor).st_mode) or stat.S_ISDIR(mode):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def flush_tree(folder: Path) -> None:
    """Syncs all files and folders below `folder`, and `folder` itself; of links only the names."""
    # Bottom-up: a folder is synced after everything in it.
    for place, _, files in os.walk(folder, topdown=False):
        for path in (Path(place, name) for name in files):
            # lstat: a link's target may lie outside of the tree.
            if stat.S_ISREG(path.lstat().st_mode):
                flush(path)
        flush(Path(place))


def make_folder(path: Path) -> None:
    """Creates `path` and its missing parents, and syncs each new name."""
    missing = [each for each in (path, *path.parents) if not each.exists()]
    path.mkdir(parents=True, exist_ok=True)
    for each in missing:
        flush(each.parent)


def write_synced(path: Path, data: bytes) -> None:
    """Creates `path`, which must not exist, with `data` on disk. Its mode follows the umask."""
    with open(path, "xb", buffering=0) as file:
        rest = memoryview(data)
        while rest:  # an unbuffered write may be short: Linux writes 2 GiB at most
            rest = rest[file.write(rest) :]
        os.fsync(file.fileno())


def replace_file(path: Path, data: str | bytes, instead: str = "choose another --output") -> None:
    """Writes `data` (text as UTF-8) to `path` atomically: readers see the old or the new file."""
    draft = path.with_name(f".{path.name}.tmp")
    with refusals("write", path, instead):
        try:
            # A draft left by a killed process.
            draft.unlink(missing_ok=True)
            write_synced(draft, data.encode() if isinstance(data, str) else data)
            os.replace(draft, path)
            flush(path.parent)
        # BaseException: a KeyboardInterrupt must not leave the draft behind either.
        except BaseException:
            draft.unlink(missing_ok=True)
            raise


def replace_link(path: Path, target: str) -> None:
    """Makes `path` a link to `target`, in place of the link that is there: readers see the old or the new one."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with refusals("make a link at", path):
        draft.unlink(missing_ok=True)
        os.symlink(target, draft)
        os.replace(draft, path)
        flush(path.parent)


@contextmanager
def new_folder(path: Path, draft: Path) -> Iterator[Path]:
    """Renames `draft`, which the body creates and syncs, to `path`; removes it if the body fails.

    See `replace_folder` for an existing `path`.
    """
    remove(draft)
    try:
        yield draft
        replace_folder(path, draft)
    except BaseException:
        remove(draft)
        raise


def replace_folder(path: Path, draft: Path) -> None:
    """Renames the synced folder `draft` to `path`, and removes the old `path` afterwards.

    A crash between the two renames leaves the old folder as .old-NAME, which `recover` restores.
    """
    old = path.with_name(f".old-{path.name}")
    # A folder cannot be renamed over a non-empty one, so two renames are needed.
    replaces = os.path.lexists(path)
    if replaces:
        remove(old)
        os.rename(path, old)
    try:
        os.rename(draft, path)
    except OSError:
        if replaces:
            # Undo: the old folder stays available if the second rename fails.
            os.rename(old, path)
        raise
    flush(path.parent)
    if replaces:
        remove(old)


def recover(folder: Path, names: str) -> None:
    """Cleans up after a crash, for folders whose names match the pattern `names`.

    Removes drafts (.tmp-NAME, .tmp-NAME-PID), and restores folders that `new_folder` had moved
    aside (.old-NAME). The caller must hold the lock of the run folder.
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
    """Removes a folder that others may read.

    It is renamed first, so that a kill never leaves an incomplete folder under its name.
    """
    doomed = path.with_name(f".tmp-{path.name}")
    remove(doomed)
    os.rename(path, doomed)
    remove(doomed)


def remove(path: Path) -> None:
    """Removes a file, link or folder if it exists."""
    # rmtree refuses links to folders, and must not follow them.
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def refuse_shared(folder: Path) -> str:
    """Reason why another user could have placed files in `folder`, as a clause, or ''.

    For folders with programs and pickles. A missing folder is created with mode 0700.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = folder.stat()
        # A writable parent lets others rename the folder away and put their own in its place.
        above = [(each, each.stat().st_mode) for each in folder.resolve().parents]
    except OSError as error:
        return f"it cannot be made or read: {error.strerror or error}"
    if found.st_uid != os.getuid():
        return f"it belongs to user {found.st_uid}, and you are user {os.getuid()}"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"others may write to it (mode {stat.S_IMODE(found.st_mode):04o}, not 0700)"
    # The sticky bit (as on /tmp) restricts renames to the owner.
    open_ones = [each for each, mode in above if mode & stat.S_IWOTH and not mode & stat.S_ISVTX]
    return f"all users may rename what is in {open_ones[0]}" if open_ones else ""


def temporary(path: Path) -> Path:
    """A name beside `path` that no other process uses, since several may create one cache entry."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")


def publish(draft: Path, path: Path) -> None:
    """Renames the synced file or folder `draft` to `path`, and syncs the name."""
    os.rename(draft, path)
    flush(path.parent)


@contextmanager
def locked(path: Path, needed: bool = True) -> Iterator[None]:
    """Holds the lock that tells `sweep` that the writer of this file or folder is alive.

    needed  False ignores errors: a lock held by another process, a file system without locks

    If needed, raises BlockingIOError if another process holds it, OSError without lock support.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        with suppress(*(() if needed else (OSError,))):
            # The kernel releases a flock when its process ends, even by kill -9.
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


def sweep(folder: Path) -> None:
    """Removes drafts of killed processes from a cache folder: unlocked, no recent writes."""
    for path in folder.iterdir():
        if ABANDONED.fullmatch(path.name):
            with suppress(OSError), locked(path):
                if time.time() - path.stat().st_mtime > ABANDONED_AFTER_S:
                    remove(path)
