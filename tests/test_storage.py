"""Files that are whole or not there (exact)."""

import errno
import os

import pytest

from narrowgauge import storage
from narrowgauge.errors import StorageError
from tests.raising import raises


def test_a_replaced_file_is_old_or_new(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    storage.replace_file(path, "old")

    def refuse(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "replace", refuse)
        with raises(StorageError, "storage.refused", "write"):
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
    with raises(StorageError, "storage.refused", "write"):
        storage.probe(tmp_path / "absent")
    (tmp_path / f".probe-{os.getpid()}").write_text("of a process that was killed")
    storage.probe(tmp_path)
    assert os.listdir(tmp_path) == []


def test_folders_and_files_behind_links_are_synced(tmp_path):
    """A run folder on another disk, linked from here."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "runs").symlink_to("disk")
    storage.make_folder(tmp_path / "runs" / "new")
    storage.replace_file(tmp_path / "runs" / "run.json", "{}")
    (tmp_path / "disk" / "new" / "broken").symlink_to("absent")
    storage.flush_tree(tmp_path / "runs")
    assert (tmp_path / "disk" / "run.json").read_text() == "{}"


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_folder_that_replaces_another_is_old_or_new(tmp_path, monkeypatch, stopped):
    """A kill before the first rename, and one between the two; then the next start."""
    (tmp_path / "final").mkdir()
    (tmp_path / "final" / "weights").write_text("old")
    rename, done = os.rename, []

    def killed(source, target):
        if len(done) == stopped:
            raise KeyboardInterrupt
        done.append(target)
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", killed)
        patch.setattr(storage, "remove", lambda path: None)  # a kill leaves what is there
        with (
            pytest.raises(KeyboardInterrupt),
            storage.new_folder(tmp_path / "final", tmp_path / ".tmp-final") as draft,
        ):
            draft.mkdir()
            (draft / "weights").write_text("new")
    assert (tmp_path / ".tmp-final" / "weights").exists()
    storage.recover(tmp_path, "final")
    assert (
        os.listdir(tmp_path) == ["final"] and (tmp_path / "final" / "weights").read_text() == "old"
    )


def test_a_folder_takes_the_place_of_a_link_and_leaves_its_target_alone(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "weights").write_text("elsewhere")
    (tmp_path / "final").symlink_to("elsewhere")
    with storage.new_folder(tmp_path / "final", tmp_path / "draft") as draft:
        draft.mkdir()
        (draft / "weights").write_text("draft")
    assert (tmp_path / "final" / "weights").read_text() == "draft" and not (
        tmp_path / "final"
    ).is_symlink()
    assert (tmp_path / "elsewhere" / "weights").read_text() == "elsewhere"


@pytest.mark.parametrize(("code", "step"), [("ENOSPC", "Free"), ("EROFS", "Check")])
def test_a_refusal_ends_in_the_step_that_helps(tmp_path, code, step):
    number = getattr(errno, code)
    with (
        raises(StorageError, "storage.refused", step),
        storage.refusals("write", tmp_path / "run"),
    ):
        raise OSError(number, os.strerror(number))
    with (
        raises(StorageError, "storage.refused", step),
        storage.storage(tmp_path),
    ):
        raise OSError(number, os.strerror(number))
