"""The corpus, exactly: the tokens are those of the text, once each, on one side, whatever cache or machine is used."""

import copy
import hashlib
import json
import math
from collections import Counter

import numpy as np
import pytest

from narrowgauge.data import check_vocabulary, corpus, documents, prepare
from narrowgauge.data.corpus import validates
from narrowgauge.errors import ConfigError, DataError, StorageError
from tests.raising import raises


def decoded(tokenizer, stream):
    """The documents of a stream as text."""
    ids = stream.tokens.tolist()
    assert ids[-1] == tokenizer.eos_token_id
    texts = tokenizer.backend_tokenizer.decode(ids, skip_special_tokens=False)
    return texts.removesuffix(tokenizer.eos_token).split(tokenizer.eos_token)


def test_split_by_document_keeps_every_document_whole_on_its_side(
    folder, texts, tokenizer, tmp_path
):
    made = prepare(folder, tokenizer, cache=tmp_path / "cache", validation_fraction=0.3, seed=5)
    held_out = [
        validates(hashlib.sha256(text.encode()).digest(), fraction=0.3, seed=5) for text in texts
    ]
    assert decoded(tokenizer, made.validation) == [
        t for t, held in zip(texts, held_out, strict=True) if held
    ]
    assert decoded(tokenizer, made.train) == [
        t for t, held in zip(texts, held_out, strict=True) if not held
    ]


def test_summary(folder, tokenizer, tmp_path):
    made = prepare(folder, tokenizer, cache=tmp_path / "cache", validation_fraction=0.3)
    summary = made.summary
    counts = Counter(made.train.tokens.tolist())
    entropy = -sum(n / len(made.train) * math.log(n / len(made.train)) for n in counts.values())
    assert summary.pop("unigram_entropy") == pytest.approx(
        entropy, rel=1e-12
    )  # the order of a sum of 300 terms
    assert summary.pop("train_documents") + summary.pop("validation_documents") == 40
    assert len(summary.pop("content_hash")) == len(summary.pop("tokenizer_fingerprint")) == 64
    assert summary.pop("tokenizer").startswith("bpe-300-")
    assert summary == {
        "source": str(folder),
        "documents": 40,
        "train_tokens": len(made.train),
        "validation_tokens": len(made.validation),
        "split": "by document",
        "vocab_size": 300,
        "notes": [],
    }
    assert made.largest_token == max(made.train.tokens.max(), made.validation.tokens.max())


def test_the_summary_is_plain_json(folder, tokenizer, tmp_path):
    summary = prepare(folder, tokenizer, cache=tmp_path / "cache").summary
    assert json.loads(json.dumps(summary, allow_nan=False)) == summary


def test_more_documents_move_none_of_the_others(folder, tokenizer, tmp_path):
    before = prepare(folder, tokenizer, cache=tmp_path / "cache", validation_fraction=0.3)
    for number in range(30):
        (folder / f"{number:02}-more.txt").write_text(
            f"One more, number {number}.\n", encoding="utf-8"
        )
    after = prepare(folder, tokenizer, cache=tmp_path / "cache", validation_fraction=0.3)
    for side in ("train", "validation"):
        old, new = (decoded(tokenizer, getattr(made, side)) for made in (before, after))
        assert [text for text in new if not text.startswith("One more")] == old


def test_one_file_is_split_at_its_tail(tmp_path, texts, tokenizer):
    path = tmp_path / "book.txt"
    path.write_text("".join(texts), encoding="utf-8")
    made = prepare(path, tokenizer, cache=tmp_path / "cache", validation_fraction=0.1)
    [train], [validation] = decoded(tokenizer, made.train), decoded(tokenizer, made.validation)
    assert train + validation == "".join(texts)
    assert train.endswith("\n")
    assert len(validation) == pytest.approx(
        0.1 * len("".join(texts)), abs=100
    )  # half of the longest line, 8 words
    assert made.summary["split"].startswith("by tail: the last 0.1 of each document")
    assert (
        made.summary["documents"],
        made.summary["train_documents"],
        made.summary["validation_documents"],
    ) == (
        1,
        1,
        1,
    )


def test_identical_documents_are_split_at_their_tails(tmp_path, tokenizer):
    """By document they would all land on one side."""
    path = tmp_path / "same.txt"
    path.write_text("\f".join(["one line\n" * 50] * 25), encoding="utf-8")
    made = prepare(path, tokenizer, cache=tmp_path / "cache")
    assert made.summary["split"].startswith("by tail")
    assert made.summary["validation_documents"] == 25


@pytest.mark.parametrize("source", ["many", "one"])
def test_fraction_zero_holds_nothing_out(source, folder, tokenizer, tmp_path):
    made = prepare(
        folder if source == "many" else folder / "00.txt",
        tokenizer,
        cache=tmp_path / "c",
        validation_fraction=0,
    )
    assert len(made.validation) == 0
    assert made.summary["split"].startswith("none")


def test_a_second_call_reads_the_cache(folder, tokenizer, tmp_path, monkeypatch):
    first = prepare(folder, tokenizer, cache=tmp_path / "cache")
    monkeypatch.setattr(corpus._CorpusJob, "fill", None)  # tokenizing again would fail
    second = prepare(folder, tokenizer, cache=tmp_path / "cache")
    assert second.summary == first.summary
    assert np.array_equal(second.train.tokens, first.train.tokens)


@pytest.mark.parametrize("change", ["text", "order", "seed", "fraction", "tokenizer"])
def test_whatever_decides_the_tokens_decides_the_entry(change, folder, tokenizer, tmp_path):
    cache = tmp_path / "cache"
    prepare(folder, tokenizer, cache=cache, validation_fraction=0.3)
    options = {"validation_fraction": 0.3}
    if change == "text":
        with (folder / "07.txt").open("a", encoding="utf-8") as file:
            file.write(".")
    elif change == "order":
        (folder / "07.txt").rename(folder / "99.txt")
    elif change == "seed":
        options["seed"] = 1
    elif change == "fraction":
        options["validation_fraction"] = 0.31
    else:
        tokenizer = copy.deepcopy(tokenizer)
        tokenizer.add_tokens(["amax"])
    prepare(folder, tokenizer, cache=cache, **options)
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("pattern", ["train.bin", "validation.bin", "index.json"])
def test_a_damaged_cache_is_made_again_and_says_so(pattern, folder, tokenizer, tmp_path):
    cache = tmp_path / "cache"
    first = prepare(folder, tokenizer, cache=cache)
    good = first.train.tokens.tolist()
    [path] = cache.rglob(pattern)
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.unlink()  # a new file: `first` still maps the old one
    path.write_bytes(raw)
    second = prepare(folder, tokenizer, cache=cache)
    assert second.train.tokens.tolist() == good
    [note] = second.summary["notes"]
    assert "damaged" in note
    assert path.name in note
    assert prepare(folder, tokenizer, cache=cache).summary["notes"] == []


def test_batches_and_pieces_do_not_show(folder, texts, tokenizer, tmp_path, monkeypatch):
    """Batch borders never change a token; piece borders fall on line ends, where this tokenizer cuts anyway."""
    whole = prepare(folder, tokenizer, cache=tmp_path / "a")
    monkeypatch.setattr(corpus, "BATCH_CHARS", 100)
    monkeypatch.setattr(corpus, "BATCH_PIECES", 3)
    monkeypatch.setattr(corpus, "pieces", lambda text: text.splitlines(keepends=True))
    parts = prepare(folder, tokenizer, cache=tmp_path / "b")
    assert parts.train.tokens.tolist() == whole.train.tokens.tolist()
    assert parts.summary | {"source": ""} == whole.summary | {"source": ""}


def test_a_tokenizer_that_truncates_does_not_truncate_the_corpus(folder, tokenizer, tmp_path):
    twin = copy.deepcopy(tokenizer)
    twin.backend_tokenizer.enable_truncation(4)
    twin.backend_tokenizer.enable_padding(length=8)
    plain, cut = (
        prepare(folder, t, cache=tmp_path / name) for t, name in ((tokenizer, "a"), (twin, "b"))
    )
    assert cut.train.tokens.tolist() == plain.train.tokens.tolist()


def test_special_tokens_in_the_text_are_counted(tmp_path, texts, tokenizer):
    path = tmp_path / "a.txt"
    path.write_text(texts[0] + "<|endoftext|>" + texts[1], encoding="utf-8")
    [note] = prepare(path, tokenizer, cache=tmp_path / "cache").summary["notes"]
    assert note == "The text itself spells out special tokens, 1 times; they became special ids."


def test_unknown_tokens_are_counted(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"[UNK]": 0, "[END]": 1, "known": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="[UNK]", eos_token="[END]"
    )
    path = tmp_path / "a.txt"
    path.write_text("known known\n" * 10 + "strange\n" * 3 + "known known\n" * 3, encoding="utf-8")
    made = prepare(path, tokenizer, cache=tmp_path / "cache")
    [note] = made.summary["notes"]
    assert note.startswith(f"3 of {len(made.train) + len(made.validation)} tokens are [UNK]")


def test_no_training_tokens_is_an_error(tmp_path):
    """A tokenizer that drops every character of the text."""
    from tokenizers import Tokenizer, models, normalizers
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(models.WordLevel({"[END]": 0}, unk_token="[END]"))
    backend.normalizer = normalizers.Replace("x", "")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="[END]")
    path = tmp_path / "a.txt"
    path.write_text("x" * 100, encoding="utf-8")
    with raises(DataError, "corpus.no-tokens", "0 training", "a.txt"):
        prepare(path, tokenizer, cache=tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_text_too_short_to_hold_anything_out_is_an_error(tmp_path, tokenizer):
    path = tmp_path / "a.txt"
    path.write_text("short", encoding="utf-8")
    with raises(DataError, "corpus.no-tokens", "0 validation", "0.05", "validation_fraction"):
        prepare(path, tokenizer, cache=tmp_path / "cache")


@pytest.mark.parametrize(("entries", "fits"), [(300, True), (299, False), (1, False)])
def test_vocabulary_must_cover_the_largest_id(tmp_path, tokenizer, entries, fits):
    path = tmp_path / "a.txt"
    largest = tokenizer.convert_ids_to_tokens(299)
    path.write_text((largest.replace("Ġ", " ") + "\n") * 50, encoding="utf-8")
    made = prepare(path, tokenizer, cache=tmp_path / "cache")
    assert made.largest_token == 299
    if fits:
        check_vocabulary(made, entries)
    else:
        with raises(DataError, "corpus.vocabulary", entries):
            check_vocabulary(made, entries)


def test_data_that_changes_while_it_is_read_is_an_error(folder, tokenizer, tmp_path, monkeypatch):
    calls = []

    def changing(source, **options):
        calls.append(source)
        found = list(documents(source, **options))
        return iter(found[len(calls) - 1 :])  # a document less each time

    monkeypatch.setattr(corpus, "documents", changing)
    with raises(DataError, "data.changed"):
        prepare(folder, tokenizer, cache=tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())


def test_errors_in_the_data_come_before_any_file_is_written(tmp_path, tokenizer):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n{"text": null}\n', encoding="utf-8")
    with raises(DataError, "table.cell", "'text'", "null", "a.jsonl:2"):
        prepare(path, tokenizer, cache=tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_column_and_separator_reach_the_reader(tmp_path, texts, tokenizer):
    table, plain = tmp_path / "a.jsonl", tmp_path / "a.txt"
    table.write_text(
        "".join(json.dumps({"title": "x", "body": text}) + "\n" for text in texts), encoding="utf-8"
    )
    plain.write_text("<|end|>".join(texts), encoding="utf-8")
    a = prepare(table, tokenizer, cache=tmp_path / "cache", column="body")
    b = prepare(plain, tokenizer, cache=tmp_path / "cache", separator="<|end|>")
    assert a.summary["content_hash"] == b.summary["content_hash"]


def test_a_cache_that_cannot_be_written_is_a_storage_error(folder, tokenizer, tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    with raises(StorageError, "storage.refused", tmp_path / "file"):
        prepare(folder, tokenizer, cache=tmp_path / "file")


@pytest.mark.parametrize("fraction", [-0.1, 1, 1.5, math.nan, math.inf])
def test_an_impossible_fraction_is_refused_before_reading(tokenizer, tmp_path, fraction):
    with raises(ConfigError, "corpus.validation-fraction", "validation_fraction"):
        prepare(tmp_path / "absent", tokenizer, cache=tmp_path, validation_fraction=fraction)
