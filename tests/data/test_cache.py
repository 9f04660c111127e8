"""The cache, exactly: what was written comes back, and anything else is damage, whichever bit changed."""

import errno
import os
import pickle
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge.data import cache
from narrowgauge.data.cache import Damaged, cached, open_entry
from narrowgauge.errors import StorageError
from narrowgauge.storage import locked, storage, sweep, temporary
from tests.raising import coded, raises, require

NAME = f"tokens-{'0' * 32}"
SIDES = {"train": [1, 2, 3, 4], "validation": [5, 6]}


def make(folder, sides, dtype="<u2"):
    """(entry, notes) of an entry that holds these ids, written in two parts if it has to be made."""

    def fill(append):
        for side, ids in sides.items():
            append(side, np.array(ids[:1], np.int64))
            append(side, np.array(ids[1:], np.int64))
        return {"content_hash": "c"}

    return cached(folder / NAME, dict.fromkeys(sides, np.dtype(dtype)), fill)


IDS = st.lists(st.integers(0, 70_000), max_size=9)


@given(IDS, IDS)
def test_what_was_written_comes_back(tmp_path_factory, train, validation):
    folder = tmp_path_factory.mktemp("cache")
    written, notes = make(folder, {"train": train, "validation": validation}, "<u4")
    for entry in (written, open_entry(folder / NAME), pickle.loads(pickle.dumps(written))):
        assert {side: values.tolist() for side, values in entry.arrays.items()} == {
            "train": train,
            "validation": validation,
        }
        assert entry.facts == {"content_hash": "c"} and notes == []
    assert [path.name for path in folder.iterdir()] == [NAME]  # nothing temporary is left


def test_ids_take_two_bytes_while_they_fit():
    assert cache.token_dtype(65_535) == np.dtype("<u2")
    assert cache.token_dtype(65_536) == np.dtype("<u4")


def test_arrays_are_mapped_and_read_only_and_no_part_of_a_pickle(tmp_path):
    entry = make(tmp_path, {"train": list(range(50_000))})[0]
    assert isinstance(entry.arrays["train"], np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        entry.arrays["train"][0] = 5
    assert len(pickle.dumps(entry)) < 1000


def test_no_entry_is_none(tmp_path):
    assert open_entry(tmp_path / NAME) is None


def test_every_flipped_bit_is_damage(tmp_path):
    """Each byte of each file once, one random bit of it: never an array with wrong ids."""
    make(tmp_path, SIDES)
    draw = random.Random(0)
    for path in sorted((tmp_path / NAME).iterdir()):
        good = path.read_bytes()
        for position in range(len(good)):
            bad = bytearray(good)
            bad[position] ^= 1 << draw.randrange(8)
            path.write_bytes(bad)
            with pytest.raises(Damaged, match=path.name):
                open_entry(tmp_path / NAME)
        path.write_bytes(good)
    assert open_entry(tmp_path / NAME) is not None


@pytest.mark.parametrize("change", [lambda raw: raw[:-1], lambda raw: raw + b"\0", lambda raw: b""])
def test_a_truncated_or_extended_file_is_damage(tmp_path, change):
    make(tmp_path, SIDES)
    for path in sorted((tmp_path / NAME).iterdir()):
        good = path.read_bytes()
        path.write_bytes(change(good))
        fault = (
            rf"{path.name} .*{len(change(good))} .*{len(good)}"
            if path.suffix == ".bin"
            else "checksum"
        )
        with pytest.raises(Damaged, match=fault):
            open_entry(tmp_path / NAME)
        path.write_bytes(good)


@pytest.mark.parametrize("name", ["train.bin", "index.json"])
def test_a_missing_file_is_damage(tmp_path, name):
    make(tmp_path, SIDES)
    (tmp_path / NAME / name).unlink()
    with pytest.raises(Damaged, match=f"{name} is missing"):
        open_entry(tmp_path / NAME)


@pytest.mark.parametrize("index", ["[]", "null", "{}", '"x"', "[" * 5000])
def test_an_index_that_is_no_index_is_damage(tmp_path, index):
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / "index.json").write_text(index, encoding="utf-8")
    with pytest.raises(Damaged, match="checksum"):
        open_entry(tmp_path / NAME)


def test_an_entry_under_another_key_is_damage(tmp_path):
    make(tmp_path, SIDES)
    other = tmp_path / f"tokens-{'1' * 32}"
    (tmp_path / NAME).rename(other)
    with pytest.raises(Damaged):
        open_entry(other)


@pytest.mark.parametrize("call", ["rename", "fsync", "mkdir"])
@pytest.mark.parametrize("before", ["nothing", "damage"])
def test_a_write_that_stops_anywhere_leaves_no_entry_and_nothing_temporary(
    tmp_path, monkeypatch, call, before
):
    """The first such call fails, then the second, until none is left to fail."""
    real, failures, finished = getattr(os, call), 0, False
    while not finished:
        folder, done = tmp_path / str(failures), []
        folder.mkdir()
        if before == "damage":
            make(folder, {"train": [9]})
            (folder / NAME / "train.bin").write_bytes(b"")

        def stop(*given, allowed=failures, done=done, **options):
            done.append(given)
            if len(done) > allowed:
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*given, **options)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, stop)
            try:
                make(folder, SIDES)
            except StorageError as error:
                require(error, "storage.refused", "Free")
            finished = len(done) <= failures
        try:
            entry = open_entry(folder / NAME)
            assert entry is None or entry.arrays["train"].tolist() == SIDES["train"]
        except Damaged:
            assert before == "damage" and not finished
        assert not list(folder.glob(".*"))
        failures += 1
    assert failures > 1


def test_a_damaged_entry_is_replaced_and_open_arrays_stay_as_they_were(tmp_path):
    entry, _ = make(tmp_path, {"train": [1, 2], "other": [3]})
    values = entry.arrays["train"]
    (tmp_path / NAME / "other.bin").write_bytes(b"")
    again, [note] = make(tmp_path, {"train": [7, 8], "other": [9]})
    assert "other.bin has 0 bytes, not 2" in note
    assert values.tolist() == [1, 2] and again.arrays["train"].tolist() == [7, 8]


@pytest.mark.parametrize("state", ["whole", "damaged"])
def test_an_entry_that_another_process_makes_meanwhile_is_used_if_it_is_whole(tmp_path, state):
    def fill(append):
        make(tmp_path, {"train": [1]})  # as the other process does
        if state == "damaged":
            (tmp_path / NAME / "train.bin").write_bytes(b"")
        append("train", np.array([1]))
        return {"by": "me"}

    entry, notes = cached(tmp_path / NAME, {"train": np.dtype("<u2")}, fill)
    assert entry.arrays["train"].tolist() == [1] and notes == []
    assert entry.facts == ({"content_hash": "c"} if state == "whole" else {"by": "me"})
    assert [path.name for path in tmp_path.iterdir()] == [NAME]


def test_an_entry_that_vanishes_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "open_entry", lambda path: None)
    with raises(StorageError, "cache.removed"):
        make(tmp_path, SIDES)


def test_a_disk_that_returns_other_bytes_than_it_took_is_told(tmp_path, monkeypatch):
    publish = cache.publish

    def rot(draft, path):
        (draft / "train.bin").write_bytes(b"")
        publish(draft, path)

    monkeypatch.setattr(cache, "publish", rot)
    with raises(StorageError, "cache.damaged", "0 bytes"):
        make(tmp_path, SIDES)


@pytest.mark.parametrize("before", ["nothing", "an entry"])
def test_a_disk_that_cannot_be_read_is_told(tmp_path, monkeypatch, before):
    """When an entry is looked for; and when none was there, after it is written."""
    if before == "an entry":
        make(tmp_path, SIDES)

    def broken(path, kind, flags):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("narrowgauge.storage.reading._descriptor", broken)
    with pytest.raises(StorageError, match=r"cannot be read: Input/output error"):
        make(tmp_path, SIDES)


def test_a_draft_is_locked_until_it_has_its_place(tmp_path, monkeypatch):
    """Else another process could sweep it away while it is flushed."""
    rename = os.rename

    def beside(source, target):
        os.utime(source, (0, 0))
        sweep(tmp_path)
        rename(source, target)

    monkeypatch.setattr("narrowgauge.storage.os.rename", beside)
    make(tmp_path, SIDES)
    assert (tmp_path / NAME).exists()


@pytest.mark.parametrize("name", ["tokens", "examples", "images"])
def test_the_draft_of_a_killed_process_is_swept_away_and_that_of_a_living_one_is_not(
    tmp_path, name
):
    """A kill gives back the lock and leaves the folder. All but the fresh one are older than a minute."""
    killed, living, fresh = (temporary(tmp_path / f"{name}-{'0' * 32}") for _ in range(3))
    foreign = tmp_path / ".notes.tmp"
    for path in (killed, living, fresh, foreign):
        path.mkdir()
        (path / "train.bin").write_bytes(b"half")
    for path in (killed, living, foreign):
        os.utime(path, (0, 0))
    with locked(living):
        make(tmp_path, SIDES)
    assert [path.exists() for path in (killed, living, fresh, foreign)] == [False, True, True, True]


def test_the_key_depends_on_every_fact():
    facts = {"content_hash": "a", "tokenizer": "b", "split": [True, 0.05, 0]}
    keys = {cache.key_of(facts)} | {cache.key_of({**facts, name: "other"}) for name in facts}
    assert len(keys) == 1 + len(facts)
    assert cache.key_of(dict(reversed(facts.items()))) == cache.key_of(facts)


@pytest.mark.parametrize(
    ("code", "step"),
    [
        (errno.ENOSPC, coded("storage.refused", "Free")),
        (errno.EROFS, coded("storage.refused")),
    ],
)
def test_what_the_file_system_refuses_is_a_storage_error(tmp_path, code, step):
    with raises(StorageError, step), storage(tmp_path):
        raise OSError(code, os.strerror(code))
