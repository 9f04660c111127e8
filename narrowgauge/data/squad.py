"""Reads SQuAD's own JSON files, versions 1 and 2, whose questions are nested below their context.

    {"data": [{"paragraphs": [{"context": ..., "qas": [{"id": ..., "question": ..., "answers": [...], "is_impossible": ...}]}]}]}

Two other forms are read as tables: a list of objects, [{column: value, ...}, ...], and JSON Lines
in a file that ends in .json, as `datasets` writes them.

Each question becomes a row with the columns id, question, context and answers. The file is read
into memory: 40 MB for the largest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from narrowgauge.data.tables import (
    JSON_TYPES,
    Columns,
    Record,
    chosen_columns,
    jsonl_objects,
    selected,
)
from narrowgauge.data.text import LIMIT_BYTES, lines, shown
from narrowgauge.errors import DataError, StorageError
from narrowgauge.storage import reading

WHOLE = reading.Kind(
    most_bytes=4 * reading.GIB,
    error=DataError,
    refused=StorageError,
    follow_links=True,
    step="Download the file again, or pass a table (JSONL).",
)
FIRST_BYTES = 2**20
COLUMNS = ("id", "question", "context", "answers")


def json_rows(
    path: Path, columns: Columns, optional: Sequence[str] = (), limit_bytes: int = LIMIT_BYTES
) -> Iterator[Record]:
    """Yields the rows of a .json file: objects of a list or of lines, or SQuAD's questions.

    Raises DataError with the place for another form.
    """
    if is_lines(path):
        return selected(jsonl_objects(path, limit_bytes), columns, optional)
    whole = reading.json_of(path, WHOLE)
    if isinstance(whole, list):
        return selected(_objects(whole, shown(path)), columns, optional)
    return _squad_rows(whole, shown(path), columns)


def is_lines(path: Path) -> bool:
    """True if a file is JSON Lines: its first line is a whole object, and another follows."""
    try:
        found = (line for _, line in lines(path, limit_bytes=LIMIT_BYTES) if not line.isspace())
        first = reading.strict_json(next(found, ""))
        return isinstance(first, dict) and next(found, "") != ""
    except (ValueError, RecursionError, DataError):  # said by the reading of the whole
        return False


def first_object(path: Path) -> dict[str, Any] | None:
    """First row of a .json file that is a list or lines; None for another form.

    Reads FIRST_BYTES, so that the columns of a large file are known at once, and all of a file
    whose first row is longer.
    """
    with reading.opened(path, WHOLE) as file:
        text = file.read(FIRST_BYTES).decode("utf-8-sig", "ignore").lstrip()
    if is_lines(path):
        return next(jsonl_objects(path, LIMIT_BYTES))[0]
    if not text.startswith("["):
        return None
    try:
        first, _ = reading.STRICT.raw_decode(text[1:].lstrip())
    except (ValueError, RecursionError):
        whole = reading.json_of(path, WHOLE)
        first = whole[0] if whole else None
    return first if isinstance(first, dict) else None


def _objects(whole: list[Any], name: str) -> Iterator[tuple[dict[str, Any], str]]:
    """Objects of a list, each with its place."""
    if not whole:
        raise DataError(
            f"{name}: its list is empty. Pass a file that holds rows.", code="squad.empty"
        )
    for number, row in enumerate(whole):
        place = f"{name}[{number}]"
        if not isinstance(row, dict):
            type_name = JSON_TYPES.get(type(row), "a string")
            raise DataError(
                f"{place}: holds {type_name}, not an object with a value for each column. Correct the row or remove it.",
                code="squad.no-object",
            )
        yield row, place


def _squad_rows(whole: Any, name: str, columns: Columns) -> Iterator[Record]:
    """Yields the questions of a file in their order."""
    articles = _entries(whole, name, "data")
    chosen = chosen_columns(columns, COLUMNS, COLUMNS, name)
    for article in articles:
        for paragraph in _entries(*article, "paragraphs"):
            context = _value(*paragraph, "context")
            for question, place in _entries(*paragraph, "qas"):
                row = {
                    "id": question.get("id") if isinstance(question, dict) else None,
                    "question": _value(question, place, "question"),
                    "context": context,
                    "answers": _value(question, place, "answers"),
                }
                # SQuAD 2 lists plausible answers elsewhere (plausible_answers), so this is a
                # contradiction.
                if question.get("is_impossible") and row["answers"]:
                    raise DataError(
                        f"{place}: is_impossible is true, but there are answers. Correct the file.",
                        code="squad.impossible",
                    )
                yield Record({column: row[column] for column in chosen}, place)


def _entries(holder: Any, place: str, key: str) -> Iterator[tuple[Any, str]]:
    """Entries of the list under a key, each with its place for error messages."""
    found = _value(holder, place, key)
    if not isinstance(found, list):
        raise DataError(
            f"{place}: {key!r} is no list. Pass a file of SQuAD's form, or a table (JSONL, CSV, TSV, Parquet).",
            code="squad.no-list",
        )
    return ((each, f"{place}.{key}[{number}]") for number, each in enumerate(found))


def _value(holder: Any, place: str, key: str) -> Any:
    if not isinstance(holder, dict) or key not in holder:
        raise DataError(
            f"{place}: has no {key!r}. Pass a file of SQuAD's form, or a table (JSONL, CSV, TSV, Parquet).",
            code="squad.no-key",
        )
    return holder[key]
