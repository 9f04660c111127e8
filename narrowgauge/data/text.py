"""Decodes text files strictly as UTF-8, and cuts long texts into pieces.

Errors name the file, the line and the byte. A plain text file holds one document, or several with a
separator (default: a form feed). Files are read in chunks, so a file may exceed memory if no
document exceeds `limit_bytes`. Line ends stay as they are; a UTF-8 byte order mark is dropped.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

from narrowgauge.errors import DataError, StorageError
from narrowgauge.storage import reading

# Files that the user names as data: any size, since they are read in parts, and links allowed.
USERS = reading.Kind(
    most_bytes=2**62,
    error=DataError,
    refused=StorageError,
    follow_links=True,
    step="Pass a file, a folder or a glob.",
)
LIMIT_BYTES = 256 * 2**20  # per document; more than any book
CHUNK_BYTES = 2**20
# A tokenizer's memory grows with the text per call, and one text uses one core: pieces bound the
# memory and use all cores. A cut can change neighbouring tokens: 30 cuts in 8 MB of the standard
# library added 30 tokens to 2,192,651.
PIECE_CHARS = 2**18
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
FORM_FEED = "\f"

UNPACK = {
    ".gz": "gunzip",
    ".tgz": "tar xzf",
    ".bz2": "bunzip2",
    ".xz": "unxz",
    ".zst": "unzstd",
    ".zip": "unzip",
}
OF_OFFICE = {".xlsx", ".xls", ".ods", ".docx", ".doc", ".odt", ".pdf", ".pptx"}
MAGIC = {  # first bytes of files that are not UTF-8 text
    b"\x1f\x8b": "a gzip file; gunzip it first",
    b"PK\x03\x04": "a zip file; unzip it first",
    b"\x28\xb5\x2f\xfd": "a zstd file; unzstd it first",
    b"PAR1\x15": "a Parquet file; name it *.parquet",
    b"\xff\xfe": "UTF-16; convert it with iconv -f UTF-16 -t UTF-8",
    b"\xfe\xff": "UTF-16; convert it with iconv -f UTF-16 -t UTF-8",
}


class Document(NamedTuple):
    """One text, and its origin for error messages: 'notes.txt', 'posts.jsonl:17'."""

    text: str
    origin: str


def shown(path: str | os.PathLike[str]) -> str:
    """A path as printable text, even if it is not valid UTF-8."""
    return os.fsencode(path).decode("utf-8", "backslashreplace")


def reason(error: BaseException) -> str:
    """First line of an exception's message."""
    return next(iter(str(error).strip().splitlines()), "no reason given")


@contextmanager
def readable(
    path: str | os.PathLike[str], doing: str = "read", step: str = "Check its permissions."
) -> Iterator[None]:
    """Converts an OSError of the body to a StorageError: "<path>: cannot be <doing>: <reason>"."""
    try:
        yield
    except OSError as error:
        where = shown(error.filename or path)
        raise StorageError(
            f"{where}: cannot be {doing}: {error.strerror}. {step}", code="text.unreadable"
        ) from error


@contextmanager
def opened(path: Path) -> Iterator[BinaryIO]:
    """Opens a text file for bytes, after its byte order mark.

    Raises DataError for a compressed or binary file, StorageError if it cannot be read.
    """
    if path.suffix.lower() in OF_OFFICE:
        raise DataError(
            f"{shown(path)}: {path.suffix} files are not read. Save its text as .txt, or its table as .csv.",
            code="text.office",
        )
    if path.suffix.lower() in UNPACK:
        raise DataError(
            f"{shown(path)}: compressed files are not read. Run '{UNPACK[path.suffix.lower()]}' on it first.",
            code="text.compressed",
        )
    with reading.opened(path, USERS) as file:
        head = file.read(8)
        for magic, meaning in MAGIC.items():
            if head.startswith(magic):
                raise DataError(
                    f"{shown(path)}: the first bytes say that this is {meaning}.",
                    code="text.foreign",
                )
        file.seek(len(BYTE_ORDER_MARK) if head.startswith(BYTE_ORDER_MARK) else 0)
        yield file


def decode(raw: bytes, path: Path, *, line: int, offset: int) -> str:
    """Decodes `raw` as UTF-8.

    line    line of the file where `raw` starts, from 1
    offset  byte of the file where `raw` starts, from 0

    Raises DataError with line, column (from 1, in bytes) and byte offset of the first invalid byte.
    Zero bytes are rejected as well: they mean UTF-16, UTF-32 or binary data.
    """
    try:
        text = raw.decode("utf-8")
        # A zero byte is valid UTF-8, but no text contains one.
        bad, fault = raw.find(b"\0"), "no text file holds a zero byte"
        if bad < 0:
            return text
    except UnicodeDecodeError as error:
        bad, fault = error.start, error.reason
    bad_line = line + raw.count(b"\n", 0, bad)
    column = bad - raw.rfind(b"\n", 0, bad)
    raise DataError(
        f"{shown(path)}:{bad_line}: invalid UTF-8, byte 0x{raw[bad]:02x} in column {column} (byte offset {offset + bad} of the file): "
        f"{fault}. Convert the file, for example with iconv -f LATIN1 -t UTF-8, or leave it out.",
        code="text.utf8",
    )


def too_long(where: str, limit_bytes: int, remedy: str) -> DataError:
    """The error for a document above the limit."""
    return DataError(
        f"{where}: a document of more than {limit_bytes} bytes, the limit_bytes. {remedy}",
        code="text.too-long",
    )


def separated(file: BinaryIO, separator: bytes, limit_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Yields (byte offset, content) of each document.

    Raises OverflowError with the offset of a document above the limit, before the rest is read.
    """
    offset, searched, pending, chunk = file.tell(), 0, bytearray(), b" "
    while chunk:
        chunk = file.read(CHUNK_BYTES)
        pending += chunk
        while (end := pending.find(separator, searched)) >= 0 and end <= limit_bytes:
            yield offset, bytes(pending[:end])
            del pending[: end + len(separator)]
            offset, searched = offset + end + len(separator), 0
        # A separator may be cut by the end of the chunk, so allow its length beyond the limit.
        open_end = len(separator) if chunk else 0
        if end > limit_bytes or len(pending) > limit_bytes + open_end:
            raise OverflowError(offset)
        # Do not search the same bytes again, but keep the start of a cut separator.
        searched = max(0, len(pending) - len(separator) + 1)
    yield offset, bytes(pending)


def text_documents(path: Path, *, separator: str | None, limit_bytes: int) -> Iterator[Document]:
    """Yields the documents of a plain text file.

    The origin is the path; from the second document on, path:line.
    """
    mark = (FORM_FEED if separator is None else separator).encode()
    line = 1
    with opened(path) as file:
        try:
            for index, (offset, raw) in enumerate(separated(file, mark, limit_bytes)):
                text = decode(raw, path, line=line, offset=offset)
                yield Document(text, shown(path) if index == 0 else f"{shown(path)}:{line}")
                line += raw.count(b"\n") + mark.count(b"\n")
        except OverflowError as error:
            size = f"{shown(path)} ({os.fstat(file.fileno()).st_size} bytes), from byte offset {error.args[0]}"
            remedy = "Split the file, or pass separator= with the text that stands between its documents."
            raise too_long(size, limit_bytes, remedy) from None


def lines(path: Path, *, limit_bytes: int) -> Iterator[tuple[int, str]]:
    """Yields (number from 1, line with its end) of a UTF-8 file.

    Lines end at the newline character only. A line above the limit raises before it is read
    completely.
    """
    with opened(path) as file:
        # Behind the byte order mark, so that reported offsets are those of the file.
        offset = file.tell()
        for number in range(1, 2**63):
            # One byte more than allowed shows that a line is too long.
            raw = file.readline(limit_bytes + 1)
            if not raw:
                return
            if len(raw) > limit_bytes:
                size = (
                    f"{shown(path)}:{number} ({os.fstat(file.fileno()).st_size} bytes in the file)"
                )
                raise too_long(size, limit_bytes, "Split the document over several rows.")
            yield number, decode(raw, path, line=number, offset=offset)
            offset += len(raw)


def pieces(text: str, size: int = PIECE_CHARS) -> Iterator[str]:
    """Cuts a text into pieces of at most `size` characters, at line ends where possible."""
    start = 0
    while len(text) - start > size:
        end = text.rfind("\n", start, start + size) + 1 or start + size
        yield text[start:end]
        start = end
    if start < len(text):
        yield text[start:]
