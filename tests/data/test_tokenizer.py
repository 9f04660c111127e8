"""Tokenizers, exactly: the same text gives the same tokenizer, a fingerprint moves with anything that moves an id."""

import copy
import json
import os
import shutil
import subprocess
import sys

import pytest
import tokenizers
import transformers
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge.data import fingerprint, load, train_bpe
from narrowgauge.data.tokenizer import END_OF_TEXT, _sample, end_of_text, plain_backend
from narrowgauge.errors import ConfigError, DataError, StorageError
from narrowgauge.storage import locked, temporary
from tests.raising import coded, raises, require

TEXTS = ["the scale of a tile\n" * 30, "the amax of a tile\n" * 20, "größe 数 🙂"]


def test_the_folder_is_what_auto_tokenizer_loads(tmp_path):
    from transformers import AutoTokenizer

    trained = train_bpe(TEXTS, 270, tmp_path)
    loaded = AutoTokenizer.from_pretrained(trained.folder)
    assert loaded.is_fast
    assert len(loaded) == trained.vocab_size == 270
    assert loaded.eos_token == END_OF_TEXT
    assert loaded.eos_token_id == end_of_text(trained.tokenizer) == 0
    assert fingerprint(loaded) == fingerprint(trained.tokenizer)


@given(
    st.text(st.characters(exclude_categories=["Cs"])).filter(lambda text: END_OF_TEXT not in text)
)
def test_any_text_survives_the_round_trip(tokenizer, text):
    """Property: byte-level, so there is no unknown token, and no character is normalized away."""
    ids = plain_backend(tokenizer).encode(text, add_special_tokens=False).ids
    assert plain_backend(tokenizer).decode(ids) == text


def test_the_same_text_is_trained_once(tmp_path, monkeypatch):
    first = train_bpe(TEXTS, 270, tmp_path)
    monkeypatch.setattr("narrowgauge.data.tokenizer._train", None)  # a second training would fail
    second = train_bpe(iter(TEXTS), 270, tmp_path)
    assert second.folder == first.folder
    assert second.notes == first.notes == []
    assert fingerprint(second.tokenizer) == fingerprint(first.tokenizer)


@pytest.mark.parametrize(
    ("texts", "vocab_size"),
    [(TEXTS[:2], 270), (TEXTS[::-1], 270), (TEXTS, 271), (["".join(TEXTS)], 270)],
)
def test_other_text_or_size_is_another_folder(tmp_path, texts, vocab_size):
    assert train_bpe(texts, vocab_size, tmp_path).folder != train_bpe(TEXTS, 270, tmp_path).folder


@pytest.mark.slow
def test_the_number_of_threads_does_not_change_the_merges(tmp_path):
    code = (
        "import hashlib, sys; from narrowgauge.data import train_bpe\n"
        "texts = [f'text {n} of {n % 7} tiles and {n % 11} scales\\n' * 20 for n in range(500)]\n"
        "made = train_bpe(texts, 600, sys.argv[1]).tokenizer.backend_tokenizer\n"
        "print(hashlib.sha256(made.to_str().encode()).hexdigest())"
    )
    prints = {
        subprocess.run(
            [sys.executable, "-c", code, str(tmp_path / threads)],
            env={
                **os.environ,
                "RAYON_NUM_THREADS": threads,
                "PYTHONPATH": os.pathsep.join(sys.path),
            },
            capture_output=True,
            encoding="ascii",
            check=True,
        ).stdout
        for threads in ("1", "4")
    }
    assert len(prints) == 1


def test_a_small_text_gives_a_small_vocabulary_and_says_so(tmp_path):
    trained = train_bpe(["ab ab ab"], 5000, tmp_path)
    assert trained.vocab_size < 300
    [note] = trained.notes
    require(note, "tokenizer.few-entries", trained.vocab_size, 5000)


def test_a_large_text_is_sampled_deterministically_and_says_so(tmp_path):
    texts = [f"document {n} says {n * n}\n" * 20 for n in range(200)]
    trained = train_bpe(texts, 270, tmp_path / "a", sample_bytes=20_000)
    total = sum(len(text) for text in texts)
    require(trained.notes[0], "tokenizer.sample", f" of {total} bytes")
    again = train_bpe(texts, 270, tmp_path / "b", sample_bytes=20_000)
    assert fingerprint(again.tokenizer) == fingerprint(trained.tokenizer)


def test_the_sample_is_spread_over_the_text_in_reading_order():
    """Of 400 equal parts about 100 are kept. Fewer than 25 of them in a half: 2 in a billion (hypergeometric)."""
    texts = [f"document {n:03}\n" for n in range(400)]
    kept, _, total = _sample(texts, sample_bytes=100 * len(texts[0]))
    assert total == sum(map(len, texts))
    assert len(kept) == 100
    assert kept == sorted(kept)
    assert 25 <= sum(text < texts[200] for text in kept) <= 75


@pytest.mark.parametrize("damage", ["merge", "truncated", "seal", "missing"])
def test_a_changed_cache_is_made_again_and_says_so(tmp_path, damage):
    good = train_bpe(TEXTS, 270, tmp_path)
    before = fingerprint(good.tokenizer)
    file = good.folder / "tokenizer.json"
    if damage == "merge":
        state = json.loads(file.read_text(encoding="utf-8"))
        merges = state["model"]["merges"]
        merges[0], merges[1] = merges[1], merges[0]
        file.write_text(json.dumps(state), encoding="utf-8")
    elif damage == "truncated":
        file.write_bytes(file.read_bytes()[:100])
    elif damage == "seal":
        (good.folder / "narrowgauge-bpe.json").write_text("[]", encoding="utf-8")
    else:
        file.unlink()
    again = train_bpe(TEXTS, 270, tmp_path)
    assert fingerprint(again.tokenizer) == before
    require(again.notes[0], "tokenizer.changed", good.folder.name)
    assert train_bpe(TEXTS, 270, tmp_path).notes == []


@pytest.mark.parametrize("state", ["absent", "changed"])
def test_processes_that_train_the_same_tokenizer_at_once(texts, tmp_path, monkeypatch, state):
    """Another one finishes while this one has its draft ready: between its last look and its rename."""
    from narrowgauge.data import cache as module
    from narrowgauge.data.tokenizer import SEAL

    made = train_bpe(texts, 300, tmp_path)
    if state == "changed":
        (made.folder / SEAL).write_text("{}", encoding="utf-8")
    else:
        shutil.rmtree(made.folder)
    publish = module.publish

    def beside(draft, path):
        monkeypatch.setattr(module, "publish", publish)
        train_bpe(texts, 300, tmp_path)
        publish(draft, path)

    monkeypatch.setattr(module, "publish", beside)
    assert train_bpe(texts, 300, tmp_path).vocab_size == made.vocab_size
    assert [path.name for path in tmp_path.iterdir()] == [made.folder.name]


def test_training_refuses_what_cannot_work(tmp_path):
    with raises(ConfigError, "tokenizer.vocabulary-size", "256", "257", "vocab_size"):
        train_bpe(TEXTS, 256, tmp_path)
    with raises(DataError, "tokenizer.no-text"):
        train_bpe([], 300, tmp_path)
    (tmp_path / "file").write_text("", encoding="utf-8")
    with raises(StorageError, "storage.refused", "use"):
        train_bpe(TEXTS, 270, tmp_path / "file")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file"]


@pytest.mark.parametrize(
    ("message", "step"),
    [
        ("No space left on device (os error 28)", coded("storage.refused", "Free")),
        ("?", coded("storage.refused")),
    ],
)
def test_what_the_rust_half_raises_while_writing_is_a_storage_error(
    tmp_path, monkeypatch, message, step
):
    def refuse(*_, **__):
        raise Exception(message)  # this bare class is what `tokenizers` raises

    monkeypatch.setattr("transformers.PreTrainedTokenizerFast.save_pretrained", refuse)
    with raises(StorageError, step):
        train_bpe(TEXTS, 270, tmp_path)
    assert not list(tmp_path.iterdir())


def test_the_draft_of_a_killed_process_is_swept_away_and_that_of_a_living_one_is_not(tmp_path):
    """Both are older than a minute; the folder of another program stays."""
    whole = train_bpe(TEXTS, 270, tmp_path).folder
    killed, living = (temporary(whole) for _ in range(2))
    foreign = tmp_path / ".bpe-notes.tmp"
    for path in (killed, living, foreign):
        path.mkdir()
        (path / "tokenizer.json").write_text("half")
        os.utime(path, (0, 0))
    with locked(living):
        train_bpe(TEXTS, 271, tmp_path)
    assert [path.exists() for path in (killed, living, foreign, whole)] == [False, True, True, True]


def test_load_refuses_a_missing_folder_without_asking_the_hub(tmp_path):
    for name in (tmp_path / "none", str(tmp_path / "none"), "./none", "a/b/c"):
        with raises(DataError, "tokenizer.no-folder"):
            load(name)


def test_load_names_the_folder_that_was_meant(tmp_path, monkeypatch):
    (tmp_path / "my-encoder").mkdir()
    monkeypatch.chdir(tmp_path)
    with raises(DataError, "tokenizer.no-folder", "'my-encoder'"):
        load("./my-encodr")
    with raises(DataError, "tokenizer.unusable"):
        load("my-encodr")


def test_load_refuses_an_unknown_model():
    with raises(DataError, "tokenizer.unusable"):
        load("no-such-organisation/no-such-model")


@pytest.mark.parametrize("content", ["", '{"x"', "[]", '{"version": "1.0"}'])
def test_load_refuses_a_malformed_file(tmp_path, content):
    trained = train_bpe(TEXTS, 270, tmp_path)
    (trained.folder / "tokenizer.json").write_text(content, encoding="utf-8")
    with raises(DataError, "tokenizer.unusable"):
        load(trained.folder)


@pytest.mark.slow
def test_load_refuses_a_slow_tokenizer(tmp_path):
    (tmp_path / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "CanineTokenizer"}', encoding="utf-8"
    )
    with raises(DataError, "tokenizer.slow", "CanineTokenizer"):
        load(tmp_path)


@pytest.mark.parametrize("name", ["BertConfig", "GPT2Config", "T5Config", "LlamaConfig"])
def test_load_refuses_the_empty_tokenizer_of_a_model_without_one(tmp_path, name):
    """Of a folder with config.json alone transformers makes a tokenizer to which all text is unknown."""
    getattr(transformers, name)().save_pretrained(tmp_path)
    with pytest.raises(
        DataError,
        match=r"no tokenizer is there\. transformers makes a .* --data.tokenizer|no usable tokenizer",
    ):
        load(tmp_path)


def test_a_tokenizer_of_a_few_characters_is_one(tmp_path):
    backend = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({"<unk>": 0, "字": 1}, unk_token="<unk>")
    )
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="<unk>"
    ).save_pretrained(tmp_path)
    assert load(tmp_path)("字")["input_ids"] == [1]


def test_load_never_runs_code_that_comes_with_a_model(tmp_path):
    config = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "own.py").write_text(
        "open(__file__ + '.ran', 'w')\nclass Own: pass\n", encoding="utf-8"
    )
    with raises(DataError, "tokenizer.unusable"):
        load(tmp_path)
    assert not list(tmp_path.glob("*.ran"))


def edited(tokenizer, edit):
    """A copy of the tokenizer whose tokenizer.json went through `edit`."""
    from tokenizers import Tokenizer

    state = json.loads(tokenizer.backend_tokenizer.to_str())
    edit(state)
    twin = copy.deepcopy(tokenizer)
    twin._tokenizer = Tokenizer.from_str(json.dumps(state))
    return twin


def _swap_merges(state):
    merges = state["model"]["merges"]
    merges[3], merges[4] = merges[4], merges[3]


def _swap_ids(state):
    vocab = state["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


EDITS = {
    "merges swapped": _swap_merges,
    "merge dropped": lambda state: state["model"]["merges"].pop(),
    "ids swapped": _swap_ids,
    "entry more": lambda state: state["model"]["vocab"].update(
        {"extra": len(state["model"]["vocab"])}
    ),
    "normalizer": lambda state: state.update(normalizer={"type": "Lowercase"}),
    "pre-tokenizer": lambda state: state["pre_tokenizer"].update(add_prefix_space=True),
    "ignore merges": lambda state: state["model"].update(ignore_merges=True),
    "added token": lambda state: state["added_tokens"].append(
        dict(state["added_tokens"][0], id=len(state["model"]["vocab"]), content="<|new|>")
    ),
}


@pytest.mark.parametrize("edit", EDITS.values(), ids=EDITS)
def test_the_fingerprint_moves_with_whatever_moves_an_id(tokenizer, edit):
    assert fingerprint(edited(tokenizer, edit)) != fingerprint(tokenizer)


def test_the_fingerprint_moves_with_a_special_token(tokenizer):
    twin = copy.deepcopy(tokenizer)
    twin.pad_token = END_OF_TEXT
    assert fingerprint(twin) != fingerprint(tokenizer)


def test_the_fingerprint_ignores_truncation_padding_and_name(tokenizer):
    twin = copy.deepcopy(tokenizer)
    twin.backend_tokenizer.enable_truncation(8)
    twin.backend_tokenizer.enable_padding()
    twin.name_or_path = "another"
    assert fingerprint(twin) == fingerprint(tokenizer)


def test_the_plain_backend_neither_truncates_nor_pads_nor_changes_the_original(tokenizer):
    twin = copy.deepcopy(tokenizer)
    twin.backend_tokenizer.enable_truncation(2)
    backend = plain_backend(twin)
    assert len(backend.encode("scale tile amax codes cast").ids) > 2
    assert twin.backend_tokenizer.truncation["max_length"] == 2


def test_a_tokenizer_without_end_of_text_is_refused(tokenizer):
    twin = copy.deepcopy(tokenizer)
    twin.eos_token = None
    with raises(DataError, "tokenizer.no-end-of-text"):
        end_of_text(twin)
