"""Interface of a table task: encodes rows as arrays of ids, and decodes examples from them.

The cache (`example_arrays`) holds the arrays of all examples back to back, by name, with each example's
number of elements.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from narrowgauge.data.cache import Values

if TYPE_CHECKING:
    from narrowgauge.data.batches import Indices
    from narrowgauge.data.encoder import Encoder
    from narrowgauge.data.example_arrays import ExampleArrays
    from narrowgauge.data.tables import Record

Encoded = dict[str, Values]
Item = dict[str, Any]
Notes = Counter[str]  # sentence with {count} -> number of examples


@dataclass(frozen=True)
class Task(ABC):
    """Roles of a table's columns, and the encoding of its rows.

    kind                 name of the task, as in the setting `task`
    can_truncate         True: `encode` accepts max_length and truncates texts at allowed places;
                         False: too long examples lose the end of their ids
    splits_into_windows  True: `encode` accepts max_length and yields a list of examples per row
    evaluation_arrays    arrays that an evaluation reads but no batch contains
    target_noun          noun for the part that a row without targets lacks, for messages
    """

    kind: ClassVar[str]
    can_truncate: ClassVar[bool] = False
    splits_into_windows: ClassVar[bool] = False
    evaluation_arrays: ClassVar[frozenset[str]] = frozenset()
    target_noun: ClassVar[str] = "target"

    @property
    @abstractmethod
    def columns(self) -> list[str]:
        """Names of the columns that the task reads."""

    @property
    def optional_columns(self) -> tuple[str, ...]:
        """Columns that a row may lack; its value is None then."""
        return ()

    @abstractmethod
    def arrays(self, encoder: Encoder) -> dict[str, np.dtype[Any]]:
        """{name: stored dtype} of an encoded example's arrays, `input_ids` among them."""

    @abstractmethod
    def encode(
        self, rows: Sequence[Record], encoder: Encoder, notes: Notes, max_length: int | None = None
    ) -> Iterator[Any]:
        """Yields each row's arrays, or a list per row if the task `splits_into_windows`.

        Raises DataError with the row.
        """

    def length(self, example: Encoded) -> int:
        """Length of an example that the limits apply to, in tokens."""
        return len(example["input_ids"])

    def targets(self, example: Encoded) -> int:
        """Number of an example's targets: tokens, classes or numbers."""
        return len(example["labels"])

    @staticmethod
    def item(arrays: Item) -> Item:
        """Converts stored arrays to an example for the collator, at least input_ids and labels.

        The collator pads `labels` by their kind (`collate.Collator._labels`):

            a scalar         a class
            floats           numbers of the row, such as targets of a regression; one for each pair
                             where `input_ids` is a list, one array for each text
            a tuple          positions of a span
            other integers   one class per token, padded as the tokens are
        """
        return arrays

    @staticmethod
    def lengths(stored: ExampleArrays) -> Indices:
        """Row width that each example needs, int64."""
        return stored.sizes("input_ids")

    @staticmethod
    def strata(stored: ExampleArrays) -> Indices | None:
        """Label group of each example, for batches with the data's shares; None without groups."""
        return None

    @staticmethod
    def tokens(stored: ExampleArrays) -> Indices:
        """Tokens that a model reads of each example, int64; for a text pair the longer text's."""
        return stored.sizes("input_ids")
