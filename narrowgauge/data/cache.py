"""Token ids on disk: two memory-mapped files and a JSON index, under a key that says what they were made from.

    CACHE/tokens-KEY.train.bin        token ids one after another, uint16 (uint32 from 65,537 ids on), little-endian
    CACHE/tokens-KEY.validation.bin
    CACHE/tokens-KEY.json             what they hold: counts, document lengths, SHA-256 of both files and of itself

The index is written last, so an interrupted write leaves no entry. Opening an entry hashes both files, about a second
per GB, and an entry of which a single bit has changed is Damaged: it is never used.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from narrowgauge.data.split import SIDES
from narrowgauge.data.text import shown
from narrowgauge.errors import StorageError
from narrowgauge.storage import Draft, flush, publish, sweep, temporary

FORMAT = 1  # counts up when the files change their meaning; part of the key


class Damaged(Exception):
    """A cache entry whose bytes are not those that were written. Says which file, and how."""


def gone(folder: Path) -> StorageError:
    """The error for an entry that was written, and is not there."""
    return StorageError(
        f"{shown(folder)}: an entry is missing though it was just written; another process removes what stands there. "
        "Start again without it, or pass another cache folder."
    )


def token_dtype(largest_token: int) -> np.dtype[Any]:
    """The narrowest of uint16 and uint32, little-endian, that holds the ids."""
    return np.dtype("<u2" if largest_token < 2**16 else "<u4")


def key_of(facts: Mapping[str, Any]) -> str:
    """32 hexadecimal digits of the SHA-256 of `facts`."""
    return hashlib.sha256(json.dumps({"format": FORMAT, **facts}, sort_keys=True).encode()).hexdigest()[:32]


@dataclass(frozen=True)
class TokenStream:
    """Token ids in reading order, an end-of-text id behind each document. `tokens` is one-dimensional and read-only."""

    name: str
    tokens: np.ndarray[Any, np.dtype[Any]]

    def __len__(self) -> int:
        return len(self.tokens)


class TokenWriter:
    """One side of an entry in the making: appends documents, and keeps their lengths, token counts and hash."""

    def __init__(self, folder: Path, key: str, side: str, dtype: np.dtype[Any], vocabulary: int):
        self.draft = Draft(folder / f"tokens-{key}.{side}.bin")
        self.dtype = dtype
        self.counts = np.zeros(vocabulary, dtype=np.int64)  # of each token id
        self.document_lengths: list[int] = []
        self._document_length = 0
        self._pending: list[int] = []

    def append(self, ids: Sequence[int], *, ends_document: bool) -> None:
        """Takes up ids of the document at hand; its last ones, with the end-of-text id, end it."""
        self._pending.extend(ids)
        self._document_length += len(ids)
        if ends_document:
            self.document_lengths.append(self._document_length)
            self._document_length = 0

    def drain(self) -> None:
        """Writes what was taken up. A pass over the vocabulary, so once per batch and not per document."""
        ids = np.array(self._pending, dtype=np.int64)
        self.draft.write(ids.astype(self.dtype).tobytes())
        self.counts += np.bincount(ids, minlength=len(self.counts))
        self._pending.clear()

    def facts(self) -> dict[str, Any]:
        return {
            "dtype": self.dtype.str,
            "tokens": sum(self.document_lengths),
            "sha256": self.draft.sha256,
            "document_lengths": self.document_lengths,
        }

    def discard(self) -> None:
        self.draft.discard()


def write(folder: Path, key: str, sides: Mapping[str, TokenWriter], facts: Mapping[str, Any]) -> None:
    """Publishes the entry: both files, then the index with `facts` in it. Removes what killed processes left behind."""
    sweep(folder)
    index_path = folder / f"tokens-{key}.json"
    held = {side: writer.facts() for side, writer in sides.items()}
    retract(index_path, key, held)
    for writer in sides.values():
        writer.draft.publish()
    write_index(index_path, {"format": FORMAT, "key": key, **facts, **held})


def retract(path: Path, key: str, held: Mapping[str, Any]) -> None:
    """Removes the index at `path`, unless it is of the same bytes: the entry of a process that was as fast stays whole."""
    try:
        index = read_index(path, key)
    except Damaged:
        index = None
    if index is None or any(index.get(name) != value for name, value in held.items()):
        path.unlink(missing_ok=True)


def open_entry(folder: Path, key: str) -> tuple[dict[str, TokenStream], dict[str, Any]] | None:
    """(streams by side, index) of an entry, or None if there is none. Raises Damaged if its bytes have changed."""
    index = read_index(folder / f"tokens-{key}.json", key)
    if index is None:
        return None
    return {side: _open_stream(folder / f"tokens-{key}.{side}.bin", side, index[side]) for side in SIDES}, index


def write_index(path: Path, index: Mapping[str, Any]) -> None:
    """`index` with its checksum, whole or not at all."""
    draft = temporary(path)
    try:
        draft.write_text(json.dumps({**index, "checksum": _checksum(index)}), encoding="utf-8")
        flush(draft)
        publish(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def read_index(path: Path, key: str) -> dict[str, Any] | None:
    """What `write_index` wrote, or None if there is none. Raises Damaged if it has changed or belongs to another key."""
    try:
        index: dict[str, Any] = json.loads(path.read_bytes())
        if index.pop("checksum") != _checksum(index) or index["key"] != key:
            raise ValueError
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise Damaged(f"{shown(path)} does not match its checksum") from None
    return index


def _open_stream(path: Path, side: str, facts: Mapping[str, Any]) -> TokenStream:
    dtype = np.dtype(facts["dtype"])
    try:
        size = path.stat().st_size
    except FileNotFoundError:
        raise Damaged(f"{shown(path)} is missing") from None
    if size != facts["tokens"] * dtype.itemsize:
        raise Damaged(f"{shown(path)} has {size} bytes, not {facts['tokens'] * dtype.itemsize}")
    with path.open("rb") as file:
        if hashlib.file_digest(file, "sha256").hexdigest() != facts["sha256"]:
            raise Damaged(f"{shown(path)} does not match its SHA-256")
    if not size:  # an empty file cannot be mapped
        return TokenStream(side, np.empty(0, dtype))
    return TokenStream(side, np.memmap(path, dtype, mode="r"))


def _checksum(index: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(index, sort_keys=True).encode()).hexdigest()
