"""Data sets by name, with `datasets` itself on data made here; the Hub is never reached."""

import pytest

from narrowgauge.data import documents
from narrowgauge.data.sources import parse_hub_name
from narrowgauge.errors import ConfigError, DataError

datasets = pytest.importorskip("datasets")


@pytest.mark.parametrize(
    ("source", "parts"),
    [
        ("hf:a/b", ("a/b", None, "train")),
        ("hf:a/b:validation", ("a/b", None, "validation")),
        ("hf:a/b:en:test[:10%]", ("a/b", "en", "test[:10%]")),
    ],
)
def test_name_config_and_split(source, parts):
    assert parse_hub_name(source) == parts


@pytest.mark.parametrize("source", ["hf:", "hf:a:", "hf::train", "hf:a:b:c:d"])
def test_malformed_name_is_refused_at_the_call(source):
    with pytest.raises(ConfigError, match="hf:NAME"):
        documents(source)


@pytest.fixture
def dataset(monkeypatch):
    """`datasets.load_dataset` gives these columns, whatever it is asked for; the calls are kept."""
    calls = []

    def install(**columns):
        made = datasets.Dataset.from_dict(columns)
        monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: (calls.append((args, kwargs)), made)[1])
        return calls

    return install


def test_rows_become_documents(dataset):
    calls = dataset(text=[f"row {n}" for n in range(600)], n=list(range(600)))
    found = list(documents("hf:org/set:en:validation"))
    assert [d.text for d in found] == [f"row {n}" for n in range(600)]
    assert found[-1].origin == "hf:org/set:en:validation row 600"
    assert calls == [(("org/set", "en"), {"split": "validation"})]


@pytest.mark.parametrize(
    ("columns", "column", "message"),
    [
        ({"text": ["a", None]}, None, "row 2: column 'text' holds null"),
        ({"text": [5]}, None, r"row 1: column 'text' holds a number \(5\), not a string"),
        ({"title": ["a"], "body": ["b"]}, None, "Name it with `column`, one of 'title', 'body'"),
        ({"title": ["a"], "body": ["b"]}, "boby", "no column 'boby'. Closest: 'body'"),
        ({"text": [" "]}, None, "1 document, all blank"),
    ],
)
def test_what_is_no_text_is_refused(dataset, columns, column, message):
    dataset(**columns)
    with pytest.raises(DataError, match=message):
        list(documents("hf:org/set", column=column))


def test_a_document_beyond_the_limit_is_refused(dataset):
    dataset(text=["abcd", "äöü"])  # 4 and 6 bytes
    with pytest.raises(DataError, match=r"hf:org/set row 2: a document of more than 4 bytes"):
        list(documents("hf:org/set", limit_bytes=4))


def test_a_local_folder_is_loaded_by_datasets_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.csv").write_text("text\none\ntwo\n", encoding="utf-8")
    assert [d.text for d in documents(f"hf:{tmp_path / 'set'}")] == ["one", "two"]
    with pytest.raises(DataError, match="Unknown split"):
        list(documents(f"hf:{tmp_path / 'set'}:nope"))


def test_a_data_set_that_cannot_be_loaded_is_a_data_error(tmp_path):
    with pytest.raises(DataError, match="datasets cannot load it: FileNotFoundError"):
        list(documents(f"hf:{tmp_path}/absent"))
