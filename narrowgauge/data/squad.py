"""Reads SQuAD's own files, versions 1 and 2: one JSON object, in which questions stand below the text that they are about.

    {"data": [{"paragraphs": [{"context": ..., "qas": [{"id": ..., "question": ..., "answers": [...], "is_impossible": ...}]}]}]}

Each question becomes a row with the columns id, question, context and answers. The file is read whole: 40 MB for the largest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from narrowgauge import reading
from narrowgauge.data.tables import Record, chosen_columns
from narrowgauge.data.text import shown
from narrowgauge.errors import DataError, StorageError

WHOLE = reading.Kind(
    most_bytes=4 * reading.GIB,
    error=DataError,
    refused=StorageError,
    follow_links=True,
    step="Download the file again, or pass a table (JSONL).",
)
COLUMNS = ("id", "question", "context", "answers")


def squad_rows(path: Path, columns: Sequence[str]) -> Iterator[Record]:
    """The questions of a file in their order. Raises DataError with the place in the file for what is not SQuAD's form."""
    name = shown(path)
    chosen = chosen_columns(columns, COLUMNS, COLUMNS, name)
    whole = reading.json_of(path, WHOLE)
    for article in _listed(whole, name, "data"):
        for paragraph in _listed(*article, "paragraphs"):
            context = _held(*paragraph, "context")
            for question, place in _listed(*paragraph, "qas"):
                row = {
                    "id": question.get("id") if isinstance(question, dict) else None,
                    "question": _held(question, place, "question"),
                    "context": context,
                    "answers": _held(question, place, "answers"),
                }
                if question.get("is_impossible") and row["answers"]:
                    raise DataError(f"{place}: is_impossible is true, but there are answers. Correct the file.")
                yield Record({column: row[column] for column in chosen}, place)


def _listed(held: Any, place: str, key: str) -> Iterator[tuple[Any, str]]:
    """The entries of the list under a key, each with its place."""
    found = _held(held, place, key)
    if not isinstance(found, list):
        raise DataError(
            f"{place}: {key!r} is no list. Pass a file of SQuAD's form, or a table (JSONL, CSV, TSV, Parquet)."
        )
    return ((each, f"{place}.{key}[{number}]") for number, each in enumerate(found))


def _held(held: Any, place: str, key: str) -> Any:
    if not isinstance(held, dict) or key not in held:
        raise DataError(f"{place}: has no {key!r}. Pass a file of SQuAD's form, or a table (JSONL, CSV, TSV, Parquet).")
    return held[key]
