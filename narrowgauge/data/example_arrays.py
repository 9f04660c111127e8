"""Memory-mapped arrays of many examples.

The examples' values of one array lie back to back in one file. A second array holds each example's
number of elements.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, Self

import numpy as np

if TYPE_CHECKING:
    from narrowgauge.data.batches import Indices
    from narrowgauge.data.cache import CacheEntry, Values

GROUP = "group"  # array with one integer per example
GROUPS = np.dtype("<u8")


def group_of(text: str) -> Values:
    """Group number of a text, uint64 [1]: the first 8 bytes of its SHA-256."""
    return np.frombuffer(hashlib.sha256(text.encode()).digest()[:8], GROUPS)


class ExampleArrays:
    """Examples in the arrays of a cache entry.

    entry   contains the arrays `name` and `name.lengths` for each name in `fields`
    fields  names of the arrays
    """

    def __init__(self, entry: CacheEntry, fields: Sequence[str]):
        self.entry = entry
        self._lengths = {name: entry.arrays[f"{name}.lengths"].astype(np.int64) for name in fields}
        # End positions in the file, not start positions: a subset keeps both arrays by plain
        # indexing.
        self._ends = {name: np.cumsum(lengths) for name, lengths in self._lengths.items()}

    def __len__(self) -> int:
        return len(self._lengths["input_ids"])

    def select(self, rows: Indices) -> Self:
        """A subset in the given order; the arrays are not copied."""
        part = copy(self)
        part._lengths = {name: lengths[rows] for name, lengths in self._lengths.items()}
        part._ends = {name: ends[rows] for name, ends in self._ends.items()}
        return part

    def sizes(self, name: str) -> Indices:
        """Number of elements of each example in an array, int64."""
        return self._lengths[name]

    def array(self, name: str, index: int) -> Values:
        """An example's part of an array, in its stored dtype."""
        end = int(self._ends[name][index])
        return self.entry.arrays[name][end - int(self._lengths[name][index]) : end]

    @property
    def group(self) -> Values | None:
        """Group number of each example, or None if examples are independent.

        A split must keep a group on one side.
        """
        return self.scalars(GROUP) if GROUP in self._ends else None

    def scalars(self, name: str) -> Values:
        """Values of an array that has one element per example."""
        # One element per example: its end position minus one is its index.
        found: Any = self.entry.arrays[name][self._ends[name] - 1]
        return np.asarray(found)
