"""Reads documents from a source: a file, a folder, a glob, a data set on the Hub, or `stdlib`.

    documents("stdlib")                     this interpreter's standard library: the default, no download
    documents("book.txt")                   one document, or several with form feeds (or `separator`) between them
    documents("posts.jsonl", column="body") also .ndjson, .csv, .tsv, .parquet
    documents("notes/")                     the text files below it, without hidden files and other suffixes
    documents("shards/**/*.parquet")        every file that matches
    documents("hf:roneneldan/TinyStories:validation")

The order is that of the sorted paths, the same on every machine. Blank documents are skipped; anything malformed raises DataError
with the file, the line and the next step. `./stdlib` is a folder of that name.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from functools import partial
from glob import glob, has_magic
from pathlib import Path
from typing import NoReturn

from narrowgauge.data.hub import PREFIX, hub_documents
from narrowgauge.data.stdlib import NAME as STDLIB
from narrowgauge.data.stdlib import stdlib_documents
from narrowgauge.data.tables import TABLES, table_documents
from narrowgauge.data.text import LIMIT_BYTES, Document, shown, text_documents, too_long
from narrowgauge.errors import ConfigError, DataError, StorageError, closest

# fmt: off
TEXT_SUFFIXES = {
    ".txt", ".text", ".md", ".markdown", ".rst", ".tex", ".org", ".html", ".htm", ".xml", ".css", ".sql", ".sh", ".toml",
    ".yaml", ".yml", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".cuh", ".rs", ".go", ".java", ".kt",
    ".scala", ".js", ".mjs", ".ts", ".tsx", ".jsx", ".rb", ".pl", ".php", ".lua", ".r", ".jl", ".hs", ".ml", ".swift",
}
# fmt: on


def documents(
    source: str | os.PathLike[str] = STDLIB,
    *,
    column: str | None = None,
    separator: str | None = None,
    limit_bytes: int = LIMIT_BYTES,
) -> Iterator[Document]:
    """The documents of `source`, one at a time.

    column       text column of a table; needed unless one is called 'text' or only one holds strings
    separator    between the documents of a plain text file, such as '<|endoftext|>'; None means a form feed
    limit_bytes  largest document; a longer one raises before it is read completely

    Raises DataError for missing, empty or malformed data, ConfigError for an option that does not fit the source, StorageError
    for an unreadable file; at the call for a missing source, else when reading reaches the fault.
    """
    if separator == "":
        raise ConfigError("separator: an empty string separates nothing. Pass None for form feeds.")
    if limit_bytes < 1:
        raise ConfigError(f"limit_bytes: {limit_bytes} leaves room for no document. Pass a positive number.")
    name = os.fspath(source)
    if not name:
        raise ConfigError("source: an empty string names nothing. Pass a file, a folder, a glob or stdlib.")
    if name == STDLIB or name.startswith(PREFIX):
        if separator is not None:
            raise ConfigError(f"{name}: separator is for plain text files alone. Leave it out.")
        if name != STDLIB:
            return _usable(hub_documents(name, column=column), name, limit_bytes)
        _refuse_column(column, name)
        return _usable(stdlib_documents(), name, limit_bytes)
    read = partial(_file_documents, column=column, separator=separator, limit_bytes=limit_bytes)
    try:
        files = files_of(name)
    except OSError as error:
        raise StorageError(f"{shown(name)}: cannot be looked at: {error.strerror}. Check its permissions.") from error
    return _usable((document for path in files for document in read(path)), name, limit_bytes)


def _refuse_column(column: str | None, name: str) -> None:
    if column is not None:
        raise ConfigError(f"{name}: column={column!r}, but plain text has no columns. Leave it out.")


def _usable(found: Iterator[Document], name: str, limit_bytes: int) -> Iterator[Document]:
    passed_over, empty = 0, True
    for document in found:
        text = document.text
        if not text or text.isspace():
            passed_over += 1
            continue
        # For sources that return whole texts; the file readers check earlier. A character has at most 4 bytes in UTF-8.
        if 4 * len(text) > limit_bytes and len(text.encode()) > limit_bytes:
            raise too_long(document.origin, limit_bytes, "Split the document.")
        empty = False
        yield document
    if empty:
        held = f"{passed_over} documents, all blank" if passed_over else "no document"
        raise DataError(f"{shown(name)}: {held}. Pass a source that holds text.")


def files_of(name: str) -> list[Path]:
    """The files of a path or glob, sorted. Raises DataError if there are none."""
    path = Path(name)
    if path.is_dir():
        return _folder_files(path)
    if path.exists():
        return [path]
    if has_magic(name):
        if found := [path for path in sorted({Path(match) for match in glob(name, recursive=True)}) if path.is_file()]:
            return found
        raise DataError(
            f"{name}: the pattern matches no file. Put it in quotation marks in a shell and check the folder."
        )
    parent = path.parent
    beside = sorted(os.listdir(parent)) if parent.is_dir() else []
    near = closest(path.name, [*beside, STDLIB])
    hint = f" Closest: {near}." if near else "" if parent.is_dir() else f" The folder {shown(parent)} is missing too."
    raise DataError(
        f"{shown(path)}: no such file or folder.{hint} Pass a file, a folder, a glob, {PREFIX}NAME or {STDLIB}."
    )


def _folder_files(folder: Path) -> list[Path]:
    def refuse(error: OSError) -> NoReturn:
        raise StorageError(
            f"{shown(error.filename)}: cannot be listed: {error.strerror}. Check its permissions."
        ) from error

    files: list[Path] = []
    for parent, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if not name.startswith(".")]
        files.extend(Path(parent, name) for name in names if not name.startswith("."))
    if found := [path for path in files if path.suffix.lower() in TEXT_SUFFIXES]:
        return sorted(found, key=lambda path: path.relative_to(folder).parts)
    if not files:
        raise DataError(f"{shown(folder)}: the folder holds no files. Pass one that does, or a file.")
    others = Counter(path.suffix for path in files)
    seen = ", ".join(f"{count} {suffix or 'without suffix'}" for suffix, count in others.most_common(5))
    raise DataError(
        f"{shown(folder)}: no text files below it, but {seen}. Name the files by a glob, such as "
        f"'{shown(folder)}/**/*{next(iter(others))}'."
    )


def _file_documents(path: Path, *, column: str | None, separator: str | None, limit_bytes: int) -> Iterator[Document]:
    suffix = path.suffix.lower()
    if suffix in TABLES:
        if separator is not None:
            raise ConfigError(f"{shown(path)}: separator is for plain text files, this is a table. Leave it out.")
        return table_documents(path, column=column, limit_bytes=limit_bytes)
    if suffix == ".json":
        raise DataError(
            f"{shown(path)}: one JSON value per file is not read. Make it JSONL: jq -c '.[]' x.json > x.jsonl."
        )
    _refuse_column(column, shown(path))
    return text_documents(path, separator=separator, limit_bytes=limit_bytes)
