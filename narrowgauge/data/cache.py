"""Arrays on disk: a folder with a memory-mapped file for each and a JSON index, under a key that says what they were made from.

    CACHE/tokens-KEY/train.bin        values one after another, little-endian
    CACHE/tokens-KEY/index.json       dtype, bytes and SHA-256 of each file, facts, and its own checksum

An entry is written under another name, flushed to the disk and renamed, so it is whole or absent. Opening one hashes its
files, about a second per GB; an entry of which a single bit has changed is Damaged and never used.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from narrowgauge.data.text import shown
from narrowgauge.errors import StorageError
from narrowgauge.storage import flush, locked, publish, storage, sweep, temporary

FORMAT = 2  # counts up when the files change their meaning; part of the key
INDEX = "index.json"
Values = np.ndarray[Any, np.dtype[Any]]
Append = Callable[[str, Values], None]  # adds values to the end of an array of the entry


class Damaged(Exception):
    """A cache entry whose bytes are not those that were written. Says which file, and how."""


def token_dtype(largest_token: int) -> np.dtype[Any]:
    """The narrowest of uint16 and uint32, little-endian, that holds the ids."""
    return np.dtype("<u2" if largest_token < 2**16 else "<u4")


def key_of(facts: Mapping[str, Any]) -> str:
    """32 hexadecimal digits of the SHA-256 of `facts`."""
    return _checksum({"format": FORMAT, **facts})[:32]


@dataclass(frozen=True)
class TokenStream:
    """Token ids in reading order, an end-of-text id behind each document. `tokens` is one-dimensional and read-only."""

    name: str
    tokens: Values

    def __len__(self) -> int:
        return len(self.tokens)


@dataclass(frozen=True)
class Entry:
    """An open entry. Pickles as the names of its files."""

    path: Path
    dtypes: dict[str, str]
    facts: dict[str, Any]

    @cached_property
    def arrays(self) -> dict[str, Values]:
        """One-dimensional, memory-mapped and read-only, by name."""
        return {name: _mapped(self.path / f"{name}.bin", dtype) for name, dtype in self.dtypes.items()}

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "arrays"}


def _mapped(path: Path, dtype: str) -> Values:
    return (
        np.memmap(path, dtype, mode="r") if path.stat().st_size else np.empty(0, dtype)
    )  # no empty file can be mapped


def cached(
    path: Path, dtypes: Mapping[str, np.dtype[Any]], fill: Callable[[Append], dict[str, Any]]
) -> tuple[Entry, list[str]]:
    """(the entry at `path`, notes). Where it is missing or damaged, `fill` writes its arrays and returns its facts.

    Raises StorageError if the folder cannot be read or written.
    """
    notes = []
    with storage(path.parent):
        try:
            entry = open_entry(path)
        except Damaged as damage:
            entry = None
            notes.append(f"An entry of the cache was damaged and has been made again: {damage}.")
        if entry is None:
            with new_folder(path, _is_whole) as draft:
                _write(draft, path.name, dtypes, fill)
            try:
                entry = open_entry(path)
            except Damaged as damage:
                raise StorageError(
                    f"{damage}, though it was just written. Check the disk, or pass another cache folder."
                ) from damage
    if entry is None:
        raise StorageError(
            f"{shown(path.parent)}: an entry is missing though it was just written; another process removes what stands "
            "there. Start again without it, or pass another cache folder."
        )
    return entry, notes


@contextmanager
def new_folder(path: Path, is_whole: Callable[[Path], bool]) -> Iterator[Path]:
    """A draft of the folder `path`: published when the body ends, removed when it fails, locked meanwhile.

    A folder that stands there by then stays if it `is_whole`: another process was faster, and its bytes are the same.
    Else it is replaced at once; who reads the old files goes on reading them. Removes what killed processes left behind.
    """
    draft = temporary(path)
    try:
        with storage(path.parent):
            draft.mkdir(parents=True)
            sweep(path.parent)
            with locked(draft, needed=False):
                yield draft
                for file in (*draft.iterdir(), draft):
                    flush(file)
                _publish(draft, path, is_whole)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _publish(draft: Path, path: Path, is_whole: Callable[[Path], bool]) -> None:
    while True:
        try:
            return publish(draft, path)
        except OSError:
            if not path.exists():
                raise
        if is_whole(path):
            return
        doomed = temporary(path)
        with suppress(FileNotFoundError):  # another process may replace it too
            os.rename(path, doomed)
            shutil.rmtree(doomed)


def _write(
    folder: Path, name: str, dtypes: Mapping[str, np.dtype[Any]], fill: Callable[[Append], dict[str, Any]]
) -> None:
    hashes = {array: hashlib.sha256() for array in dtypes}
    with ExitStack() as stack:
        files = {array: stack.enter_context((folder / f"{array}.bin").open("xb")) for array in dtypes}

        def append(array: str, values: Values) -> None:
            raw = values.astype(dtypes[array]).tobytes()
            files[array].write(raw)
            hashes[array].update(raw)

        facts = fill(append)
        held = {
            array: {"dtype": dtype.str, "bytes": files[array].tell(), "sha256": hashes[array].hexdigest()}
            for array, dtype in dtypes.items()
        }
    index = {"name": name, "files": held, "facts": facts}
    (folder / INDEX).write_text(json.dumps({**index, "checksum": _checksum(index)}), encoding="utf-8")


def open_entry(path: Path) -> Entry | None:
    """The entry at `path`, None if there is none. Raises Damaged if its bytes have changed or belong to another key."""
    if not path.exists():
        return None
    try:
        index = json.loads((path / INDEX).read_bytes())
        if index.pop("checksum") != _checksum(index) or index["name"] != path.name:
            raise ValueError
    except FileNotFoundError:
        raise Damaged(f"{shown(path / INDEX)} is missing") from None
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise Damaged(f"{shown(path / INDEX)} does not match its checksum") from None
    for name, held in index["files"].items():
        _check(path / f"{name}.bin", held)
    return Entry(path, {name: held["dtype"] for name, held in index["files"].items()}, index["facts"])


def _check(path: Path, held: Mapping[str, Any]) -> None:
    try:
        with path.open("rb") as file:
            size, digest = path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise Damaged(f"{shown(path)} is missing") from None
    if size != held["bytes"]:
        raise Damaged(f"{shown(path)} has {size} bytes, not {held['bytes']}")
    if digest != held["sha256"]:
        raise Damaged(f"{shown(path)} does not match its SHA-256")


def _is_whole(path: Path) -> bool:
    try:
        return open_entry(path) is not None
    except Damaged:
        return False


def _checksum(facts: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
