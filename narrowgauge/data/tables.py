"""Reads rows with named columns from JSONL, CSV, TSV and Parquet, streaming and strictly.

Values keep their type. JSONL and CSV are not read with `datasets` or pandas. Both fill missing
columns and short rows with null, ignore text after a JSON object, rename repeated columns, and
report no lines. `datasets` 5.2 accepted 19 of 35 malformed files silently (decisions/training.md).
"""

from __future__ import annotations

import csv
import json
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from narrowgauge.data import row_forms
from narrowgauge.data.text import USERS, lines, reason, shown, too_long
from narrowgauge.errors import ConfigError, DataError, closest
from narrowgauge.storage import reading

CONVENTIONAL_COLUMN = "text"
DELIMITERS = {".csv": ",", ".tsv": "\t"}
OTHER_DELIMITERS = ";\t|"  # of files that end in .csv; a semicolon where a comma is in numbers
TABLES = frozenset({".jsonl", ".ndjson", ".parquet", *DELIMITERS})
SHOWN_COLUMNS = 20
SHOWN_CHARACTERS = 80  # of a column's name in messages
PARQUET_ROWS = 256  # rows decoded at a time
ARROW_TEXT = re.compile(
    r"(dictionary<values=)?(large_)?string"
)  # names of Arrow's string types, also string_view
JSON_TYPES = {
    type(None): "null", bool: "a boolean", int: "a number", float: "a number", list: "an array", dict: "an object",
}  # fmt: skip
Columns = Sequence[str] | None  # columns to read; None: the text column


class Record(NamedTuple):
    """One row of a table.

    values  {column: value}
    origin  file:line or file:row, for error messages
    """

    values: dict[str, Any]
    origin: str

    def text(self, column: str) -> str:
        """String in this column. Raises DataError for another type, or if UTF-8 cannot hold it."""
        value = self.values[column]
        if not isinstance(value, str):
            held = JSON_TYPES.get(type(value), type(value).__name__)
            known = f" ({value!r})" if isinstance(value, int | float) else ""
            raise DataError(
                f"{self.origin}: column {column!r} holds {held}{known}, not a string. Correct the row or remove it.",
                code="table.cell",
            )
        refuse_half_a_pair(value, f"{self.origin}: column {column!r}")
        return value


def refuse_half_a_pair(value: str, where: str) -> None:
    """Raises DataError for a string with a lone surrogate, which UTF-8 cannot encode."""
    try:
        # isascii is O(1) for str, and most texts are ASCII.
        if not value.isascii():
            value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where} holds half of a surrogate pair, \\u{ord(value[error.start]):04x}, at character {error.start}. Correct the row or "
            "remove it.",
            code="table.surrogate",
        ) from None


def chosen_columns(
    columns: Columns, found: Sequence[str], texts: Sequence[str], where: str
) -> list[str]:
    """Columns to read: the named ones, else 'text', else the only text column. Else DataError.

    columns  names, or None
    found    all columns of the table
    texts    columns with strings
    where    place for messages
    """
    listing = ", ".join(map(_short, found[:SHOWN_COLUMNS])) + (
        ", ..." if found[SHOWN_COLUMNS:] else ""
    )
    for column in columns or ():
        if column not in found:
            near = closest(column, found)
            hint = f" Closest: {near}." if near else ""
            raise DataError(
                f"{where}: no column {column!r}.{hint} Columns: {listing or 'none'}.",
                code="table.no-column",
            )
    if columns is not None:
        return list(columns)
    if CONVENTIONAL_COLUMN in found:
        return [CONVENTIONAL_COLUMN]
    if form := row_forms.form_of(found):
        raise DataError(
            f"{where}: rows of the form {form.name} ({', '.join(map(repr, form.required))}) are no running text. Learn their answers "
            "with task = 'causal-lm', or name the column of a text by data.column.",
            code="table.chats",
        )
    if not texts:
        raise DataError(
            f"{where}: no column holds text. Columns: {listing or 'none'}.",
            code="table.no-text-column",
        )
    if len(texts) > 1:
        raise DataError(
            f"{where}: which column holds the text? Name it by data.column, one of {listing}.",
            code="table.which-column",
        )
    return list(texts)


def _short(name: str) -> str:
    return repr(name if len(name) <= SHOWN_CHARACTERS else f"{name[:SHOWN_CHARACTERS]}...")


def table_rows(
    path: Path,
    columns: Columns,
    *,
    limit_bytes: int,
    header: Sequence[str] | None = None,
    optional: Sequence[str] = (),
) -> Iterator[Record]:
    """Yields the rows of a file whose suffix is in TABLES.

    optional  columns that a row may lack; its value is None then

    Raises DataError with file and line, ConfigError for an unnecessary `header`.
    """
    suffix = path.suffix.lower()
    if suffix in DELIMITERS:
        return _csv_rows(path, columns, limit_bytes, header, optional)
    if header is not None:
        raise ConfigError(
            f"{shown(path)}: header is for CSV and TSV files alone. Leave it out.",
            code="table.header",
        )
    return (
        _parquet_rows(path, columns, optional)
        if suffix == ".parquet"
        else selected(jsonl_objects(path, limit_bytes), columns, optional)
    )


def jsonl_objects(path: Path, limit_bytes: int) -> Iterator[tuple[dict[str, Any], str]]:
    """Yields (object, file:line) of each line that is not blank."""
    name = shown(path)
    for number, line in lines(path, limit_bytes=limit_bytes):
        if not line.isspace():
            where = f"{name}:{number}"
            yield _parse_object(line.rstrip("\r\n"), where), where


def selected(
    objects: Iterable[tuple[dict[str, Any], str]], columns: Columns, optional: Sequence[str] = ()
) -> Iterator[Record]:
    """Rows of JSON objects with their places: values of the chosen columns."""
    chosen: list[str] | None = None
    for row, where in objects:
        # Checked again for a row that lacks a column: chosen_columns then raises.
        if chosen is None or not row.keys() >= set(chosen):
            texts = [column for column, value in row.items() if isinstance(value, str | None)]
            chosen = chosen_columns(chosen or columns, list(row), texts, where)
        values = {column: row[column] for column in chosen}
        yield Record({column: row.get(column) for column in optional} | values, where)


def _parse_object(line: str, where: str) -> dict[str, Any]:
    """JSON object of one line. Raises DataError for anything else, and for a repeated key."""
    try:
        row = json.loads(line, object_pairs_hook=_unique_keys)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{where}: malformed or truncated JSON in column {error.colno}: {error.msg}. Write one whole object per line.",
            code="table.json",
        ) from None
    except (ValueError, RecursionError) as error:
        fault = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise DataError(
            f"{where}: unusable JSON: {fault}. Correct the line or remove it.",
            code="table.json-fault",
        ) from None
    if not isinstance(row, dict):
        held = JSON_TYPES.get(type(row), "a string")
        raise DataError(
            f'{where}: the line is {held}, not a JSON object. Write it as {{"text": ...}}.',
            code="table.no-object",
        )
    return row


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Object hook that rejects repeated keys; json itself keeps the last one silently."""
    row = dict(pairs)
    if len(row) != len(pairs):
        raise ValueError(
            f"the key {_repeated([name for name, _ in pairs])[0]!r} stands twice in one object"
        )
    return row


def _repeated(names: Sequence[str]) -> list[str]:
    return [name for name, count in Counter(names).items() if count > 1]


def _check_names(names: Sequence[str], where: str) -> None:
    if repeated := sorted(_repeated(names)):
        raise DataError(
            f"{where}: the header names {repeated[0]!r} twice. Rename one of the columns.",
            code="table.repeated-name",
        )


def delimiter_of(path: Path, limit_bytes: int, header: Sequence[str] | None = None) -> str:
    """Character between the fields of a CSV or TSV file.

    The comma of a .csv file, if its first line has one between fields. Otherwise the one of
    OTHER_DELIMITERS that gives the most fields, or as many as `header` has names.
    """
    usual = DELIMITERS[path.suffix.lower()]
    if usual != ",":
        return usual
    counts = {}
    for mark in (usual, *OTHER_DELIMITERS):
        try:
            first = next(_csv_lines(path, limit_bytes, mark), None)
        except DataError:  # said by the reading itself, with the delimiter that is taken
            first = None
        counts[mark] = len(first[1]) if first else 0
    if header is not None:
        return next((mark for mark in counts if counts[mark] == len(header)), usual)
    return usual if counts[usual] > 1 else max(counts, key=lambda mark: counts[mark])


def header_of(path: Path, limit_bytes: int) -> list[str]:
    """Names in the first line of a CSV or TSV file; [] for an empty file."""
    first = next(_csv_lines(path, limit_bytes, delimiter_of(path, limit_bytes)), None)
    return first[1] if first else []


def parquet_columns(path: Path) -> list[str]:
    """Names of the columns of a Parquet file. Needs pyarrow."""
    with _parquet_file(path) as file:
        return list(file.schema_arrow.names)


def _csv_rows(
    path: Path,
    columns: Columns,
    limit_bytes: int,
    header: Sequence[str] | None,
    optional: Sequence[str],
) -> Iterator[Record]:
    """Rows of a CSV or TSV file, all with as many fields as the header row, or as `header`."""
    where = file = shown(path)
    mark = delimiter_of(path, limit_bytes, header)
    rows, may_be_header = _csv_lines(path, limit_bytes, mark), header is not None
    if header is not None:
        names = list(header)
    elif first := next(rows, None):
        where, names = f"{file}:{first[0]}", first[1]
        _check_names(names, where)
    else:
        return
    chosen = chosen_columns(columns, names, names, where)
    present = [column for column in optional if column in names]
    places = {column: names.index(column) for column in (*chosen, *present)}
    absent = dict.fromkeys(optional)
    for line, row in rows:
        where = f"{file}:{line}"
        if len(row) != len(names):
            raise DataError(
                f"{where}: {len(row)} fields, but the header has {len(names)}. Correct or remove the row.",
                code="table.fields",
            )
        # The user named the columns, but the file has a header row as well.
        if may_be_header and row == names:
            raise DataError(
                f"{where}: the first row repeats the names given for the columns. Leave them out.",
                code="table.first-row",
            )
        may_be_header = False
        yield Record(absent | {column: row[place] for column, place in places.items()}, where)


def _csv_lines(path: Path, limit_bytes: int, mark: str) -> Iterator[tuple[int, list[str]]]:
    """Yields (first line, fields) of each non-blank row."""
    # TSV has no quoting (IANA text/tab-separated-values). strict: without it, csv ignores a stray
    # quotation mark.
    tab: dict[str, Any] = {"delimiter": "\t", "quoting": csv.QUOTE_NONE}
    is_tsv = DELIMITERS[path.suffix.lower()] == "\t"
    form: dict[str, Any] = tab if is_tsv else {"strict": True, "delimiter": mark}
    reader = csv.reader((line for _, line in lines(path, limit_bytes=limit_bytes)), **form)
    while True:
        # csv's field limit is global to the process: set and restored around each row, since the
        # consumer of this generator may use csv too.
        line, before = reader.line_num + 1, csv.field_size_limit(limit_bytes)
        try:
            row = next(reader, None)
        except csv.Error as error:
            where = f"{shown(path)}:{line}"
            if "field limit" in str(error):
                remedy = "A quotation mark may be open. Split the document over several rows."
                raise too_long(where, limit_bytes, remedy) from None
            fault = (
                "a quotation mark is open to the end of the file"
                if "end of data" in str(error)
                else error
            )
            raise DataError(
                f'{where}: malformed CSV: {fault}. Put a field with {mark!r}, " or line break in quotation marks; double each " in it.',
                code="table.csv",
            ) from None
        finally:
            csv.field_size_limit(before)
        if row is None:
            return
        if row:
            yield line, row


@contextmanager
def _parquet_file(path: Path) -> Iterator[Any]:
    """An open Parquet file; errors of the body become DataError. Needs pyarrow."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise ConfigError(
            f"{shown(path)}: Parquet needs pyarrow. Run: pip install pyarrow.",
            code="table.no-pyarrow",
        ) from None
    with reading.opened(path, USERS):  # rejects pipes, on which pyarrow would block
        pass
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            yield file
    except (
        pyarrow.ArrowException,
        OSError,
        UnicodeDecodeError,
    ) as error:  # UnicodeDecodeError: column names
        raise DataError(
            f"{shown(path)}: cannot be read as Parquet: {reason(error)} Write or download the file again.",
            code="table.parquet",
        ) from error


def _parquet_rows(path: Path, columns: Columns, optional: Sequence[str]) -> Iterator[Record]:
    """Yields rows, counted from 1; nested columns become lists and dicts. Needs pyarrow."""
    name, first = shown(path), 1
    with _parquet_file(path) as file:
        schema = file.schema_arrow
        _check_names(schema.names, name)
        texts = [field.name for field in schema if ARROW_TEXT.match(str(field.type))]
        chosen = chosen_columns(columns, schema.names, texts, name)
        chosen += [column for column in optional if column in schema.names]
        absent = dict.fromkeys(optional)
        # Batches: to_pylist of a whole row group would multiply its memory.
        for batch in file.iter_batches(batch_size=PARQUET_ROWS, columns=chosen):
            for row, values in enumerate(_batch_rows(batch, name, first), first):
                yield Record(absent | values, f"{name}:{row}")
            first += batch.num_rows


def _batch_rows(batch: Any, file: str, first: int) -> list[dict[str, Any]]:
    """Rows of an Arrow batch as dicts. first: row number of its first row in the file."""
    try:
        return list(batch.to_pylist())
    except UnicodeDecodeError:
        # Slow path, after an error: find the value to name in the message.
        for place, column in (
            (place, column) for place in range(batch.num_rows) for column in batch.schema.names
        ):
            try:
                batch.column(column)[place].as_py()
            except UnicodeDecodeError as error:
                raise DataError(
                    f"{file}:{first + place}: column {column!r} is invalid UTF-8 at byte {error.start} of the value. "
                    "Write the column as UTF-8, or store bytes as binary.",
                    code="table.utf8",
                ) from None
        raise
