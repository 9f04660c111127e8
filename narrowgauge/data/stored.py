"""Arrays of many examples, memory-mapped: those of a name lie back to back in one file, and each example has a length of it."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from copy import copy
from typing import Any, Self

import numpy as np

from narrowgauge.data.batches import Indices
from narrowgauge.data.cache import Entry, Values

GROUP = "group"  # array of one whole number for each example
GROUPS = np.dtype("<u8")


def group_of(text: str) -> Values:
    """The number for what hangs on a text, [1]."""
    return np.frombuffer(hashlib.sha256(text.encode()).digest()[:8], GROUPS)


class Stored:
    """entry: has the arrays `name` and `name.lengths`, for each name in `fields`."""

    def __init__(self, entry: Entry, fields: Sequence[str]):
        self.entry = entry
        self._lengths = {name: entry.arrays[f"{name}.lengths"].astype(np.int64) for name in fields}
        self._ends = {name: np.cumsum(lengths) for name, lengths in self._lengths.items()}

    def __len__(self) -> int:
        return len(self._lengths["input_ids"])

    def select(self, rows: Indices) -> Self:
        """A subset in the given order, without a copy of the arrays."""
        part = copy(self)
        part._lengths = {name: lengths[rows] for name, lengths in self._lengths.items()}
        part._ends = {name: ends[rows] for name, ends in self._ends.items()}
        return part

    def sizes(self, name: str) -> Indices:
        """Elements that each example has of an array, int64."""
        return self._lengths[name]

    def array(self, name: str, index: int) -> Values:
        """What an example has of an array, as it is stored."""
        end = int(self._ends[name][index])
        return self.entry.arrays[name][end - int(self._lengths[name][index]) : end]

    @property
    def group(self) -> Values | None:
        """A number for what hangs together, and must not be torn apart, or None where each example stands alone."""
        return self.numbers(GROUP) if GROUP in self._ends else None

    def numbers(self, name: str) -> Values:
        """Of an array of which each example has one element, that of each."""
        found: Any = self.entry.arrays[name][self._ends[name] - 1]
        return np.asarray(found)
