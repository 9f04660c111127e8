"""A base read shard by shard: the codes of a model that was loaded whole (exact), and the memory of reading it."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from narrowgauge import convert, export, memory
from narrowgauge.errors import ConfigError
from narrowgauge.nn.linear import QLinear
from narrowgauge.ops.quantize import dequantize
from narrowgauge.optim import precision as precisions
from narrowgauge.qtensor import QTensor
from narrowgauge.recipes import get
from narrowgauge.train import coded_base
from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.pretrained import CAUSAL_LM, pretrained
from tests.compare import assert_same
from tests.live_bytes import LiveBytes
from tests.raising import raises

CPU = torch.device("cpu")


def llama(**changes):
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 32}
    return LlamaForCausalLM(LlamaConfig(**sizes | changes)).bfloat16()


def saved(folder, model, shard="60KB"):
    model.save_pretrained(folder, max_shard_size=shard)
    return str(folder)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model in a dozen files."""
    where = saved(tmp_path_factory.mktemp("base"), llama())
    assert len(coded_base.files_of(where)) > 5
    return where


def filled(where, recipe, dtype=torch.bfloat16):
    model = coded_base.empty(AutoModelForCausalLM, AutoConfig.from_pretrained(where))
    if dtype != torch.float32:
        precisions.get("bf16-o3").prepare(model)
    convert(model, recipe)
    return model, coded_base.fill(model, where, CPU)


@pytest.mark.parametrize("recipe", ["fp8-block", "nvfp4", "nvfp4-46", "mxfp4", "int8"])
def test_codes_are_those_of_the_model_loaded_whole(folder, recipe):
    """Exact: every buffer and the output of the model."""
    model, report = filled(folder, recipe)
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    whole.load_state_dict(whole.state_dict())
    convert(whole, recipe)
    memory.freeze(whole, "*layers*", codes=True)
    own, expected = dict(model.named_buffers()), dict(whole.named_buffers())
    assert own.keys() == expected.keys() and any("frozen.codes" in name for name in own)
    for name, each in expected.items():
        assert_same(own[name], each)
    coded = [each for each in model.modules() if isinstance(each, QLinear) and each.frozen]
    assert report.coded == len(coded) > 5
    assert report.elements == sum(each.weight.numel() for each in coded)
    assert not any(each.requires_grad for each in model.parameters())
    ids = torch.arange(16).reshape(2, 8)
    with torch.no_grad():
        assert_same(model.eval()(ids).logits, whole.eval()(ids).logits)


def test_report_names_what_stays_wide(folder):
    _, report = filled(folder, "fp8-block")
    assert "Kept wide: lm_head, no recipe casts it." in str(report)
    assert report.code_bytes / report.elements == pytest.approx(1 + 1 / 128**2, rel=0.02)


def test_a_tied_head_stays_wide_and_tied(tmp_path):
    where = saved(tmp_path, llama(tie_word_embeddings=True))
    model, report = filled(where, {"*": "fp8-block", "lm_head": "fp8-block"})
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.lm_head.frozen is None and report.coded == 14


@pytest.mark.parametrize(
    ("recipe", "layers", "copies"),
    [("fp8-block", 6, 4), pytest.param("nvfp4", 16, 8, marks=pytest.mark.slow)],
)
def test_the_model_is_never_wide_as_a_whole(tmp_path, recipe, layers, copies):
    """Bounded: what stays, one file, and the float32 copies of a cast of one tensor.

    copies  of a cast's operand, in float32, that its emulation on a CPU holds

    Loaded whole, the model has 2 bytes for each of 0.9 M weights, and its codes beside them.
    """
    where = saved(
        tmp_path, llama(hidden_size=128, num_hidden_layers=layers, vocab_size=32), shard="100KB"
    )
    files = [path.stat().st_size for path in coded_base.files_of(where)]
    with LiveBytes() as live:
        _, report = filled(where, recipe)
    largest = 4 * copies * 128 * 256
    bound = report.code_bytes + report.wide_bytes + max(files) + largest
    assert live.peak < bound < sum(files)
    assert live.peak > report.code_bytes  # control: the count sees the codes


def test_digest_is_of_the_weights_and_not_of_the_files(folder, tmp_path):
    first = coded_base.digest(folder)
    assert coded_base.digest(saved(tmp_path / "one", llama(), shard="1GB")) == first
    other = llama()
    other.model.norm.weight.data[3] += 0.5
    assert coded_base.digest(saved(tmp_path / "other", other)) != first


def block_fp8(where, scales):
    """Rewrites a folder in one file as block FP8: E4M3 weights and `weight_scale_inv`."""
    [path] = coded_base.files_of(str(where))
    tensors = load_file(path)
    cast = get("fp8-block").output.rhs
    found = {}
    for name, each in tensors.items():
        if "proj" not in name:
            found[name] = each
            continue
        codes = (each.float() * scales).to(torch.float8_e4m3fn)
        shape = [-(-size // 128) for size in each.shape]
        found[name], found[f"{name}_scale_inv"] = codes, torch.full(shape, 1 / scales)
    save_file(found, path, metadata={"format": "pt"})
    config = json.loads((where / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    (where / "config.json").write_text(json.dumps(config))
    return found, cast


@pytest.mark.parametrize(("scales", "is_taken"), [(512.0, True), (500.0, False)])
def test_codes_of_a_block_fp8_checkpoint_are_taken_as_they_are(tmp_path, scales, is_taken):
    """Exact: with power-of-two scales the weight is what the file decodes to; else it is cast, and counted."""
    saved(tmp_path, llama(), shard="1GB")
    stored, cast = block_fp8(tmp_path, scales)
    model, report = filled(str(tmp_path), "fp8-block", torch.float32)
    assert (report.taken, report.recoded) == ((14, 0) if is_taken else (0, 14))
    layer, name = model.model.layers[1].mlp.up_proj, "model.layers.1.mlp.up_proj.weight"
    scale = stored[f"{name}_scale_inv"]
    decoded = dequantize(QTensor(data=stored[name], scale=scale, cast=cast, inner=128))
    assert layer.frozen.quantized.shape == layer.weight.shape and len(set(layer.weight.shape)) == 2
    if is_taken:
        assert_same(layer.frozen.codes.view(torch.float8_e4m3fn), stored[name])
        assert_same(layer.weight.detach().clone(), decoded)
    else:
        difference = (layer.weight - decoded).norm() / decoded.norm()
        assert 0 < difference < 2**-4  # half a step of E4M3


@pytest.mark.parametrize(
    "kind", ["weight_scale", "row", "int8", "uint8 codes", "int32 without a scale", "bf16 with one", "scale of 0", "integer scales"]
)  # fmt: skip
def test_codes_with_other_scales_are_no_weights(tmp_path, kind):
    """They were read as weights of up to 448, without an error."""
    where = saved(tmp_path, llama(), shard="1GB")
    stored, _ = block_fp8(tmp_path, 512.0)
    for name in [name for name in stored if name.endswith("_scale_inv")]:
        weight = name.removesuffix("_scale_inv")
        if kind == "uint8 codes":
            stored[weight] = stored[weight].view(torch.uint8)
        elif kind == "int32 without a scale":
            stored[weight] = stored[weight].float().to(torch.int32)
            del stored[name]
        elif kind == "bf16 with one":
            stored[weight] = stored[weight].bfloat16()
        elif kind == "scale of 0":
            stored[name][0] = 0.0
        elif kind == "integer scales":
            stored[name] = torch.ones_like(stored[name], dtype=torch.int32)
        elif kind == "row":
            stored[name] = torch.ones(stored[name.removesuffix("_scale_inv")].shape[0], 1)
        else:
            stored[name.removesuffix("_inv")] = stored.pop(name)
            if kind == "int8":
                weight = name.removesuffix("_scale_inv")
                stored[weight] = stored[weight].float().to(torch.int8)
    save_file(stored, coded_base.files_of(where)[0], metadata={"format": "pt"})
    with raises(ConfigError, "model.quantized"):
        filled(where, "fp8-block", torch.float32)


@pytest.mark.parametrize("base", ["", "fp8-block"])
def test_an_export_in_codes_is_no_model_to_train(tmp_path, base):
    """Without a base it ended in a traceback of torch; with one, in other weights."""
    pytest.importorskip("compressed_tensors")
    export.save(convert(llama(), "fp8-row"), tmp_path / "out", format="fp8-channel", load=False)
    asked = TrainConfig(model=str(tmp_path / "out"), data="text", lora="r=2", base=base)
    with raises(ConfigError, "model.quantized", "compressed-tensors"):
        pretrained(asked, CAUSAL_LM)


def test_what_no_file_holds_is_refused(folder, tmp_path):
    where = saved(tmp_path, llama(), shard="1GB")
    [path] = coded_base.files_of(where)
    tensors = load_file(path)
    lost = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, path, metadata={"format": "pt"})
    with raises(ConfigError, "model.missing-weights"):
        filled(where, "fp8-block")
    tensors["model.layers.1.mlp.up_proj.weight"] = lost[:-1].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    with raises(ConfigError, "model.shapes"):
        filled(where, "fp8-block")
    lost[0, 0] = float("nan")
    tensors["model.layers.1.mlp.up_proj.weight"] = lost
    save_file(tensors, path, metadata={"format": "pt"})
    with raises(ConfigError, "weights.not-finite"):
        filled(where, "fp8-block")
    path.write_bytes(path.read_bytes()[:-4])
    with raises(ConfigError, "model.file"):
        coded_base.digest(where)
    path.unlink()
    with raises(ConfigError, "model.no-weights"):
        coded_base.files_of(where)
