"""Text files, exactly: what is read is what the bytes say, and what is wrong is named with its place."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge.data import documents
from narrowgauge.data import text as text_module
from narrowgauge.errors import DataError, StorageError
from tests.raising import coded, raises


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "notes.txt"

    def write(raw: bytes):
        path.write_bytes(raw)
        return path

    return write


def read(path, **options):
    return [document.text for document in documents(path, **options)]


def test_a_text_file_is_one_document(file):
    path = file("Grüße\r\nzweite Zeile\n".encode())
    [document] = documents(path)
    assert (document.text, document.origin) == ("Grüße\r\nzweite Zeile\n", str(path))


def test_byte_order_mark_is_dropped(file):
    assert read(file(b"\xef\xbb\xbfone")) == ["one"]


def test_form_feed_and_separator_part_documents_and_blank_ones_are_passed_over(file):
    path = file(b"one\n\ftwo\n\f \n\fthree<|end|>four")
    assert read(path) == ["one\n", "two\n", "three<|end|>four"]
    assert read(path, separator="<|end|>") == ["one\n\ftwo\n\f \n\fthree", "four"]
    assert [document.origin for document in documents(path)] == [
        str(path),
        f"{path}:2",
        f"{path}:4",
    ]


# No zero characters, which no text file may hold, and no separator or byte order mark inside a document.
DOCUMENT = st.text(
    st.characters(exclude_categories=["Cs"], exclude_characters="\0\f\ufeff"), min_size=1
)


@given(
    st.lists(DOCUMENT, min_size=1, max_size=6),
    st.integers(1, 9),
    st.sampled_from(["\f", "<|endoftext|>", "\n\n"]),
)
def test_any_chunk_size_reads_the_same(tmp_path_factory, texts, chunk, separator):
    """Property: the reader's chunks, which may cut characters and separators, do not show."""
    path = tmp_path_factory.mktemp("chunks") / "a.txt"
    raw = separator.join(texts).encode()
    path.write_bytes(raw)
    expected = [part for part in raw.decode().split(separator) if part and not part.isspace()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_module, "CHUNK_BYTES", chunk)
        if raw[:2] in (b"PK", b"PA") or not expected:
            return
        assert read(path, separator=separator) == expected


def test_invalid_utf8_names_line_column_and_offset(file):
    path = file(b"first\nsecond \xff line\n")
    with raises(DataError, "text.utf8", path):
        read(path)


def test_place_of_invalid_utf8_counts_earlier_documents_and_the_byte_order_mark(file):
    path = file(b"\xef\xbb\xbfone\n\fab\n\xc3")
    with raises(DataError, "text.utf8", ":3", "0xc3", "column 1", "offset 11"):
        read(path)


@pytest.mark.parametrize(
    ("raw", "hint"),
    [
        ("text".encode("utf-16"), coded("text.foreign", "-16")),
        ("text".encode("utf-16-le"), coded("text.utf8")),
        (b"a\0b", coded("text.utf8", ":1", "0x00", "column 2")),
        (b"\x1f\x8b\x08", coded("text.foreign")),
        (b"PK\x03\x04", coded("text.foreign")),
        (b"\x28\xb5\x2f\xfd", coded("text.foreign")),
        (b"PAR1\x15\x04", coded("text.foreign")),
    ],
)
def test_what_is_no_utf8_text_is_named(file, raw, hint):
    with raises(DataError, hint):
        read(file(raw))


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz", ".zst", ".zip"])
def test_compressed_files_are_refused_with_the_command(tmp_path, suffix):
    path = tmp_path / f"posts.jsonl{suffix}"
    path.write_bytes(b"anything")
    with raises(DataError, "text.compressed"):
        read(path)


def test_a_document_of_exactly_the_limit_is_read_and_one_byte_more_is_not(file):
    assert read(file(b"x" * 10 + b"\f" + b"y" * 10), limit_bytes=10) == ["x" * 10, "y" * 10]
    path = file(b"x" * 10 + b"\f" + b"y" * 11)
    with raises(DataError, "text.too-long", "notes.txt", "22", "11", "10"):
        read(path, limit_bytes=10)


def test_the_limit_stops_the_reading(tmp_path):
    """A sparse file of 1 TiB, far more than memory and patience: the error comes without reading it."""
    path = tmp_path / "huge.txt"
    with path.open("wb") as handle:
        handle.write(b"x" * 4096)
        handle.truncate(2**40)
    with raises(DataError, "text.too-long", 2**40):
        read(path, limit_bytes=4096)


def test_a_pipe_is_refused_and_does_not_hang(tmp_path):
    os.mkfifo(tmp_path / "pipe.txt")
    with raises(DataError, "file.irregular", tmp_path / "pipe.txt"):
        read(tmp_path / "pipe.txt")


def test_a_file_that_may_not_be_opened_is_a_storage_error(file, monkeypatch):
    path = file(b"secret")

    def refuse(name, *rest):
        if name == path:
            raise PermissionError(13, "Permission denied")
        return opened(name, *rest)

    opened = os.open
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(StorageError, match=r"notes\.txt: cannot be read: Permission denied"):
        read(path)


def test_a_file_name_that_is_not_utf8_can_be_read_and_shown(tmp_path):
    path = os.fsencode(tmp_path) + b"/caf\xe9.txt"
    with open(path, "wb") as handle:
        handle.write(b"one")
    [document] = documents(os.fsdecode(path))
    assert document.origin.endswith(r"caf\xe9.txt")


# Pieces


@given(st.text("ab\n"), st.integers(1, 12))
def test_pieces_join_to_the_text(text, size):
    """Exact: none is too long, and each ends at a line end where it can."""
    parts = list(text_module.pieces(text, size))
    assert "".join(parts) == text
    assert all(0 < len(part) <= size for part in parts)
    assert all(
        part.endswith("\n") or (len(part) == size and "\n" not in part) for part in parts[:-1]
    )
