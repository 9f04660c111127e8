"""Files that are whole or not there (exact)."""

import os

import pytest

from narrowgauge import storage
from narrowgauge.errors import StorageError


def test_a_replaced_file_is_old_or_new(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    storage.replace_file(path, "old")

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", refuse)
        with pytest.raises(StorageError, match=r"cannot write .*run.json: No space left on device"):
            storage.replace_file(path, "new")
    assert path.read_text() == "old"
    storage.replace_file(path, "new é")
    assert path.read_text(encoding="utf-8") == "new é"
    assert os.listdir(tmp_path) == ["run.json"]


def test_a_leftover_of_a_crash_does_not_stop_the_next_write(tmp_path):
    (tmp_path / ".run.json.tmp").write_text("half")
    storage.replace_file(tmp_path / "run.json", "whole")
    assert os.listdir(tmp_path) == ["run.json"]


def test_write_synced_never_overwrites(tmp_path):
    storage.write_synced(tmp_path / "a", b"1" * 100_000)
    with pytest.raises(FileExistsError):
        storage.write_synced(tmp_path / "a", b"2")
    assert (tmp_path / "a").read_bytes() == b"1" * 100_000


def test_a_probe_leaves_nothing(tmp_path):
    storage.probe(tmp_path)
    assert os.listdir(tmp_path) == []
    with pytest.raises(StorageError, match="cannot write to"):
        storage.probe(tmp_path / "absent")
