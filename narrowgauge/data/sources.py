"""Reads documents from text sources, and rows from tables.

    documents("stdlib")                     this interpreter's standard library: the default, no
                                            download
    documents("book.txt")                   one document, or several separated by form feeds (or
                                            `separator`)
    documents("posts.jsonl", column="body") also .ndjson, .csv, .tsv, .parquet, and
                                            .json that is a list of objects or one a line
    documents("notes/")                     text files below the folder, without hidden files and
                                            other suffixes
    documents("shards/**/*.parquet")        every matching file
    documents("hf:roneneldan/TinyStories:validation")       hf:NAME, hf:NAME:SPLIT or
                                                            hf:NAME:CONFIG:SPLIT, read by `datasets`

    records("train.jsonl", ["prompt", "completion"])        rows of tables with these columns

Files are read in the order of their sorted paths, the same on every machine. Blank documents are
skipped. Malformed data raise DataError with file, line and next step. To read a folder named
stdlib, write `./stdlib`.
"""

from __future__ import annotations

import os
import re
import sysconfig
import tokenize
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from glob import glob, has_magic
from pathlib import Path
from typing import Any, NoReturn

from narrowgauge.data import hub
from narrowgauge.data.squad import first_object, is_lines, json_rows
from narrowgauge.data.tables import (
    DELIMITERS,
    TABLES,
    Record,
    chosen_columns,
    delimiter_of,
    header_of,
    jsonl_objects,
    parquet_columns,
    table_rows,
)
from narrowgauge.data.text import (
    LIMIT_BYTES,
    Document,
    readable,
    reason,
    shown,
    text_documents,
    too_long,
)
from narrowgauge.errors import ConfigError, DataError, closest

STDLIB = "stdlib"
# Tests contain numbers and broken files. The repetitive tables of `encodings`, 1.4 MB, would lower
# a validation loss without merit.
LEFT_OUT = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "encodings",
    "__pycache__",
}
HUB = "hf:"
HUB_ROWS = 256  # rows read at once
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
    """Yields the documents of `source`, one at a time.

    column       text column of a table; required unless one is called 'text' or only one has
                 strings
    separator    text between documents of a plain file, such as '<|endoftext|>'; None: form
                 feed
    limit_bytes  largest document; a longer one raises before it is read completely

    Raises DataError for missing, empty or malformed data, ConfigError for an option that does not
    fit the source, and StorageError for an unreadable file. A missing source raises at the call,
    other faults when reading reaches them.
    """
    name = os.fspath(source)
    if not name:
        raise ConfigError(
            "source: an empty string names nothing. Pass a file, a folder, a glob or stdlib.",
            code="source.empty",
        )
    if separator == "":
        raise ConfigError(
            "separator: an empty string separates nothing. Pass None for form feeds.",
            code="source.separator",
        )
    if limit_bytes < 1:
        raise ConfigError(
            f"limit_bytes: {limit_bytes} leaves room for no document. Pass a positive number.",
            code="source.limit-bytes",
        )
    if separator is not None and (name == STDLIB or name.startswith(HUB)):
        raise ConfigError(
            f"{name}: separator is for plain text files alone. Leave it out.",
            code="source.separator-of-table",
        )
    if name.startswith(HUB):
        return _usable(_hub_documents(name, *parse_hub_name(name), column), name, limit_bytes)
    if name == STDLIB:
        _refuse_column(column, name)
        return _usable(stdlib_documents(), name, limit_bytes)
    read = partial(_file_documents, column=column, separator=separator, limit_bytes=limit_bytes)
    files = files_of(name)
    return _usable((document for path in files for document in read(path)), name, limit_bytes)


def records(
    source: str | os.PathLike[str],
    columns: Sequence[str],
    *,
    header: Sequence[str] | None = None,
    optional: Sequence[str] = (),
    limit_bytes: int = LIMIT_BYTES,
) -> Iterator[Record]:
    """Yields the rows of `source`, a table, a glob of tables or SQuAD's JSON, with these columns.

    header    column names of CSV and TSV files without a header row
    optional  columns that a row may lack; its value is None then

    CSV has strings only, other tables have typed values. Raises DataError when it reaches a missing
    column, a ragged row or a malformed line. Raises ConfigError for an option that does not fit the
    file.
    """
    if not columns or len(set(columns)) != len(columns):
        raise ConfigError(
            f"records: columns {list(columns)}. Name each column to read, once.",
            code="source.columns",
        )
    for path in files_of(os.fspath(source)):
        if path.suffix.lower() == ".json" and header is None:
            yield from json_rows(path, columns, optional, limit_bytes)
            continue
        if path.suffix.lower() not in TABLES:
            raise DataError(
                f"{shown(path)}: no table, so it has no columns. Pass files that end in {', '.join(sorted(TABLES))} or .json.",
                code="source.no-table",
            )
        yield from table_rows(
            path, columns, limit_bytes=limit_bytes, header=header, optional=optional
        )


def columns_in(source: str | os.PathLike[str]) -> list[str]:
    """Columns of the first row of a table, or [] if it has none or is no table.

    Reads a .json file whole. CSV and TSV files need a header row.
    """
    path = files_of(os.fspath(source))[0]
    suffix = path.suffix.lower()
    if suffix in DELIMITERS:
        return header_of(path, LIMIT_BYTES)
    if suffix == ".parquet":
        return parquet_columns(path)
    if suffix == ".json":
        return list(first_object(path) or ())
    if suffix not in TABLES:
        return []
    row, _ = next(jsonl_objects(path, LIMIT_BYTES), ({}, ""))
    return list(row)


def understood(source: str | os.PathLike[str], header: Sequence[str] | None = None) -> list[str]:
    """Sentences on what was taken for granted of a file's form; [] if it is as its name says."""
    name = os.fspath(source)
    if name == STDLIB or name.startswith(HUB):
        return []
    path, said = files_of(name)[0], ""
    if path.suffix.lower() == ".csv":
        mark = delimiter_of(path, LIMIT_BYTES, header)
        said = "" if mark == "," else f"its fields are separated by {mark!r}, as in its first line"
    elif path.suffix.lower() == ".json":
        form = "one object a line" if is_lines(path) else "a list of objects"
        said = f"{form} is read as rows" if first_object(path) else ""
    return [f"{shown(path)}: {said}."] if said else []


def _refuse_column(column: str | None, name: str) -> None:
    if column is not None:
        raise ConfigError(
            f"{name}: column={column!r}, but plain text has no columns. Leave it out.",
            code="source.column-of-text",
        )


def _usable(found: Iterator[Document], name: str, limit_bytes: int) -> Iterator[Document]:
    """Skips blank documents. Raises DataError if no document has text, or one exceeds the limit."""
    passed_over, empty = 0, True
    for document in found:
        text = document.text
        if not text or text.isspace():
            passed_over += 1
            continue
        # For sources that return whole texts; file readers check earlier. A UTF-8 character has at
        # most 4 bytes, so most texts need no encoding here.
        if 4 * len(text) > limit_bytes and len(text.encode()) > limit_bytes:
            raise too_long(document.origin, limit_bytes, "Split the document.")
        empty = False
        yield document
    if empty:
        held = (
            f"{passed_over} document{'s' * (passed_over > 1)}, all blank"
            if passed_over
            else "no document"
        )
        raise DataError(
            f"{shown(name)}: {held}. Pass a source that holds text.", code="source.holds-no-text"
        )


def files_of(name: str) -> list[Path]:
    """Sorted files of a path or glob.

    Raises DataError if there are none, StorageError on a refusal.
    """
    with readable(name, "looked at"):
        path = Path(name)
        if path.is_dir():
            return _folder_files(path)
        # Before the glob: a file name may contain brackets.
        if path.exists():
            return [path]
        if has_magic(name):
            if found := [
                path
                for path in sorted({Path(match) for match in glob(name, recursive=True)})
                if path.is_file()
            ]:
                return found
            raise DataError(
                f"{name}: the pattern matches no file. Quote it in a shell, and check the folder.",
                code="source.pattern",
            )
        if path.is_symlink():
            raise DataError(
                f"{shown(path)}: a link to {os.readlink(path)!r}, where no file or folder is. Correct it, or pass the file itself.",
                code="source.dangling-link",
            )
        parent = path.parent
        beside = sorted(os.listdir(parent)) if parent.is_dir() else []
        near = closest(path.name, [*beside, STDLIB])
        hint = (
            f" Closest: {near}."
            if near
            else ""
            if parent.is_dir()
            else f" The folder {shown(parent)} is missing too."
        )
        raise DataError(
            f"{shown(path)}: no such file or folder.{hint} Pass a file, a folder, a glob, {HUB}NAME or {STDLIB}.",
            code="source.missing",
        )


def below(folder: Path, is_left_out: Callable[[str], bool]) -> list[Path]:
    """Files below a folder, sorted by path components.

    is_left_out  excludes files and folders by name
    """

    def refuse(error: OSError) -> NoReturn:
        raise error

    files: list[Path] = []
    with readable(folder, "listed"):
        for parent, folders, names in os.walk(folder, onerror=refuse):
            # In place: os.walk then does not descend into the removed folders.
            folders[:] = [name for name in folders if not is_left_out(name)]
            files.extend(Path(parent, name) for name in names if not is_left_out(name))
    # By components: as a string, "a-b" would sort before "a/b".
    return sorted(files, key=lambda path: path.relative_to(folder).parts)


def _folder_files(folder: Path) -> list[Path]:
    files = below(folder, lambda name: name.startswith("."))
    if found := [path for path in files if path.suffix.lower() in TEXT_SUFFIXES]:
        return found
    if not files:
        raise DataError(
            f"{shown(folder)}: the folder holds no files. Pass one that does, or a file.",
            code="source.empty-folder",
        )
    others = Counter(path.suffix for path in files)
    seen = ", ".join(
        f"{count} {suffix or 'without suffix'}" for suffix, count in others.most_common(5)
    )
    raise DataError(
        f"{shown(folder)}: no text files below it, but {seen}. Name the files by a glob, such as "
        f"'{shown(folder)}/**/*{next(iter(others))}'.",
        code="source.no-text",
    )


def _file_documents(
    path: Path, *, column: str | None, separator: str | None, limit_bytes: int
) -> Iterator[Document]:
    suffix = path.suffix.lower()
    if suffix not in TABLES and suffix != ".json":
        _refuse_column(column, shown(path))
        yield from text_documents(path, separator=separator, limit_bytes=limit_bytes)
        return
    if separator is not None:
        raise ConfigError(
            f"{shown(path)}: separator is for plain text files, this is a table. Leave it out.",
            code="source.separator-of-table",
        )
    columns = None if column is None else [column]
    rows = (
        json_rows(path, columns, limit_bytes=limit_bytes)
        if suffix == ".json"
        else table_rows(path, columns, limit_bytes=limit_bytes)
    )
    for row in rows:
        for name in row.values:
            yield Document(row.text(name), row.origin)


def stdlib_documents(folder: Path | None = None) -> Iterator[Document]:
    """One document per source file of the standard library, about 11 MB, decoded by PEP 263.

    The content depends on the Python version: compare runs by their content hash. The origin is
    stdlib/ and the path inside it.
    """
    folder = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    remedy = "Pass a file, a folder or a glob instead of stdlib."
    files = [path for path in below(folder, LEFT_OUT.__contains__) if path.suffix == ".py"]
    if not files:
        raise DataError(
            f"{STDLIB}: no Python sources in {shown(folder)}, the standard library's folder. {remedy}",
            code="source.stdlib",
        )
    for path in files:
        origin = f"{STDLIB}/{path.relative_to(folder).as_posix()}"
        try:
            with tokenize.open(path) as file:
                yield Document(file.read(), origin)
        except (SyntaxError, UnicodeDecodeError, OSError) as error:
            raise DataError(
                f"{origin}: cannot be read: {error}. {remedy}", code="source.unreadable"
            ) from error


def parse_hub_name(source: str) -> tuple[str, str | None, str]:
    """(name, config, split) of 'hf:NAME[[:CONFIG]:SPLIT]'; the default split is train.

    Raises ConfigError for another form.
    """
    # The lookahead keeps the colon inside brackets, as in hf:NAME:train[:10%].
    name, *rest = re.split(r":(?![^\[]*\])", source.removeprefix(HUB))
    if len(rest) > 2 or not all([name, *rest]):
        raise ConfigError(
            f"{source}: not of the form hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT.",
            code="source.hub-name",
        )
    return name, (rest[0] if len(rest) == 2 else None), (rest[-1] if rest else "train")


def _hub_documents(
    source: str, name: str, config: str | None, split: str, column: str | None
) -> Iterator[Document]:
    """One document per row of a Hub data set, or of a folder that `datasets` loads.

    Never runs a repository's code.
    """
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"{source}: this needs the package datasets. Run: pip install datasets.",
            code="source.no-datasets",
        ) from None
    hub.refuse_data_set(source, name)
    try:
        found: Any = datasets.load_dataset(name, config, split=split)
    except Exception as error:  # exceptions of datasets, the Hub, Arrow and the network
        raise DataError(
            f"{source}: datasets cannot load it: {type(error).__name__}: {reason(error)} "
            "Check the name, the config, the split and the connection, or download the files and pass a glob.",
            code="source.hub-fails",
        ) from error
    texts = [
        name for name, kind in found.features.items() if "string" in str(getattr(kind, "dtype", ""))
    ]
    [column] = chosen_columns(
        None if column is None else [column], list(found.features), texts, source
    )
    values = (
        value for batch in found.select_columns([column]).iter(HUB_ROWS) for value in batch[column]
    )
    for row, value in enumerate(values, 1):
        origin = f"{source} row {row}"
        yield Document(Record({column: value}, origin).text(column), origin)
