"""GGUF: blocks to the bit, names, order of rows, tokenizer, and what is refused (exact).

What the package gguf writes and reads is skipped where it is not installed; the extra `gguf` brings it.
"""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest
import torch

import narrowgauge as ng
from narrowgauge import recipes
from narrowgauge.errors import ConfigError
from narrowgauge.export import file_formats, gguf_file, gguf_tokenizer, layers
from narrowgauge.export.file_tensors import gguf_tensors
from tests.compare import assert_same
from tests.export.models import UNROTATED_MXFP4, bert, llama, operands, qwen2
from tests.raising import raises

NEEDS_GGUF = pytest.mark.skipif(not find_spec("gguf"), reason="needs the package gguf")
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
GGUF = file_formats.get("gguf")
SHARED = {
    "Q8_0": recipes.INT8_ROW.with_shared_scales(),
    "MXFP4": UNROTATED_MXFP4,
    "NVFP4": recipes.NVFP4.with_shared_scales(),
}


def decoded(found, kind, rows, columns):
    """[N, K] float32 of blocks, by the definitions in ggml-common.h."""
    blocks = found["weight"]
    if kind == "Q8_0":
        blocks = blocks.reshape(rows, columns // 32, 34)
        scale = blocks[..., :2].contiguous().view(torch.float16).float()
        return (blocks[..., 2:].contiguous().view(torch.int8) * scale).reshape(rows, columns)
    tile, heads = (32, 1) if kind == "MXFP4" else (16, 4)
    blocks = blocks.reshape(rows, -1, heads + heads * tile // 2)
    scale, codes = blocks[..., :heads], blocks[..., heads:].reshape(rows, -1, heads, tile // 2)
    values = torch.cat((E2M1[(codes % 16).long()], E2M1[(codes // 16).long()]), -1)
    if kind == "MXFP4":
        return (values * 2.0 ** (scale.float() - 127)[..., None]).reshape(rows, columns)
    values = values * scale.contiguous().view(torch.float8_e4m3fn).float()[..., None]
    return values.reshape(rows, columns) * found["scale"]


@pytest.mark.parametrize("kind", SHARED)
def test_blocks_hold_a_casts_numbers(kind):
    """Ragged rows, zeros, an outlier and rows of very different sizes."""
    x = torch.randn(40, 192, generator=torch.Generator().manual_seed(0))
    x *= torch.logspace(-3, 2, 40)[:, None]
    x[3], x[5, 7], x[8, :64] = 0, 1e3, -0.0
    q = ng.quantize(x, SHARED[kind].output.rhs).compact()
    found = gguf_tensors(q)
    size = {"Q8_0": 34 / 32, "MXFP4": 17 / 32, "NVFP4": 36 / 64}[kind]
    assert found["weight"].shape == (40, 192 * size)
    assert_same(decoded(found, kind, 40, 192), ng.dequantize(q))


@pytest.mark.parametrize("tile", [(1, 32), (-1, -1), (4, 64), (1, 256)])
def test_q8_0_takes_power_of_two_scales_of_any_whole_blocks(tile):
    cast = ng.Cast(format=ng.formats.INT8, tile=tile, scale=ng.scaling.POW2)
    x = torch.randn(10, 192, generator=torch.Generator().manual_seed(1))
    assert GGUF.holds(cast, 10, 192) == ""
    q = ng.quantize(x, cast)
    assert_same(decoded(gguf_tensors(q), "Q8_0", 10, 192), ng.dequantize(q))


def test_rows_of_a_head_alternate_between_its_halves():
    rows = torch.arange(12)[:, None]
    found = gguf_file.in_neighbours(rows, 2)
    assert found.flatten().tolist() == [0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11]
    assert_same(gguf_file.in_halves(found, 2), rows)


@pytest.mark.parametrize(
    ("recipe", "code"),
    [
        ("int8", "wide-scales"),
        ("fp8-row", "other-element"),
        ("mxfp8", "other-element"),
        ("mxfp4", "rotated"),
    ],
)
def test_other_casts_are_not_held_and_requantize_makes_q8_0(recipe, code):
    made = ng.convert(llama(), recipe)
    name = "model.layers.0.mlp.up_proj"
    assert layers.chosen(made, GGUF)[name].reason.code == code
    choice = layers.chosen(made, GGUF, requantize=True)[name]
    assert choice.is_narrow and choice.requantized
    q = layers.made(made.get_submodule(name), GGUF, choice)
    assert file_formats.gguf_type(q.cast) == "Q8_0"


def test_scales_beyond_float16_stay_wide():
    made = llama()
    with torch.no_grad():
        made.model.layers[0].mlp.up_proj.weight[3] = 2.0**-20
    ng.convert(made, "int8", share_scales=True)
    choices = layers.chosen(made, GGUF)
    assert choices["model.layers.0.mlp.up_proj"].reason.code == "scale-range"
    assert choices["model.layers.0.mlp.gate_proj"].is_narrow  # llama.cpp fuses nothing
    # Cast anew, that row's blocks have the same range.
    again = layers.chosen(made, GGUF, requantize=True)
    assert again["model.layers.0.mlp.up_proj"].reason.code == "scale-range"


def test_qwen2_has_no_nvfp4_since_llama_cpp_ignores_its_scale():
    made = ng.convert(qwen2(), "nvfp4", share_scales=True)
    choices = layers.chosen(made, GGUF)
    assert choices["model.layers.0.mlp.up_proj"].reason.code == "unscaled"
    choices = layers.chosen(made, GGUF, requantize=True)
    assert choices["model.layers.0.mlp.up_proj"].requantized


def test_shared_scales_of_int8_are_powers_of_two_in_the_output_alone():
    made = ng.convert(llama(), "int8", share_scales=True)
    recipe = made.model.layers[0].mlp.up_proj.recipe
    assert recipe.output.rhs.scale.power_of_two and not recipe.output.lhs.scale.power_of_two
    assert recipe.grad_input == recipes.INT8_ROW.grad_input


# --- the tokenizer -------------------------------------------------------------------------------


def byte_level(count=280, bos=None):
    import transformers
    from tokenizers import Tokenizer, models, pre_tokenizers, processors, trainers

    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<|end|>", "<|begin|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=count, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(["the tiles of the tables tell the time"] * 9, trainer)
    if bos:
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, backend.token_to_id(bos))]
        )
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", bos_token="<|begin|>"
    )


@pytest.mark.parametrize("bos", [None, "<|begin|>"])
def test_a_byte_level_tokenizer_is_written_by_id(bos, tmp_path):
    made, tokenizer = llama(), byte_level(bos=bos)
    rows = len(tokenizer) + 3
    found = gguf_tokenizer.metadata(tokenizer, made.config, rows)
    tokens = found["tokenizer.ggml.tokens"]
    assert tokens[: len(tokenizer)] == tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    assert tokens[-1] == f"[PAD{rows - 1}]" and found["tokenizer.ggml.token_type"][-1] == 5
    assert found["tokenizer.ggml.token_type"][:3] == [3, 3, 1]
    assert found["tokenizer.ggml.pre"] == "gpt-2"
    assert found["tokenizer.ggml.add_bos_token"] is (bos is not None)
    assert found["tokenizer.ggml.eos_token_id"] == tokenizer.eos_token_id
    assert all(len(each.split(" ")) == 2 for each in found["tokenizer.ggml.merges"])
    # The same from a folder.
    tokenizer.save_pretrained(tmp_path)
    assert gguf_tokenizer.metadata(tmp_path, made.config, rows) == found
    with raises(ConfigError, "export.gguf-tokenizer"):
        gguf_tokenizer.metadata(tokenizer, made.config, len(tokenizer) - 1)


def test_rules_of_splitting_are_known_by_name_or_refused():
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    digits = {"type": "Digits", "individual_digits": True}

    def rule(*parts, model="BPE"):
        split = {"type": "Sequence", "pretokenizers": list(parts)}
        return gguf_tokenizer.split_rule({"pre_tokenizer": split, "model": {"type": model}})

    for pattern, name in gguf_tokenizer.SPLITS.items():
        split = {"type": "Split", "pattern": {"Regex": pattern}}
        assert rule(split, level) == name
    assert rule(digits, level | {"use_regex": True}) == "smollm"
    assert rule(level | {"use_regex": True}) == "gpt-2"
    assert rule({"type": "Split", "pattern": {"Regex": r"\p{N}{1,2}"}}, level) == ""
    assert rule(level) == "" and rule(level | {"add_prefix_space": True}) == ""
    assert rule({"type": "Metaspace"}) == "" and rule(level, model="Unigram") == ""
    assert gguf_tokenizer.split_rule({"pre_tokenizer": None, "model": {"type": "BPE"}}) == ""


def test_a_tokenizer_that_llama_cpp_would_read_otherwise_is_refused():
    import transformers
    from tokenizers import Tokenizer, models

    words = transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel({"a": 0}, "a"))
    )
    with raises(ConfigError, "export.gguf-tokenizer", "WordLevel"):
        gguf_tokenizer.metadata(words, llama().config, 96)


def test_a_sentencepiece_model_is_refused_by_its_name():
    """Llama 2's form: BPE with bytes as pieces; T5's: Unigram; Mistral's: spaces as U+2581."""
    import transformers
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers

    for model, change in (
        (models.BPE({"a": 0}, [], byte_fallback=True), {}),
        (models.Unigram([("a", 0.0)]), {}),
        (models.BPE({"a": 0}, []), {"normalizer": normalizers.Replace(" ", "\u2581")}),
        (models.BPE({"a": 0}, []), {"pre_tokenizer": pre_tokenizers.Metaspace()}),
    ):
        backend = Tokenizer(model)
        for name, value in change.items():
            setattr(backend, name, value)
        tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=backend)
        with raises(ConfigError, "export.gguf-tokenizer", "SentencePiece"):
            gguf_tokenizer.metadata(tokenizer, llama().config, 96)
    assert not gguf_tokenizer.is_sentencepiece(json.loads(byte_level().backend_tokenizer.to_str()))


def test_what_llama_cpp_would_not_do_to_text_is_refused():
    from tokenizers import normalizers

    made = llama()
    for other in (
        normalizers.Lowercase(),
        normalizers.Sequence([normalizers.NFC(), normalizers.Strip()]),
    ):
        tokenizer = byte_level()
        tokenizer.backend_tokenizer.normalizer = other
        with raises(ConfigError, "export.gguf-tokenizer", "normalizes"):
            gguf_tokenizer.metadata(tokenizer, made.config, 300)
    tokenizer = byte_level()
    tokenizer.backend_tokenizer.normalizer = normalizers.NFC()
    assert gguf_tokenizer.metadata(tokenizer, made.config, 300)["tokenizer.ggml.pre"] == "gpt-2"
    tokenizer.backend_tokenizer.model.end_of_word_suffix = "</w>"
    with raises(ConfigError, "export.gguf-tokenizer", "</w>"):
        gguf_tokenizer.metadata(tokenizer, made.config, 300)
    level = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    pattern = {"Regex": next(iter(gguf_tokenizer.SPLITS))}
    for other in ({"behavior": "Removed"}, {"behavior": "Isolated", "invert": True}):
        parts = [{"type": "Split", "pattern": pattern, **other}, level]
        split = {"type": "Sequence", "pretokenizers": parts}
        assert gguf_tokenizer.split_rule({"pre_tokenizer": split, "model": {"type": "BPE"}}) == ""


def test_tokens_that_a_configuration_does_not_have_are_left_out():
    made, tokenizer = llama(), byte_level()
    tokenizer.eos_token = None
    made.config.pad_token_id, made.config.eos_token_id = -1, []
    found = gguf_tokenizer.metadata(tokenizer, made.config, 300)
    assert "tokenizer.ggml.padding_token_id" not in found
    assert "tokenizer.ggml.eos_token_id" not in found and "tokenizer.ggml.bos_token_id" in found


def test_a_folder_with_a_damaged_or_an_older_tokenizer_is_not_taken_for_one_without(tmp_path):
    made = llama()
    assert gguf_tokenizer.metadata(tmp_path, made.config, 300) == {"tokenizer.ggml.model": "none"}
    (tmp_path / "tokenizer.json").write_text("{broken")
    with raises(ConfigError, "export.gguf-tokenizer", tmp_path):
        gguf_tokenizer.metadata(tmp_path, made.config, 300)
    (tmp_path / "tokenizer.json").unlink()
    # Files of GPT-2's first tokenizer.
    (tmp_path / "vocab.json").write_text(byte_level().backend_tokenizer.to_str())
    with raises(ConfigError, "export.gguf-tokenizer"):
        gguf_tokenizer.metadata(tmp_path, made.config, 300)


@pytest.mark.parametrize("model", [llama, qwen2])
def test_rotary_frequencies_rounded_with_the_model_are_not_scaled_ones(model):
    assert gguf_file._frequency_factors(model()) is None
    assert gguf_file._frequency_factors(model().bfloat16()) is None


# --- the file ------------------------------------------------------------------------------------


def fields(folder):
    import gguf

    reader = gguf.GGUFReader(folder / "model.gguf")
    return {key: each.contents() for key, each in reader.fields.items()}, {
        each.name: each for each in reader.tensors
    }


@NEEDS_GGUF
@pytest.mark.parametrize(
    ("kind", "model"),
    [("Q8_0", llama), ("MXFP4", llama), ("NVFP4", llama), ("Q8_0", qwen2), ("MXFP4", qwen2)],
)
def test_a_file_holds_the_numbers_by_which_the_forward_pass_multiplies(kind, model, tmp_path):
    import gguf

    made = model(num_hidden_layers=2, num_attention_heads=4)
    ng.convert(made, SHARED[kind])
    report = ng.export.save(made, tmp_path / "out", format="gguf", load=kind != "NVFP4")
    expected, (facts, found) = operands(made), fields(tmp_path / "out")
    assert len(report.narrow) == 14 and report.facts["bits"]["equal"] == 14
    names = {"q_proj": "attn_q", "k_proj": "attn_k", "v_proj": "attn_v", "o_proj": "attn_output",
             "gate_proj": "ffn_gate", "up_proj": "ffn_up", "down_proj": "ffn_down"}  # fmt: skip
    for name in report.narrow:
        _, _, block, _, last = name.split(".")
        each = found[f"blk.{block}.{names[last]}.weight"]
        assert each.tensor_type.name == kind
        here = torch.from_numpy(gguf.dequantize(each.data, each.tensor_type).copy())
        if kind == "NVFP4":
            here *= float(found[f"blk.{block}.{names[last]}.scale"].data[0])
        if model is llama and last in ("q_proj", "k_proj"):
            heads = 4 if last == "q_proj" else 2
            here = gguf_file.in_halves(here, heads)
        # gguf has one zero among its numbers of 4 bits.
        assert_same(here + 0.0, expected[name] + 0.0, at=name)
    assert facts["general.architecture"] == ("llama" if model is llama else "qwen2")
    assert ("output.weight" in found) == (model is llama)  # tied in Qwen2
    assert found["output_norm.weight"].tensor_type.name == "F32"
    assert found["token_embd.weight"].tensor_type.name == "BF16"
    # transformers undoes the order of rows by code of its own, and computes with it.
    if kind != "NVFP4":
        loading = report.facts["loading"]
        assert loading["equal_elements"] == 1
        assert loading["logits"]["loaded"] < loading["logits"]["wide"]
    ng.export.verify(tmp_path / "out")


@NEEDS_GGUF
def test_nvfp4_with_a_float32_scale_comes_back_to_one_unit(tmp_path):
    made = ng.convert(llama(), "nvfp4")
    report = ng.export.save(made, tmp_path / "out", format="gguf", load=False)
    assert len(report.narrow) == 7  # each projection has its own scale, so none is left out
    assert 0 < report.facts["bits"]["largest_difference"] < 2**-23


@NEEDS_GGUF
def test_a_wide_model_with_a_tokenizer_and_scaled_frequencies(tmp_path):
    parameters = {
        "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    tokenizer = byte_level(count=290)
    made = llama(vocab_size=300, rope_parameters=parameters)
    report = ng.export.save(
        made, tmp_path / "out", format="gguf-bf16", tokenizer=tokenizer, load=False
    )
    facts, found = fields(tmp_path / "out")
    assert report.narrow == [] and facts["llama.rope.freq_base"] == 5e5
    assert len(facts["tokenizer.ggml.tokens"]) == 300 == facts["llama.vocab_size"]
    factors = torch.from_numpy(found["rope_freqs.weight"].data.copy())
    plain = 5e5 ** -(torch.arange(32) / 32)
    torch.testing.assert_close(plain / factors, made.model.rotary_emb.inv_freq)
    assert float(factors[0]) == 1 and 7.9 < float(factors[-1]) < 8.1
    assert "llama-server" in (tmp_path / "out/README.md").read_text()
    with raises(ConfigError, "export.gguf-model", "frequencies"):
        scaled = qwen2(rope_parameters=parameters)
        ng.export.save(scaled, tmp_path / "other", format="gguf-bf16", load=False)


@NEEDS_GGUF
def test_models_that_llama_cpp_reads_otherwise_are_refused_before_anything_is_written(tmp_path):
    for made in (bert(), llama(hidden_act="gelu"), qwen2(use_sliding_window=True)):
        with raises(ConfigError, "export.gguf-model"):
            ng.export.save(made, tmp_path / "out", format="gguf-bf16", load=False)
    assert not list(tmp_path.iterdir())


def test_without_the_package_the_error_names_it(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with raises(ConfigError, "export.gguf-missing", "narrowgauge[gguf]"):
        ng.export.save(llama(), tmp_path / "out", format="gguf-bf16", load=False)
