"""Disk cache of arrays: a folder with one memory-mapped file per array and a JSON index.

    CACHE/tokens-KEY/train.bin        values, little-endian
    CACHE/tokens-KEY/index.json       dtype, bytes and SHA-256 of each file, facts, own checksum

The key is a hash of everything that determines the contents. An entry is written under a temporary
name, flushed and renamed, so it is complete or absent. Opening an entry verifies its hashes, about
1 s per GB. An entry with a changed bit raises Damaged and is never used.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from narrowgauge.data.text import shown
from narrowgauge.errors import Reason, StorageError
from narrowgauge.storage import flush, locked, publish, reading, storage, sweep, temporary

FORMAT = 2  # version of the file format; part of the key
INDEX = "index.json"
ENTRY = reading.Kind(
    most_bytes=reading.GIB, error=StorageError, step="Check the disk, or remove it."
)
# No limit on the size: the index lists it.
ARRAY = reading.Kind(most_bytes=2**62, error=StorageError, step="Check the disk, or remove it.")
# No slashes and no leading dot: a forged index cannot name a file outside of the entry's folder.
ARRAY_NAME = re.compile(r"[A-Za-z0-9_]+(\.[A-Za-z0-9_]+)*")
Values = np.ndarray[Any, np.dtype[Any]]
Append = Callable[[str, Values], None]  # append(array name, values)


class Damaged(Exception):
    """A cache entry has changed since it was written. The message names the file and the fault."""


def token_dtype(largest_token: int) -> np.dtype[Any]:
    """uint16 if it can hold the ids, else uint32; little-endian."""
    return np.dtype("<u2" if largest_token < 2**16 else "<u4")


def key_of(facts: Mapping[str, Any]) -> str:
    """First 32 hexadecimal digits of the SHA-256 of `facts`."""
    return _checksum({"format": FORMAT, **facts})[:32]


@dataclass(frozen=True)
class TokenStream:
    """Token ids in reading order, with an end-of-text id after each document.

    name    for error messages
    tokens  one-dimensional, read-only
    """

    name: str
    tokens: Values

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class CacheEntry:
    """An open cache entry. Pickles as file names, not as array contents.

    path    folder
    dtypes  {array name: dtype}
    facts   JSON values that `fill` returned
    """

    path: Path
    dtypes: dict[str, str]
    facts: dict[str, Any]

    @cached_property
    def arrays(self) -> dict[str, Values]:
        """{name: array}; one-dimensional, memory-mapped and read-only."""
        files = {name: self.path / f"{name}.bin" for name in self.dtypes}
        return {name: _mapped(file, self.dtypes[name]) for name, file in files.items()}

    def __getstate__(self) -> dict[str, Any]:
        # DataLoader workers map the files themselves instead of receiving gigabytes through a pipe.
        return {name: value for name, value in self.__dict__.items() if name != "arrays"}


def _mapped(path: Path, dtype: str) -> Values:
    with reading.opened(path, ARRAY) as file:
        if not os.fstat(file.fileno()).st_size:  # mmap rejects an empty file
            return np.empty(0, dtype)
        return np.memmap(file, dtype, mode="r")


def cached(
    path: Path, dtypes: Mapping[str, np.dtype[Any]], fill: Callable[[Append], dict[str, Any]]
) -> tuple[CacheEntry, list[str]]:
    """Opens the entry at `path`, or creates it if it is missing or damaged.

    dtypes  {array name: dtype}
    fill    writes the arrays through `append` and returns the facts
    ->      (entry, notes for the user)
    """
    notes: list[str] = []
    with storage(path.parent):
        # Second pass: reopen what was written, so that a faulty disk is noticed at once.
        for just_written in (False, True):
            try:
                if entry := open_entry(path):
                    return entry, notes
            except Damaged as damage:
                if just_written:
                    raise StorageError(
                        f"{damage}, though it was just written. Check the disk, or pass another cache folder.",
                        code="cache.damaged",
                    ) from damage
                notes.append(
                    Reason(
                        "cache.made-again",
                        f"An entry of the cache was damaged and has been made again: {damage}.",
                    )
                )
            if not just_written:
                with new_folder(path, _is_whole) as draft:
                    _write(draft, path.name, dtypes, fill)
    raise StorageError(
        f"{shown(path)}: missing though it was just written: another process removes files. Pass another cache folder.",
        code="cache.removed",
    )


@contextmanager
def new_folder(path: Path, is_whole: Callable[[Path], bool]) -> Iterator[Path]:
    """Yields a locked draft folder and publishes it as `path` after the body; removed on an error.

    If `path` exists by then and `is_whole`, it is kept: another process has written the same bytes.
    Otherwise the draft replaces it. Readers of the old files are not disturbed. Drafts of killed
    processes are removed as well.
    """
    draft = temporary(path)
    try:
        with storage(path.parent):
            draft.mkdir(parents=True)
            sweep(path.parent)
            with locked(draft, needed=False):
                yield draft
                # Before the rename: after a power cut, a renamed folder must not hold unwritten
                # data.
                for file in (*draft.iterdir(), draft):
                    flush(file)
                _publish(draft, path, is_whole)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _publish(draft: Path, path: Path, is_whole: Callable[[Path], bool]) -> None:
    # Loop: another process can create or remove `path` between the check and the rename.
    while True:
        try:
            return publish(draft, path)
        except OSError:
            if not path.exists():
                raise
        if is_whole(path):
            return
        doomed = temporary(path)
        with suppress(FileNotFoundError):  # another process may have replaced it
            os.rename(path, doomed)
            shutil.rmtree(doomed)


def _write(
    folder: Path,
    name: str,
    dtypes: Mapping[str, np.dtype[Any]],
    fill: Callable[[Append], dict[str, Any]],
) -> None:
    hashes = {array: hashlib.sha256() for array in dtypes}
    with ExitStack() as stack:
        files = {
            array: stack.enter_context((folder / f"{array}.bin").open("xb")) for array in dtypes
        }

        def append(array: str, values: Values) -> None:
            # Hash and write in one pass over the data.
            raw = values.astype(dtypes[array]).tobytes()
            files[array].write(raw)
            hashes[array].update(raw)

        facts = fill(append)
        held = {
            array: {
                "dtype": dtype.str,
                "bytes": files[array].tell(),
                "sha256": hashes[array].hexdigest(),
            }
            for array, dtype in dtypes.items()
        }
    index = {"name": name, "files": held, "facts": facts}
    (folder / INDEX).write_text(
        json.dumps({**index, "checksum": _checksum(index)}), encoding="utf-8"
    )


def open_entry(path: Path) -> CacheEntry | None:
    """Opens the entry at `path`; None if it is missing.

    Raises Damaged if its bytes have changed or belong to another key.
    """
    if not os.path.lexists(path):
        return None
    try:
        index = reading.strict_json(_bytes(path / INDEX, ENTRY))
        if (
            index.pop("checksum") != _checksum(index)
            or index["name"] != path.name
            or not isinstance(index["facts"], dict)
        ):
            raise ValueError
        for name, held in index["files"].items():
            if not ARRAY_NAME.fullmatch(name):
                raise ValueError
            np.dtype(held["dtype"])
            _verify(path / f"{name}.bin", held)
    except (ValueError, KeyError, AttributeError, TypeError):
        raise Damaged(f"{shown(path / INDEX)} does not match its checksum") from None
    return CacheEntry(
        path, {name: held["dtype"] for name, held in index["files"].items()}, index["facts"]
    )


def _bytes(path: Path, kind: reading.Kind) -> bytes:
    if not os.path.lexists(path):
        raise Damaged(f"{shown(path)} is missing")
    try:
        return reading.bytes_of(path, kind)
    except StorageError as error:
        raise _damage(error) from None


def _verify(path: Path, held: Mapping[str, Any]) -> None:
    """Raises Damaged unless a file has exactly the bytes that the index lists."""
    if not os.path.lexists(path):
        raise Damaged(f"{shown(path)} is missing")
    try:
        with reading.opened(path, ARRAY) as file:
            size = os.fstat(file.fileno()).st_size
            if size != held["bytes"]:
                raise Damaged(f"{shown(path)} has {size} bytes, not {held['bytes']}")
            if hashlib.file_digest(file, "sha256").hexdigest() != held["sha256"]:
                raise Damaged(f"{shown(path)} does not match its SHA-256")
    except StorageError as error:
        raise _damage(error) from None


def _damage(error: StorageError) -> Exception:
    """Converts a reader's refusal to Damaged, but returns errors of the disk unchanged.

    After a disk error nothing is known about the file, and rebuilding it would not help.
    """
    cause = error.__cause__
    # ELOOP, ENXIO and ENOENT: a link, a socket or nothing in the place of the file, so its contents
    # changed.
    if isinstance(cause, OSError) and cause.errno not in (errno.ELOOP, errno.ENXIO, errno.ENOENT):
        return error
    return Damaged(str(error).rstrip(". "))


def _is_whole(path: Path) -> bool:
    try:
        return open_entry(path) is not None
    except Damaged:
        return False


def _checksum(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
