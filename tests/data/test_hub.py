"""Data sets by name, with `datasets` itself on data made here; the Hub is never reached."""

import pytest

from narrowgauge.data import documents
from narrowgauge.data.sources import parse_hub_name
from narrowgauge.errors import ConfigError, DataError
from tests.raising import coded, raises

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
    with raises(ConfigError, "source.hub-name", "hf:"):
        documents(source)


@pytest.fixture
def dataset(monkeypatch):
    """`datasets.load_dataset` gives these columns, whatever it is asked for; the calls are kept."""
    calls = []

    def install(**columns):
        made = datasets.Dataset.from_dict(columns)
        monkeypatch.setattr(
            datasets,
            "load_dataset",
            lambda *args, **kwargs: (calls.append((args, kwargs)), made)[1],
        )
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
        ({"text": ["a", None]}, None, coded("table.cell", "'text'", "null")),
        ({"text": [5]}, None, coded("table.cell", "'text'", "a number (5)")),
        ({"title": ["a"], "body": ["b"]}, None, coded("table.which-column", "'title', 'body'")),
        ({"title": ["a"], "body": ["b"]}, "boby", coded("table.no-column", "'boby'", "'body'")),
        ({"text": [" "]}, None, coded("source.holds-no-text", "1 document, all blank")),
    ],
)
def test_what_is_no_text_is_refused(dataset, columns, column, message):
    dataset(**columns)
    with raises(DataError, message):
        list(documents("hf:org/set", column=column))


def test_a_document_beyond_the_limit_is_refused(dataset):
    dataset(text=["abcd", "äöü"])  # 4 and 6 bytes
    with raises(DataError, "text.too-long", "4 bytes"):
        list(documents("hf:org/set", limit_bytes=4))


def test_a_local_folder_is_loaded_by_datasets_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.csv").write_text("text\none\ntwo\n", encoding="utf-8")
    assert [d.text for d in documents(f"hf:{tmp_path / 'set'}")] == ["one", "two"]
    with raises(DataError, "source.hub-fails"):
        list(documents(f"hf:{tmp_path / 'set'}:nope"))


def test_a_data_set_that_cannot_be_loaded_is_a_data_error(tmp_path):
    with raises(DataError, "source.hub-fails", "FileNotFoundError"):
        list(documents(f"hf:{tmp_path}/absent"))
