"""Texts of a trained model: those of transformers on the same weights, by narrow and wide products (exact)."""

from __future__ import annotations

import io
import json
import math
from importlib.util import find_spec

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from narrowgauge import cli, convert
from narrowgauge.errors import ConfigError, DataError, NumericsError
from narrowgauge.lab import training
from narrowgauge.ops.rng import generators
from narrowgauge.train.evaluation.generation import GenerationOptions, RefuseNonfinite, generate
from narrowgauge.train.evaluation.saved import SavedRun
from tests.compare import assert_same
from tests.raising import raises
from tests.train import tiny
from tests.train.tasks import folders

GREEDY = {"greedy": True, "max_new_tokens": 6, "device": "cpu"}


@pytest.fixture(scope="module")
def run(text, tmp_path_factory):
    """A run of eight steps, long enough that it does not write one token for ever."""
    folder = tmp_path_factory.mktemp("written") / "run"
    config = tiny.settings(text, folder, recipe="fp8-delayed", steps=8, learning_rate=1e-2)
    assert training.run(config) == 0
    return folder


def by_hand(model, tokenizer, prompt, tokens):
    """Greedy decoding without a cache: the likeliest of the tokenizer's tokens, one pass for each."""
    ids = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    start = len(ids)
    for _ in range(tokens):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        ids.append(int(logits[: len(tokenizer)].argmax()))
        if ids[-1] == tokenizer.eos_token_id:
            break
    return tokenizer.decode(ids[start:], skip_special_tokens=True)


def test_a_run_writes_by_its_recipe_and_wide(run):
    """Wide text is that of the decoded weights; the recipe is the run's, from its checkpoint."""
    narrow = generate(run, GenerationOptions(prompt="the scale", **GREEDY))
    wide = generate(run, GenerationOptions(prompt="the scale", products="wide", **GREEDY))
    assert (narrow["recipe"], wide["recipe"]) == ("fp8-delayed", "none")
    assert narrow["source"] == wide["source"] == "checkpoints/step-00000008"
    saved = SavedRun.open(run, torch.device("cpu"))
    model, _, _ = saved.model(saved.paths("newest")[0])
    assert narrow["text"] == by_hand(model, saved.task.tokenizer, "the scale", 6)
    assert narrow["tokens"] == 6 and narrow["ended"] == "length" and narrow["text"]


def test_a_folder_writes_wide_and_by_the_recipe_that_is_named(run):
    wide = generate(run / "final", GenerationOptions(prompt="the", **GREEDY))
    narrow = generate(run / "final", GenerationOptions(prompt="the", recipe="fp8-row", **GREEDY))
    assert (wide["recipe"], narrow["recipe"]) == ("none", "fp8-row")
    model = AutoModelForCausalLM.from_pretrained(run / "final").eval()
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    ids = tokenizer("the", return_tensors="pt")["input_ids"]
    for result, recipe in ((wide, None), (narrow, "fp8-row")):
        if recipe:
            convert(model, recipe)
        with torch.no_grad():
            logits = model(ids).logits[0, -1, : len(tokenizer)]
        first = tokenizer.decode([int(logits.argmax())])
        assert result["text"].startswith(first)


def test_a_seed_draws_one_text_and_leaves_the_generators_alone(run):
    before = generators()
    sampled = {"prompt": "the", "max_new_tokens": 8, "temperature": 2.0, "device": "cpu"}
    texts = [
        generate(run / "final", GenerationOptions(seed=seed, **sampled))["text"]
        for seed in (0, 0, 1, 2)
    ]
    assert texts[0] == texts[1] and len(set(texts)) > 1
    assert_same(generators()["torch"], before["torch"])


def test_no_token_beyond_the_tokenizer_is_drawn(run):
    """The embedding is padded to a multiple of 16; at a high temperature every row is likely."""
    model = AutoModelForCausalLM.from_pretrained(run / "final")
    tokenizer = AutoTokenizer.from_pretrained(run / "final")
    assert model.get_input_embeddings().weight.shape[0] > len(tokenizer)
    hot = {"temperature": 1e6, "top_k": 0, "max_new_tokens": 12, "device": "cpu"}
    found = generate(run / "final", GenerationOptions(prompt="the", **hot))
    assert found["tokens"] == 12 or found["ended"] == "end of text"


def test_a_chat_is_rendered_by_the_template(tmp_path):
    tokenizer = folders.byte_tokenizer("<pad>")
    place = folders.llama(tmp_path / "chat", tokenizer)
    found = generate(place, GenerationOptions(prompt="the key", chat=True, **GREEDY))
    turns = [{"role": "user", "content": "the key"}]
    rendered = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert found["prompt"] == rendered != "the key"


def test_a_tokenizer_without_a_template_is_refused(run):
    with raises(ConfigError, "chat.no-template"):
        generate(run / "final", GenerationOptions(prompt="the", chat=True, **GREEDY))


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"max_new_tokens": 0}, "generate.numbers"),
        ({"temperature": 0.0}, "generate.numbers"),
        ({"temperature": float("nan")}, "generate.numbers"),
        ({"top_k": -1}, "generate.numbers"),
        ({"products": "both"}, "generate.products"),
        ({"system": "Be brief."}, "generate.system"),
        ({"recipe": "fp8-row"}, "generate.recipe-of-run"),
        ({"checkpoint": "99"}, "evaluate.checkpoints"),
        ({"max_new_tokens": 17, "greedy": True}, "generate.positions"),
    ],
)
def test_what_cannot_be_is_refused(run, changes, code):
    with raises((ConfigError, DataError), code):
        generate(run, GenerationOptions(**{"prompt": "the", "device": "cpu"} | changes))


def test_without_a_number_as_many_tokens_as_the_model_has_positions_for(run):
    """A model of 16 positions, which the default of 64 would not fit. A prompt that fills them is refused."""
    written = generate(run, GenerationOptions(prompt="the", greedy=True, device="cpu"))
    positions = SavedRun.open(run, torch.device("cpu")).config.sequence_length
    assert written["tokens"] <= positions - 1 and written["ended"] in ("length", "end of text")
    with raises(ConfigError, "generate.positions", "16 positions"):
        generate(run, GenerationOptions(prompt="the quick " * 20, greedy=True, device="cpu"))


def test_a_folder_that_holds_nothing_is_refused(tmp_path):
    with raises(ConfigError, "generate.place"):
        generate(tmp_path, GenerationOptions(prompt="the"))


@pytest.mark.skipif(not find_spec("gguf"), reason="needs the package gguf")
def test_a_gguf_file_writes_what_the_weights_in_it_write(run, tmp_path):
    """Its bfloat16 weights by transformers beside those of the export in bf16, in float32."""
    for form in ("gguf-bf16", "bf16"):
        words = ["export", str(run), "--format", form, "--output", str(tmp_path / form)]
        assert cli.main([*words, "--no-load"]) == 0
    folder = tmp_path / "gguf-bf16"
    asked = GenerationOptions(prompt="the scale", **GREEDY)
    found = generate(folder, asked)
    assert found == generate(folder / "model.gguf", asked) | {"tokens_per_s": found["tokens_per_s"]}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "bf16", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "bf16")
    ids = tokenizer("the scale", return_tensors="pt")["input_ids"]
    banned = list(range(len(tokenizer), model.config.vocab_size)) or None
    expected = model.generate(ids, do_sample=False, max_new_tokens=6, suppress_tokens=banned)
    assert found["text"] == tokenizer.decode(expected[0, ids.shape[1] :], skip_special_tokens=True)
    assert found["text"] and found["source"].endswith("model.gguf")


def test_a_folder_may_have_the_suffix_of_a_gguf_file(tmp_path):
    (tmp_path / "m.gguf").mkdir()
    with raises(ConfigError, "generate.place"):
        generate(tmp_path / "m.gguf", GenerationOptions())
    (tmp_path / "m.gguf" / "model.gguf").write_bytes(b"GGUF" + bytes(60))
    with raises(ConfigError, "generate.gguf", "m.gguf/model.gguf"):
        generate(tmp_path / "m.gguf", GenerationOptions())


def test_a_file_that_is_no_gguf_is_refused_with_its_reader(tmp_path):
    (tmp_path / "model.gguf").write_bytes(b"GGUF" + bytes(60))
    for place in (tmp_path, tmp_path / "model.gguf"):
        with raises(ConfigError, "generate.gguf", "llama-cli"):
            generate(place, GenerationOptions(prompt="the", device="cpu"))


def test_logits_that_are_not_finite_are_refused():
    ids, scores = torch.zeros(1, 3, dtype=torch.int64), torch.zeros(1, 8)
    assert RefuseNonfinite()(ids, scores) is scores
    suppressed = scores.index_fill(1, torch.tensor([7]), -math.inf)
    assert RefuseNonfinite()(ids, suppressed) is suppressed
    for bad in (math.nan, math.inf):
        with raises(NumericsError, "generate.not-finite"):
            RefuseNonfinite()(ids, scores.index_fill(1, torch.tensor([3]), bad))
    with raises(NumericsError, "generate.not-finite"):
        RefuseNonfinite()(ids, torch.full((1, 8), -math.inf))


def test_the_command_prints_the_new_text_alone(run, capsys, monkeypatch):
    flags = ["generate", str(run / "final"), "--greedy", "--max-new-tokens=6", "--device=cpu"]
    assert cli.main([*flags, "--prompt", "the scale", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    monkeypatch.setattr("sys.stdin", io.StringIO("the scale"))
    assert cli.main([*flags, "--prompt", "-"]) == 0
    assert capsys.readouterr().out == found["text"] + "\n"
