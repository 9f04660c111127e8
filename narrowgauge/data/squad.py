"""Reads SQuAD's own JSON files, versions 1 and 2, whose questions are nested below their context.

    {"data": [{"paragraphs": [{"context": ..., "qas": [{"id": ..., "question": ..., "answers": [...], "is_impossible": ...}]}]}]}

A top-level list of objects is read as a table instead: [{column: value, ...}, ...].

Each question becomes a row with the columns id, question, context and answers. The file is read
into memory: 40 MB for the largest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from narrowgauge.data.tables import JSON_TYPES, Record, chosen_columns
from narrowgauge.data.text import shown
from narrowgauge.errors import DataError, StorageError
from narrowgauge.storage import reading

WHOLE = reading.Kind(
    most_bytes=4 * reading.GIB,
    error=DataError,
    refused=StorageError,
    follow_links=True,
    step="Download the file again, or pass a table (JSONL).",
)
COLUMNS = ("id", "question", "context", "answers")


def json_rows(path: Path, columns: Sequence[str]) -> Iterator[Record]:
    """Yields the rows of a .json file: objects of a list, or questions of SQuAD's object.

    Raises DataError with the place for another form.
    """
    whole = reading.json_of(path, WHOLE)
    return (
        _list_rows(whole, shown(path), columns)
        if isinstance(whole, list)
        else _squad_rows(whole, shown(path), columns)
    )


def _list_rows(whole: list[Any], name: str, columns: Sequence[str]) -> Iterator[Record]:
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
        chosen = chosen_columns(columns, list(row), list(row), place)
        yield Record({column: row[column] for column in chosen}, place)


def _squad_rows(whole: Any, name: str, columns: Sequence[str]) -> Iterator[Record]:
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
