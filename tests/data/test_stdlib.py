"""The standard library as data: there, decoded as each file declares, without its tests, always in the same order."""

import pytest

from narrowgauge.data import documents
from narrowgauge.data.sources import stdlib_documents
from narrowgauge.errors import ConfigError, DataError
from tests.raising import coded, raises


def test_this_interpreters_library_is_a_corpus():
    found = list(documents())
    origins = [document.origin for document in found]
    assert {"stdlib/argparse.py", "stdlib/json/decoder.py"} <= set(origins)
    assert origins == sorted(origins, key=lambda origin: origin.split("/"))
    assert not any(
        part in origin.split("/")
        for origin in origins
        for part in ("test", "tests", "site-packages", "encodings")
    )
    assert 5e6 < sum(len(document.text) for document in found) < 30e6


def test_files_are_decoded_as_they_declare(tmp_path):
    (tmp_path / "a.py").write_bytes(b"# -*- coding: latin-1 -*-\nname = 'caf\xe9'\n")
    (tmp_path / "b.py").write_bytes(b"\xef\xbb\xbfname = 'caf\xc3\xa9'\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "bad.py").write_bytes(b"\xff")
    assert [document.text.splitlines()[-1] for document in stdlib_documents(tmp_path)] == [
        "name = 'café'"
    ] * 2


@pytest.mark.parametrize("raw", [b"\xff", b"# coding: no-such\n"])
def test_a_file_that_cannot_be_decoded_is_named(tmp_path, raw):
    (tmp_path / "a.py").write_bytes(raw)
    with raises(DataError, "source.unreadable", "stdlib/a.py"):
        list(stdlib_documents(tmp_path))


def test_an_interpreter_without_sources_is_an_error(tmp_path):
    with raises(DataError, "source.stdlib"):
        list(stdlib_documents(tmp_path))


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ({"column": "text"}, coded("source.column-of-text", "text")),
        ({"separator": "x"}, coded("source.separator-of-table", "x")),
    ],
)
def test_options_of_other_sources_are_refused(option, expected):
    with raises(ConfigError, expected):
        documents("stdlib", **option)
