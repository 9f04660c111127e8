"""Encoded examples on disk: for each field a memory-mapped file of values and one of lengths, and a JSON index.

    CACHE/examples-KEY.input_ids.bin           values of all examples one after another, little-endian
    CACHE/examples-KEY.input_ids.lengths.bin   uint32, one per example: a sampler reads these and no tokens
    CACHE/examples-KEY.json                    fields, counts, facts; SHA-256 of each file and of itself

The index is written last, so an interrupted write leaves no entry. Opening an entry hashes its files, about a second per GB;
one of which a single bit has changed is Damaged and never used.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from narrowgauge.data.cache import Damaged, read_index, retract, write_index
from narrowgauge.data.order import Indices
from narrowgauge.data.text import shown
from narrowgauge.storage import Draft, sweep

LENGTH = np.dtype("<u4")
Values = np.ndarray[Any, np.dtype[Any]]


class Ragged:
    """One field of all examples: `field[i]` is a one-dimensional read-only array. Pickles as the name of its file."""

    def __init__(self, path: Path, dtype: str, lengths: Indices):
        self.path, self.dtype, self.lengths = path, dtype, lengths
        self._open()

    def _open(self) -> None:
        self._ends = np.cumsum(self.lengths, dtype=np.int64)
        empty = not len(self._ends) or not self._ends[-1]  # an empty file cannot be mapped
        self._values: Values = np.empty(0, self.dtype) if empty else np.memmap(self.path, self.dtype, mode="r")

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> Values:
        end = int(self._ends[index])
        return self._values[end - int(self.lengths[index]) : end]

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "dtype": self.dtype, "lengths": self.lengths}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._open()


class ExampleWriter:
    """An entry in the making: appends batches of examples, publishes the whole or leaves nothing."""

    def __init__(self, folder: Path, key: str, fields: Mapping[str, np.dtype[Any]]):
        self.folder, self.key, self.fields, self.count = folder, key, fields, 0
        self.values = {name: Draft(_values_path(folder, key, name)) for name in fields}
        self.lengths = {name: Draft(_lengths_path(folder, key, name)) for name in fields}

    def append(self, examples: list[dict[str, Values]]) -> None:
        """Takes up examples, each with one array per field."""
        for name, dtype in self.fields.items():
            arrays = [example[name] for example in examples]
            if arrays:
                self.values[name].write(np.concatenate(arrays).astype(dtype).tobytes())
                self.lengths[name].write(np.array([len(array) for array in arrays], LENGTH).tobytes())
        self.count += len(examples)

    def publish(self, facts: Mapping[str, Any]) -> None:
        """The files, then the index with `facts` in it. Removes what killed processes left behind."""
        sweep(self.folder)
        index_path = _index_path(self.folder, self.key)
        held = {"examples": self.count, "fields": {name: self._facts(name) for name in self.fields}}
        retract(index_path, self.key, held)
        for file in (*self.values.values(), *self.lengths.values()):
            file.publish()
        write_index(index_path, {"key": self.key, "facts": dict(facts), **held})

    def _facts(self, name: str) -> dict[str, Any]:
        values, lengths = self.values[name], self.lengths[name]
        return {
            "dtype": self.fields[name].str,
            "values": {"bytes": values.size, "sha256": values.sha256},
            "lengths": {"bytes": lengths.size, "sha256": lengths.sha256},
        }

    def discard(self) -> None:
        for file in (*self.values.values(), *self.lengths.values()):
            file.discard()


def open_examples(folder: Path, key: str) -> tuple[dict[str, Ragged], dict[str, Any]] | None:
    """(fields, facts) of an entry, or None if there is none. Raises Damaged if its bytes have changed."""
    index = read_index(_index_path(folder, key), key)
    if index is None:
        return None
    fields = {}
    for name, entry in index["fields"].items():
        values, lengths = _values_path(folder, key, name), _lengths_path(folder, key, name)
        _check(values, entry["values"])
        _check(lengths, entry["lengths"])
        fields[name] = Ragged(values, entry["dtype"], np.fromfile(lengths, LENGTH).astype(np.int64))
    return fields, index["facts"]


def _check(path: Path, expected: Mapping[str, Any]) -> None:
    try:
        with path.open("rb") as file:
            size, digest = path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        raise Damaged(f"{shown(path)} is missing") from None
    if size != expected["bytes"]:
        raise Damaged(f"{shown(path)} has {size} bytes, not {expected['bytes']}")
    if digest != expected["sha256"]:
        raise Damaged(f"{shown(path)} does not match its SHA-256")


def _index_path(folder: Path, key: str) -> Path:
    return folder / f"examples-{key}.json"


def _values_path(folder: Path, key: str, name: str) -> Path:
    return folder / f"examples-{key}.{name}.bin"


def _lengths_path(folder: Path, key: str, name: str) -> Path:
    return folder / f"examples-{key}.{name}.lengths.bin"
