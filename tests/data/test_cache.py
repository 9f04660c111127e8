"""The cache, exactly: what was written comes back, and anything else is damage, whichever bit changed."""

import errno
import json
import os
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge.data import cache
from narrowgauge.data.cache import Damaged, TokenWriter, open_entry, write
from narrowgauge.errors import StorageError
from narrowgauge.storage import Draft, storage, sweep

KEY = "0" * 32


def make(folder, documents, vocabulary=1000):
    """An entry whose sides hold these documents."""
    sides = {}
    try:
        for side, ids in documents.items():
            sides[side] = TokenWriter(folder, KEY, side, cache.token_dtype(vocabulary - 1), vocabulary)
            for document in ids:
                sides[side].append(document[:1], ends_document=False)
                sides[side].append(document[1:], ends_document=True)
            sides[side].drain()
        write(folder, KEY, sides, {"content_hash": "c"})
    finally:
        for writer in sides.values():
            writer.discard()
    return sides


IDS = st.lists(st.lists(st.integers(0, 70_000), min_size=1, max_size=5), max_size=4)


@given(IDS, IDS, st.sampled_from([70_001, 200_000]))
def test_what_was_written_comes_back(tmp_path_factory, train, validation, vocabulary):
    folder = tmp_path_factory.mktemp("cache")
    sides = make(folder, {"train": train, "validation": validation}, vocabulary)
    streams, index = open_entry(folder, KEY)
    for side, documents in (("train", train), ("validation", validation)):
        flat = [token for document in documents for token in document]
        assert streams[side].tokens.tolist() == flat
        assert index[side]["document_lengths"] == [len(document) for document in documents]
        assert sides[side].counts.sum() == len(flat)
    assert sorted(path.suffix for path in folder.iterdir()) == [".bin", ".bin", ".json"]  # nothing temporary is left


def test_ids_take_two_bytes_while_they_fit():
    assert cache.token_dtype(65_535) == np.dtype("<u2")
    assert cache.token_dtype(65_536) == np.dtype("<u4")


def test_streams_are_mapped_and_read_only(tmp_path):
    make(tmp_path, {"train": [[1, 2, 3]], "validation": []})
    stream = open_entry(tmp_path, KEY)[0]["train"]
    assert isinstance(stream.tokens, np.memmap)
    with pytest.raises(ValueError, match="read-only"):
        stream.tokens[0] = 5


def test_no_entry_is_none(tmp_path):
    assert open_entry(tmp_path, KEY) is None


def test_every_flipped_bit_is_damage(tmp_path):
    """Each byte of each file once, one random bit of it: never a stream with wrong ids."""
    make(tmp_path, {"train": [[1, 2, 3], [4]], "validation": [[5, 6]]})
    draw = random.Random(0)
    for path in sorted(tmp_path.iterdir()):
        good = path.read_bytes()
        for position in range(len(good)):
            bad = bytearray(good)
            bad[position] ^= 1 << draw.randrange(8)
            path.write_bytes(bad)
            with pytest.raises(Damaged, match=path.name):
                open_entry(tmp_path, KEY)
        path.write_bytes(good)
    assert open_entry(tmp_path, KEY) is not None


@pytest.mark.parametrize("change", [lambda raw: raw[:-1], lambda raw: raw + b"\0", lambda raw: b""])
def test_a_truncated_or_extended_file_is_damage(tmp_path, change):
    make(tmp_path, {"train": [[1, 2, 3]], "validation": [[5, 6]]})
    for path in sorted(tmp_path.iterdir()):
        good = path.read_bytes()
        path.write_bytes(change(good))
        fault = rf"{path.name} has {len(change(good))} bytes, not {len(good)}" if path.suffix == ".bin" else "checksum"
        with pytest.raises(Damaged, match=fault):
            open_entry(tmp_path, KEY)
        path.write_bytes(good)


def test_a_missing_file_is_damage(tmp_path):
    make(tmp_path, {"train": [[1]], "validation": [[2]]})
    (tmp_path / f"tokens-{KEY}.train.bin").unlink()
    with pytest.raises(Damaged, match="is missing"):
        open_entry(tmp_path, KEY)


@pytest.mark.parametrize("index", ["[]", "null", "{}", '"x"', "[" * 5000])
def test_an_index_that_is_no_index_is_damage(tmp_path, index):
    (tmp_path / f"tokens-{KEY}.json").write_text(index, encoding="utf-8")
    with pytest.raises(Damaged, match="checksum"):
        open_entry(tmp_path, KEY)


def test_an_index_under_another_key_is_damage(tmp_path):
    make(tmp_path, {"train": [[1]], "validation": [[2]]})
    other = "1" * 32
    (tmp_path / f"tokens-{KEY}.json").rename(tmp_path / f"tokens-{other}.json")
    with pytest.raises(Damaged):
        open_entry(tmp_path, other)


def test_a_write_that_stops_anywhere_leaves_no_entry(tmp_path, monkeypatch):
    """The rename is what publishes: fail at each of the three in turn."""
    make(tmp_path, {"train": [[9]], "validation": [[9]]})
    rename, done = os.rename, []
    for allowed in range(3):
        done.clear()

        def stop(source, target, allowed=allowed):
            if len(done) == allowed:
                raise OSError(errno.ENOSPC, "No space left on device")
            done.append(target)
            rename(source, target)

        with monkeypatch.context() as patch:
            patch.setattr(os, "rename", stop)
            with pytest.raises(OSError, match="No space"):
                make(tmp_path, {"train": [[1]], "validation": [[2]]})
        assert open_entry(tmp_path, KEY) is None
        assert not list(tmp_path.glob(".*"))  # nor a temporary file


def test_a_rewrite_leaves_open_streams_as_they_were(tmp_path):
    make(tmp_path, {"train": [[1, 2]], "validation": [[3]]})
    stream = open_entry(tmp_path, KEY)[0]["train"]
    make(tmp_path, {"train": [[7, 8]], "validation": [[9]]})
    assert stream.tokens.tolist() == [1, 2]


def test_the_entry_of_a_process_that_was_as_fast_is_never_gone(tmp_path, monkeypatch):
    """Two processes write the same entry: while the second publishes, the first opens what it has just written."""
    make(tmp_path, {"train": [[1, 2]], "validation": [[3]]})
    rename, seen = os.rename, []

    def look(source, target):
        rename(source, target)
        streams, _ = open_entry(tmp_path, KEY)
        seen.append([streams[side].tokens.tolist() for side in ("train", "validation")])

    monkeypatch.setattr(os, "rename", look)
    make(tmp_path, {"train": [[1, 2]], "validation": [[3]]})
    assert seen == [[[1, 2], [3]]] * 3


def test_a_draft_is_locked_until_it_has_its_place(tmp_path, monkeypatch):
    """Else another process could sweep it away while it is flushed; one without content is as old as its making."""
    rename = os.rename

    def beside(source, target):
        os.utime(source, (0, 0))
        sweep(tmp_path)
        rename(source, target)

    monkeypatch.setattr("narrowgauge.storage.os.rename", beside)
    draft = Draft(tmp_path / f"tokens-{KEY}.validation.bin")
    draft.publish()
    assert draft.path.exists()


@pytest.mark.parametrize("name", ["tokens", "examples"])
def test_the_draft_of_a_killed_process_is_swept_away_and_that_of_a_living_one_is_not(tmp_path, name):
    """A kill closes the file, which gives back its lock, and leaves its name. Both are older than a minute here."""
    killed, living, fresh = (Draft(tmp_path / f"{name}-{KEY}.train.bin") for _ in range(3))
    for draft in (killed, fresh):
        draft.write(b"ids")
        draft.file.close()
    foreign = tmp_path / ".notes.tmp"
    foreign.touch()
    for path in (killed.name, living.name, foreign):
        os.utime(path, (0, 0))
    make(tmp_path, {"train": [[1]], "validation": [[2]]})
    assert [path.exists() for path in (killed.name, living.name, fresh.name, foreign)] == [False, True, True, True]
    living.discard()


def test_the_key_depends_on_every_fact():
    facts = {"content_hash": "a", "tokenizer": "b", "split": [True, 0.05, 0]}
    keys = {cache.key_of(facts)} | {cache.key_of({**facts, name: "other"}) for name in facts}
    assert len(keys) == 1 + len(facts)
    assert cache.key_of(dict(reversed(facts.items()))) == cache.key_of(facts)


@pytest.mark.parametrize(("code", "step"), [(errno.ENOSPC, "Free some space"), (errno.EROFS, "can be written")])
def test_what_the_file_system_refuses_is_a_storage_error(tmp_path, code, step):
    with pytest.raises(StorageError, match=step), storage(tmp_path):
        raise OSError(code, os.strerror(code))


def test_the_index_is_plain_json(tmp_path):
    make(tmp_path, {"train": [[1, 2]], "validation": [[3]]})
    index = json.loads((tmp_path / f"tokens-{KEY}.json").read_text(encoding="utf-8"))
    assert index["train"] | {"sha256": 0} == {"dtype": "<u2", "tokens": 2, "sha256": 0, "document_lengths": [2]}
