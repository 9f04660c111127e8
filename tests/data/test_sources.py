"""From one word to files: the right ones, in the right order, and an error with the next step for everything else."""

import os

import pytest

from narrowgauge.data import documents
from narrowgauge.data.sources import records
from narrowgauge.errors import ConfigError, DataError, StorageError
from tests.raising import coded, raises


@pytest.fixture
def tree(tmp_path):
    for name in (
        "b.txt",
        "a/z.md",
        "a/A.py",
        "a/c.png",
        ".git/config.txt",
        "a/.hidden.txt",
        "B.txt",
        "empty.txt",
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("" if name == "empty.txt" else name, encoding="utf-8")
    return tmp_path


def read(source, **options):
    return [document.text for document in documents(source, **options)]


def test_a_folder_gives_its_text_files_in_order(tree):
    assert read(tree) == read(str(tree)) == ["B.txt", "a/A.py", "a/z.md", "b.txt"]


def test_a_glob_gives_what_matches_in_order(tree):
    assert read(f"{tree}/**/*.txt") == ["B.txt", "b.txt"]
    assert read(f"{tree}/*/[az].*") == ["a/z.md"]


def test_a_file_whose_name_looks_like_a_glob_is_a_file(tmp_path):
    (tmp_path / "a[1].txt").write_text("one", encoding="utf-8")
    assert read(tmp_path / "a[1].txt") == ["one"]


def test_a_glob_may_name_tables(tmp_path):
    for name in ("1", "0"):
        (tmp_path / f"{name}.jsonl").write_text(f'{{"text": "{name}"}}\n', encoding="utf-8")
    assert read(f"{tmp_path}/*.jsonl") == ["0", "1"]


def test_the_word_stdlib_wins_and_a_path_reaches_the_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "stdlib").mkdir()
    (tmp_path / "stdlib" / "a.txt").write_text("mine", encoding="utf-8")
    assert next(documents("stdlib")).origin == "stdlib/__future__.py"
    assert read("./stdlib") == ["mine"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("b.tx", coded("source.missing", "'b.txt'")),
        ("stdlb", coded("source.missing", "'stdlib'")),
        ("none/b.txt", coded("source.missing")),
        ("*.csv", coded("source.pattern")),
    ],
)
def test_a_missing_source_is_refused_at_the_call_with_the_closest_name(tree, name, message):
    with raises(DataError, message):
        documents(tree / name)


def test_a_link_that_leads_nowhere_is_called_one(tmp_path):
    for name, target in (("loop.txt", "loop.txt"), ("gone.txt", "absent.txt")):
        (tmp_path / name).symlink_to(target)
        with raises(DataError, "source.dangling-link", name, target):
            documents(tmp_path / name)


def test_a_folder_without_text_files_says_what_it_holds(tmp_path):
    with raises(DataError, "source.empty-folder"):
        documents(tmp_path)
    (tmp_path / "a.jsonl").write_text("{}", encoding="utf-8")
    with raises(DataError, "source.no-text", "1 .jsonl"):
        documents(tmp_path)


def test_a_folder_that_may_not_be_listed_is_a_storage_error(tree, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", os.fspath(path))

    monkeypatch.setattr(os, "scandir", refuse)
    with raises(StorageError, "text.unreadable", "listed", "Permission denied"):
        documents(tree)


@pytest.mark.parametrize("content", ["", " \n\t\n", "\f\f\n"])
def test_blank_data_is_an_error(tmp_path, content):
    (tmp_path / "a.txt").write_text(content, encoding="utf-8")
    with raises(DataError, "source.holds-no-text", "a.txt"):
        read(tmp_path / "a.txt")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"column": "text"}, coded("source.column-of-text")),
        ({"separator": ""}, coded("source.separator")),
        ({"limit_bytes": 0}, coded("source.limit-bytes")),
    ],
)
def test_an_option_that_cannot_work_is_refused(tree, options, message):
    with raises(ConfigError, message):
        read(tree / "b.txt", **options)


def test_an_empty_name_is_not_the_current_folder():
    with raises(ConfigError, "source.empty"):
        documents("")


def test_a_name_that_the_file_system_refuses_is_a_storage_error():
    for read in (documents, lambda name: list(records(name, ["text"]))):
        with raises(StorageError, "text.unreadable", "looked at"):
            read("x" * 5000)
