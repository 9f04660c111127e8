"""Regression examples: a text or a pair of texts, and one or more numbers.

Numbers are read strictly: a missing number, NaN, infinity and a decimal comma are errors with the
row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from narrowgauge.data.batches import Indices
from narrowgauge.data.cache import token_dtype
from narrowgauge.data.encoder import Encoder
from narrowgauge.data.stored import Stored
from narrowgauge.data.strata import strata_of
from narrowgauge.data.tables import Record
from narrowgauge.data.task import Encoded, Kind, Notes, Task
from narrowgauge.errors import ConfigError, DataError

DECIMAL = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*")
LARGEST = 3.4e38  # largest float32; the loss is computed in float32


@dataclass(frozen=True, kw_only=True)
class Regression(Task):
    """Columns with a text, optionally a second one, and the target numbers in output order."""

    text: str = "text"
    pair: str | None = None
    labels: tuple[str, ...] = ("label",)
    kind: ClassVar[Kind] = "regression"
    refits: ClassVar[bool] = True
    learnt: ClassVar[str] = "text"

    def __post_init__(self) -> None:
        if not self.labels or len(set(self.labels)) != len(self.labels) or not all(self.labels):
            raise ConfigError(
                f"Regression: labels {self.labels!r}. Name each column with numbers once.",
                code="regression.labels",
            )

    @property
    def columns(self) -> list[str]:
        return [self.text, *([self.pair] if self.pair is not None else []), *self.labels]

    def arrays(self, encoder: Encoder) -> dict[str, np.dtype[Any]]:
        ids = token_dtype(encoder.vocabulary - 1)
        return {"input_ids": ids, "token_type_ids": np.dtype("u1"), "labels": np.dtype("<f8")}

    @staticmethod
    def strata(stored: Stored) -> Indices:
        """Quartile of the number in the last column."""
        return strata_of(stored.numbers("labels"), stored.sizes("input_ids"))

    def encode(
        self, rows: Sequence[Record], encoder: Encoder, notes: Notes, max_length: int | None = None
    ) -> Iterator[Encoded]:
        numbers = [np.array([number_of(row, column) for column in self.labels]) for row in rows]
        examples = encoder.rows(rows, self.text, self.pair, max_length)
        return (
            {**example, "labels": label} for example, label in zip(examples, numbers, strict=True)
        )


def number_of(row: Record, column: str) -> float:
    """Number in this column, also if it is written as text. Raises DataError for anything else."""
    value = row.values[column]
    # DECIMAL first: float() also accepts "nan", "inf" and underscores.
    number = float(value) if isinstance(value, str) and DECIMAL.fullmatch(value) else value
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise DataError(
            f"{row.origin}: {value!r} in column {column!r} is no number. Correct the row, or name other columns in label_column.",
            code="regression.not-a-number",
        )
    if not math.isfinite(number) or abs(number) > LARGEST:
        raise DataError(
            f"{row.origin}: {value!r} in column {column!r} cannot be learnt. Correct the row or remove it.",
            code="regression.not-finite",
        )
    return float(number)
