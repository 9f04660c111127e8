"""Rows with named columns, read as streams and strictly: JSONL, CSV, TSV and Parquet.

    for record in records("train.jsonl", ["prompt", "completion"]):
        record.values["prompt"], record.origin          # origin: file:line, for error messages

A name means what it means for `documents`: a file, a folder's glob. A missing column, a ragged row or a malformed line is a
DataError with file and line. Values keep their type: a CSV has strings alone, JSONL and Parquet also numbers and lists.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowgauge.data.sources import TABLES, files_of
from narrowgauge.data.tables import DELIMITERS, checked_text, choose_column, csv_rows, parquet_rows, parse_object
from narrowgauge.data.text import LIMIT_BYTES, lines, shown
from narrowgauge.errors import ConfigError, DataError


@dataclass(frozen=True, slots=True)
class Record:
    """The values of one row by column, and where it stands."""

    values: dict[str, Any]
    origin: str

    def text(self, column: str) -> str:
        """The string in this column. Raises DataError if it holds something else."""
        return checked_text(self.values[column], column, self.origin)


def records(
    source: str | os.PathLike[str],
    columns: Sequence[str],
    *,
    header: Sequence[str] | None = None,
    limit_bytes: int = LIMIT_BYTES,
) -> Iterator[Record]:
    """The rows of `source` with these columns, in the order of the sorted paths.

    header  names of the columns of CSV and TSV files that have no header row.

    Raises DataError for what is wrong with the data, at the row; ConfigError for an option that the file does not have.
    """
    if not columns or len(set(columns)) != len(columns):
        raise ConfigError(f"records: columns {list(columns)}. Name each column to read, once.")
    for path in files_of(os.fspath(source)):
        suffix = path.suffix.lower()
        if suffix not in TABLES:
            raise DataError(
                f"{shown(path)}: no table, so it has no columns. Pass files that end in {', '.join(sorted(TABLES))}."
            )
        if header is not None and suffix not in DELIMITERS:
            raise ConfigError(f"{shown(path)}: header is for CSV and TSV files alone. Leave it out.")
        yield from _rows(path, suffix, list(columns), header, limit_bytes)


def _rows(
    path: Path, suffix: str, columns: list[str], header: Sequence[str] | None, limit_bytes: int
) -> Iterator[Record]:
    if suffix in DELIMITERS:
        yield from _csv(path, columns, header, limit_bytes)
    elif suffix == ".parquet":
        for where, values in parquet_rows(path, columns=columns):
            yield Record(values, where)
    else:
        yield from _jsonl(path, columns, limit_bytes)


def _jsonl(path: Path, columns: list[str], limit_bytes: int) -> Iterator[Record]:
    for number, line in lines(path, limit_bytes=limit_bytes):
        if line.isspace():
            continue
        where = f"{shown(path)}:{number}"
        row = parse_object(line.rstrip("\r\n"), where)
        for column in columns:
            if column not in row:
                choose_column(column, list(row), (), where)
        yield Record({column: row[column] for column in columns}, where)


def _csv(path: Path, columns: list[str], header: Sequence[str] | None, limit_bytes: int) -> Iterator[Record]:
    places, seen = None, header is None
    if header is not None:
        places = [header.index(choose_column(column, header, (), shown(path))) for column in columns]
    for where, row in csv_rows(path, limit_bytes=limit_bytes, header=header):
        if places is None:
            places = [row.index(choose_column(column, row, (), where)) for column in columns]
            continue
        if not seen and row == list(header or ()):
            raise DataError(
                f"{where}: the first row repeats the names given for the columns: the file has a header row. Leave them out."
            )
        seen = True
        yield Record(dict(zip(columns, (row[place] for place in places), strict=True)), where)
