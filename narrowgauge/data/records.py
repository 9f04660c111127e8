"""Reads the rows of tables with the columns that a task needs.

    for record in records("train.jsonl", ["prompt", "completion"]):
        record.values["prompt"], record.origin          # origin: file:line, for error messages

A missing column, a ragged row or a malformed line raises DataError with file and line. Values keep their type: CSV has strings
alone, JSONL and Parquet also numbers and lists.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from narrowgauge.data.sources import files_of
from narrowgauge.data.tables import TABLES, checked_text, choose_column, table_rows
from narrowgauge.data.text import LIMIT_BYTES, shown
from narrowgauge.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class Record:
    """The values of one row by column, and its origin."""

    values: dict[str, Any]
    origin: str

    def text(self, column: str) -> str:
        """The string in this column. Raises DataError if the value is not a string."""
        return checked_text(self.values[column], column, self.origin)


def records(
    source: str | os.PathLike[str],
    columns: Sequence[str],
    *,
    header: Sequence[str] | None = None,
    limit_bytes: int = LIMIT_BYTES,
) -> Iterator[Record]:
    """The rows of `source` with these columns, in the order of the sorted paths.

    header  column names of CSV and TSV files without a header row

    Raises DataError when it reaches a faulty row; ConfigError for an option that does not fit the file.
    """
    if not columns or len(set(columns)) != len(columns):
        raise ConfigError(f"records: columns {list(columns)}. Name each column to read, once.")

    def choose(found: Sequence[str], texts: Sequence[str], where: str) -> list[str]:
        return [choose_column(column, found, (), where) for column in columns]

    for path in files_of(os.fspath(source)):
        if path.suffix.lower() not in TABLES:
            raise DataError(
                f"{shown(path)}: no table, so it has no columns. Pass files that end in {', '.join(sorted(TABLES))}."
            )
        for where, values in table_rows(path, choose, limit_bytes=limit_bytes, header=header):
            yield Record(values, where)
