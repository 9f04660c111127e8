"""The interface of a task on a table: how a row becomes arrays of ids, and those the example of a batch.

Arrays of all examples lie back to back in the cache (`stored`), each under a name, with the length that every example has of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from narrowgauge.data.batches import Indices
from narrowgauge.data.cache import Values
from narrowgauge.data.encoder import Encoder
from narrowgauge.data.stored import Stored
from narrowgauge.data.tables import Record

Kind = Literal[
    "causal-lm", "classification", "seq2seq", "regression", "question-answering", "tagging", "multiple-choice"
]
Encoded = dict[str, Values]
Item = dict[str, Any]
Notes = Counter[str]  # sentence with {count} -> number of examples


@dataclass(frozen=True)
class Task(ABC):
    """What the columns of a table mean."""

    kind: ClassVar[Kind]
    refits: ClassVar[bool] = (
        False  # `encode` takes max_length, and cuts texts where they may be cut; else ids lose their end
    )
    windows: ClassVar[bool] = False  # `encode` takes max_length, and gives a list of examples for each row
    aside: ClassVar[frozenset[str]] = frozenset()  # arrays that no batch holds, but an evaluation may read
    learnt: ClassVar[str] = "target"  # what a row has none of that teaches nothing

    @property
    @abstractmethod
    def columns(self) -> list[str]:
        """Those that it reads."""

    @abstractmethod
    def arrays(self, encoder: Encoder) -> dict[str, np.dtype[Any]]:
        """The arrays of an encoded example, `input_ids` among them, and how they are stored."""

    @abstractmethod
    def encode(
        self, rows: Sequence[Record], encoder: Encoder, notes: Notes, max_length: int | None = None
    ) -> Iterator[Any]:
        """The Encoded of each row, or with `windows` a list of them. Raises DataError with the row's origin."""

    def length(self, example: Encoded) -> int:
        """Tokens that the limits are for."""
        return len(example["input_ids"])

    def targets(self, example: Encoded) -> int:
        """How many tokens, classes or numbers are learnt of an example."""
        return len(example["labels"])

    @staticmethod
    def item(arrays: Item) -> Item:
        """What a batch is made of: input_ids and labels at least."""
        return arrays

    @staticmethod
    def lengths(stored: Stored) -> Indices:
        """The width that a row of each example needs, int64."""
        return stored.sizes("input_ids")

    @staticmethod
    def strata(stored: Stored) -> Indices | None:
        """Of each example the group of its label, for batches that hold all groups in the data's shares; None where there is none."""
        return None

    @staticmethod
    def tokens(stored: Stored) -> Indices:
        """Tokens that a model reads of each example, int64; of a pair of texts the longer one's."""
        return stored.sizes("input_ids")
