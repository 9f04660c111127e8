"""Reads rows with named columns from JSONL, CSV, TSV and Parquet, streaming and strictly.

Values keep their type. We do not use `datasets` or pandas for JSONL and CSV: they fill missing columns and short rows with null,
ignore text after a JSON object, rename repeated columns, and do not report lines.
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from narrowgauge.data.text import Document, lines, reason, shown, too_long
from narrowgauge.errors import ConfigError, DataError, closest

CONVENTIONAL_COLUMN = "text"
DELIMITERS = {".csv": ",", ".tsv": "\t"}
SHOWN_COLUMNS = 20
PARQUET_ROWS = 256  # rows decoded at a time
ARROW_TEXT = re.compile(r"(dictionary<values=)?(large_)?string")  # names of Arrow's string types, also string_view
Rows = Iterator[tuple[str, dict[str, Any]]]  # file:line (or file:row), and the values by column
Choose = Callable[[Sequence[str], Sequence[str], str], list[str]]  # (columns, those of texts, where) -> columns to read


def choose_column(column: str | None, columns: Sequence[str], candidates: Sequence[str], where: str) -> str:
    """The column to read: the named one, else 'text', else the only one of the `candidates` that hold strings.

    Raises DataError if the named column is missing, or if none is named and the choice is not clear.
    """
    listing = ", ".join(map(repr, columns[:SHOWN_COLUMNS])) + (", ..." if columns[SHOWN_COLUMNS:] else "")
    if column is not None and column not in columns:
        near = closest(column, columns)
        hint = f" Closest: {near}." if near else ""
        raise DataError(f"{where}: no column {column!r}.{hint} Columns: {listing or 'none'}.")
    if column is not None:
        return column
    if CONVENTIONAL_COLUMN in columns:
        return CONVENTIONAL_COLUMN
    if not candidates:
        raise DataError(f"{where}: no column holds text. Columns: {listing or 'none'}.")
    if len(candidates) > 1:
        raise DataError(f"{where}: which column holds the text? Name it with `column`, one of {listing}.")
    return candidates[0]


JSON_TYPES = {
    type(None): "null", bool: "a boolean", int: "a number", float: "a number", list: "an array", dict: "an object",
}  # fmt: skip


def checked_text(value: object, column: str, where: str) -> str:
    """Returns `value`. Raises DataError unless it is a string that UTF-8 can encode."""
    if not isinstance(value, str):
        held = JSON_TYPES.get(type(value), type(value).__name__)
        known = f" ({value!r})" if isinstance(value, int | float) else ""
        raise DataError(f"{where}: column {column!r} holds {held}{known}, not a string. Correct the row or remove it.")
    try:
        if not value.isascii():
            value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: column {column!r} holds half of a surrogate pair, \\u{ord(value[error.start]):04x}, at "
            f"character {error.start}, which is no valid text. Correct the row or remove it."
        ) from None
    return value


def table_documents(path: Path, *, column: str | None, limit_bytes: int) -> Iterator[Document]:
    """One document per row of a table. The first row or the header determines the column if none is named."""

    def choose(columns: Sequence[str], texts: Sequence[str], where: str) -> list[str]:
        is_csv = path.suffix.lower() in DELIMITERS
        if column is None and is_csv and len(columns) == 1 and any(mark in columns[0] for mark in ";\t|"):
            raise DataError(
                f"{where}: the header {columns[0]!r} is not separated by commas. Save the file with commas, or as TSV."
            )
        return [choose_column(column, columns, texts, where)]

    for where, row in table_rows(path, choose, limit_bytes=limit_bytes):
        for name, value in row.items():
            yield Document(checked_text(value, name, where), where)


def table_rows(path: Path, choose: Choose, *, limit_bytes: int, header: Sequence[str] | None = None) -> Rows:
    """The rows of a file whose suffix is in TABLES, with the columns that `choose` returns.

    Raises DataError with file and line for malformed rows, ConfigError for a `header` of a file that names its columns.
    """
    suffix = path.suffix.lower()
    if suffix in DELIMITERS:
        return _csv_rows(path, choose, limit_bytes, header)
    if header is not None:
        raise ConfigError(f"{shown(path)}: header is for CSV and TSV files alone. Leave it out.")
    return READERS[suffix](path, choose, limit_bytes)


def _jsonl_rows(path: Path, choose: Choose, limit_bytes: int) -> Rows:
    chosen: list[str] | None = None
    name = shown(path)
    for number, line in lines(path, limit_bytes=limit_bytes):
        if line.isspace():
            continue
        where = f"{name}:{number}"
        row = _parse_object(line.rstrip("\r\n"), where)
        if chosen is None:
            chosen = choose(
                list(row), [column for column, value in row.items() if isinstance(value, str | None)], where
            )
        for column in chosen:
            if column not in row:
                choose_column(column, list(row), (), where)  # raises
        yield where, {column: row[column] for column in chosen}


def _parse_object(line: str, where: str) -> dict[str, Any]:
    """The JSON object of one line. Raises DataError for anything else, and for a repeated key."""
    try:
        row = json.loads(line, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}: malformed or truncated JSON in column {error.colno}: {error.msg}. "
            "A JSONL file holds one whole JSON object per line; correct the line or remove it."
        ) from None
    except (ValueError, RecursionError) as error:
        fault = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise DataError(f"{where}: unusable JSON: {fault}. Correct the line or remove it.") from None
    if not isinstance(row, dict):
        held = JSON_TYPES.get(type(row), "a string")
        raise DataError(f'{where}: the line is {held}, not a JSON object. Write it as {{"text": ...}}.')
    return row


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        raise ValueError(f"the key {_repeated([name for name, _ in pairs])[0]!r} stands twice in one object")
    return row


def _repeated(names: Sequence[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def _check_names(names: Sequence[str], where: str) -> None:
    if repeated := sorted(_repeated(names)):
        raise DataError(f"{where}: the header names {repeated[0]!r} twice. Rename one of the columns.")


def _csv_rows(path: Path, choose: Choose, limit_bytes: int, header: Sequence[str] | None) -> Rows:
    """Rows of a CSV or TSV file, all with as many fields as the first one, the header row, or as `header`."""
    names, places = None if header is None else list(header), dict[str, int]()
    may_be_header, file = names is not None, shown(path)
    if names is not None:
        places = {column: names.index(column) for column in choose(names, names, file)}
    for line, row in _csv_lines(path, limit_bytes):
        where = f"{file}:{line}"
        if names is None:
            names = row
            _check_names(names, where)
            places = {column: names.index(column) for column in choose(names, names, where)}
            continue
        if len(row) != len(names):
            raise DataError(
                f"{where}: {len(row)} fields, but the header has {len(names)}. Correct the row or remove it."
            )
        if may_be_header and row == names:
            raise DataError(
                f"{where}: the first row repeats the names given for the columns: the file has a header row. Leave them out."
            )
        may_be_header = False
        yield where, {column: row[place] for column, place in places.items()}


def _csv_lines(path: Path, limit_bytes: int) -> Iterator[tuple[int, list[str]]]:
    """(first line, fields) of each row that is not blank.

    The csv module's field limit is global, so it is raised and restored around each row.
    """
    # TSV has no quoting (IANA text/tab-separated-values).
    tab: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
    form = tab if DELIMITERS[path.suffix.lower()] == "\t" else {"strict": True}
    reader = csv.reader((line for _, line in lines(path, limit_bytes=limit_bytes)), **form)
    while True:
        line, before = reader.line_num + 1, csv.field_size_limit(limit_bytes)
        try:
            row = next(reader, None)
        except csv.Error as error:
            where = f"{shown(path)}:{line}"
            if "field limit" in str(error):
                remedy = "A quotation mark may be open. Split the document over several rows."
                raise too_long(where, limit_bytes, remedy) from None
            raise DataError(
                f"{where}: malformed CSV: {error}. Put a field with a comma, quotation mark or line break in quotation marks, "
                "and double each quotation mark inside it."
            ) from None
        finally:
            csv.field_size_limit(before)
        if row is None:
            return
        if row:
            yield line, row


def _parquet_rows(path: Path, choose: Choose, limit_bytes: int) -> Rows:
    """Rows count from 1; nested columns become lists and dicts. Needs pyarrow."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(f"{shown(path)}: Parquet needs pyarrow. Run: pip install pyarrow.") from None
    name = shown(path)
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            schema, first = file.schema_arrow, 1
            _check_names(schema.names, name)
            texts = [field.name for field in schema if ARROW_TEXT.match(str(field.type))]
            chosen = choose(schema.names, texts, name)
            for batch in file.iter_batches(batch_size=PARQUET_ROWS, columns=chosen):
                for row, values in enumerate(_batch_rows(batch, name, first), first):
                    yield f"{name}:{row}", values
                first += batch.num_rows
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:  # UnicodeDecodeError: column names
        raise DataError(
            f"{name}: cannot be read as Parquet: {reason(error)} Write or download the file again."
        ) from error


def _batch_rows(batch: Any, file: str, first: int) -> list[dict[str, Any]]:
    """The values by column of an Arrow batch whose first row is row `first` of the file."""
    try:
        return list(batch.to_pylist())
    except UnicodeDecodeError:
        names, rows = batch.schema.names, range(batch.num_rows)
        return [
            {name: _value(batch.column(name)[row], name, f"{file}:{first + row}") for name in names} for row in rows
        ]


def _value(scalar: Any, column: str, where: str) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{where}: column {column!r} is invalid UTF-8 at byte {error.start} of the value. "
            "Write the column as UTF-8, or store bytes as binary."
        ) from None


READERS = {".jsonl": _jsonl_rows, ".ndjson": _jsonl_rows, ".parquet": _parquet_rows}
TABLES = frozenset({*READERS, *DELIMITERS})
