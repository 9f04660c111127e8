"""Rows with a column of text: JSONL, CSV, TSV and Parquet, read as streams and strictly.

A value that is not a string is an error, never converted: readers that turn null into 'None' or 5 into '5' train on it.
Without a column name, the column called 'text' is taken, or else the only one that holds strings; anything else is
ambiguous, and the error lists the columns. Rows whose text is empty are the caller's to pass over.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from narrowgauge.data.text import Document, lines, reason, shown, too_long
from narrowgauge.errors import ConfigError, DataError, closest

CONVENTIONAL_COLUMN = "text"
DELIMITERS = {".csv": ",", ".tsv": "\t"}
SHOWN_COLUMNS = 20
PARQUET_ROWS = 256  # rows decoded at a time
SHORTER_ROWS = "Split the document over several rows."


def choose_column(column: str | None, columns: Sequence[str], candidates: Sequence[str], where: str) -> str:
    """The column to read, out of all `columns`, of which the `candidates` could hold strings.

    Raises DataError if the named column is missing, or if none is named and there is no obvious one.
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
    type(None): "null",
    bool: "a boolean",
    int: "a number",
    float: "a number",
    list: "an array",
    dict: "an object",
}


def checked_text(value: object, column: str, where: str) -> str:
    """`value` if it is a string that UTF-8 can hold. Raises DataError otherwise."""
    if not isinstance(value, str):
        held = JSON_TYPES.get(type(value), type(value).__name__)
        known = f" ({value!r})" if isinstance(value, int | float) else ""
        raise DataError(f"{where}: column {column!r} holds {held}{known}, not a string. Correct the row or remove it.")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DataError(
                f"{where}: column {column!r} holds half of a surrogate pair, \\u{ord(value[error.start]):04x}, at "
                f"character {error.start}, which is no valid text. Correct the row or remove it."
            ) from None
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    row = dict(pairs)
    if len(row) != len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(
            f"the key {next(name for name in names if names.count(name) > 1)!r} stands twice in one object"
        )
    return row


def parse_object(line: str, where: str) -> dict[str, Any]:
    """The JSON object of one line. Raises DataError for anything else, and for a key that stands twice."""
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


def jsonl_documents(path: Path, *, column: str | None, limit_bytes: int) -> Iterator[Document]:
    """One document per line. Blank lines are passed over; the first row decides the column if none is named."""
    for number, line in lines(path, limit_bytes=limit_bytes):
        if line.isspace():
            continue
        where = f"{shown(path)}:{number}"
        row = parse_object(line.rstrip("\r\n"), where)
        if column is None or column not in row:
            column = choose_column(
                column, list(row), [name for name in row if isinstance(row[name], str | None)], where
            )
        yield Document(checked_text(row[column], column, where), where)


class CsvRows:
    """Rows of a CSV file with the line on which each begins.

    The csv module's limit on a field is global; it is raised around each row alone and put back.
    """

    def __init__(self, path: Path, limit_bytes: int):
        self.path, self.limit_bytes, self.line = path, limit_bytes, 0
        tab = DELIMITERS[path.suffix.lower()] == "\t"
        # TSV has no quoting (IANA text/tab-separated-values): a quotation mark in it is text.
        form: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE} if tab else {"strict": True}
        self._lines = (line for _, line in lines(path, limit_bytes=limit_bytes))
        self._reader = csv.reader(self._lines, **form)

    def __iter__(self) -> Iterator[list[str]]:
        while (row := self._next()) is not None:
            if row:
                yield row

    def _next(self) -> list[str] | None:
        self.line = self._reader.line_num + 1
        before = csv.field_size_limit(self.limit_bytes)
        try:
            return next(self._reader, None)
        except csv.Error as error:
            self._fail(error)
        finally:
            csv.field_size_limit(before)

    def _fail(self, error: csv.Error) -> NoReturn:
        where = f"{shown(self.path)}:{self.line}"
        if "field limit" in str(error):
            raise too_long(where, self.limit_bytes, f"A quotation mark may be open. {SHORTER_ROWS}") from None
        raise DataError(
            f"{where}: malformed CSV: {error}. Put a field with a comma, quotation mark or line break in quotation marks, "
            "and double each quotation mark inside it."
        ) from None


def csv_documents(path: Path, *, column: str | None, limit_bytes: int) -> Iterator[Document]:
    """One document per row below the header row. Comma and RFC 4180 quoting in .csv; tab and no quoting in .tsv."""
    header: list[str] | None = None
    for where, row in csv_rows(path, limit_bytes=limit_bytes):
        if header is None:
            header = row
            index = header.index(_csv_column(column, header, where))
            continue
        yield Document(row[index], where)


def csv_rows(path: Path, *, limit_bytes: int, header: Sequence[str] | None = None) -> Iterator[tuple[str, list[str]]]:
    """(file:line, fields) of each row, all with as many fields as the first one, the header row, or as `header`.

    Raises DataError for a ragged row, and for a header row that names a column twice.
    """
    rows = CsvRows(path, limit_bytes)
    width = None if header is None else len(header)
    for row in rows:
        where = f"{shown(path)}:{rows.line}"
        if width is None:
            width = len(row)
            if repeated := sorted({name for name in row if row.count(name) > 1}):
                raise DataError(f"{where}: the header names {repeated[0]!r} twice. Rename one of the columns.")
        if len(row) != width:
            raise DataError(f"{where}: {len(row)} fields, but the header has {width}. Correct the row or remove it.")
        yield where, row


def _csv_column(column: str | None, header: list[str], where: str) -> str:
    if column is None and len(header) == 1 and any(mark in header[0] for mark in ";\t|"):
        raise DataError(
            f"{where}: the header {header[0]!r} is not separated by commas. Save the file with commas, or as TSV."
        )
    return choose_column(column, header, header, where)


def parquet_documents(path: Path, *, column: str | None, limit_bytes: int) -> Iterator[Document]:
    """One document per row. Origin: path:row, from 1. Needs pyarrow."""
    arrow = _pyarrow(path)
    try:
        with arrow.parquet.ParquetFile(path) as file:
            schema = file.schema_arrow
            texts = [field.name for field in schema if is_text(arrow, field.type)]
            column = choose_column(column, schema.names, texts, shown(path))
            if column not in texts:
                kind = schema.field(column).type
                raise DataError(
                    f"{shown(path)}: column {column!r} holds {kind}, not strings. Columns of strings: {texts}."
                )
            first = 1
            for batch in file.iter_batches(batch_size=PARQUET_ROWS, columns=[column]):
                yield from _arrow_documents(arrow, batch.column(0), column, path, first, limit_bytes)
                first += batch.num_rows
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:  # the last for the names of columns
        raise DataError(
            f"{shown(path)}: cannot be read as Parquet: {reason(error)} Write or download the file again."
        ) from error


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.compute
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(f"{shown(path)}: Parquet needs pyarrow. Run: pip install pyarrow.") from None
    return pyarrow


def parquet_rows(path: Path, *, columns: Sequence[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(path:row, values by column) of each row, of these columns alone. Nested columns become lists and dicts."""
    arrow = _pyarrow(path)
    try:
        with arrow.parquet.ParquetFile(path) as file:
            for column in columns:
                choose_column(column, file.schema_arrow.names, (), shown(path))
            first = 1
            for batch in file.iter_batches(batch_size=PARQUET_ROWS, columns=list(columns)):
                for row, values in enumerate(batch.to_pylist(), first):
                    yield f"{shown(path)}:{row}", values
                first += batch.num_rows
    except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{shown(path)}: cannot be read as Parquet: {reason(error)} Write or download the file again."
        ) from error


def is_text(arrow: Any, kind: Any) -> bool:
    """Whether an Arrow type is one of strings, plain or dictionary-encoded."""
    if arrow.types.is_dictionary(kind):
        kind = kind.value_type
    return any(test(kind) for test in (arrow.types.is_string, arrow.types.is_large_string, arrow.types.is_string_view))


def _arrow_documents(
    arrow: Any, values: Any, column: str, path: Path, first: int, limit_bytes: int
) -> Iterator[Document]:
    for row, value in enumerate(values.cast(arrow.large_string()), first):
        where = f"{shown(path)}:{row}"
        if (raw := value.as_buffer()) is not None and raw.size > limit_bytes:
            raise too_long(where, limit_bytes, SHORTER_ROWS)
        try:
            yield Document(checked_text(value.as_py(), column, where), where)
        except UnicodeDecodeError as error:
            raise DataError(
                f"{where}: column {column!r} is invalid UTF-8 at byte {error.start} of the value. "
                "Write the column as UTF-8, or store bytes as binary."
            ) from None
