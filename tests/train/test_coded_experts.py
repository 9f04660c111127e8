"""Mixtures whose experts are read expert by expert and held as codes, and runs that train adapters over them (exact)."""

from __future__ import annotations

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

transformers = pytest.importorskip("transformers", minversion="5")

from narrowgauge import convert  # noqa: E402
from narrowgauge.errors import ConfigError  # noqa: E402
from narrowgauge.lab import training  # noqa: E402
from narrowgauge.nn.experts import grouped_experts  # noqa: E402
from narrowgauge.optim import precision as precisions  # noqa: E402
from narrowgauge.train import coded_base, loop  # noqa: E402
from narrowgauge.train.config.settings import resolved  # noqa: E402
from narrowgauge.train.planning import command  # noqa: E402
from tests.compare import assert_same  # noqa: E402
from tests.live_bytes import LiveBytes  # noqa: E402
from tests.raising import raises  # noqa: E402
from tests.selection import quick  # noqa: E402
from tests.train import tiny  # noqa: E402

CPU, E = torch.device("cpu"), 4
SIZES = {
    "vocab_size": 96, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "max_position_embeddings": 64, "num_experts_per_tok": 2,
}  # fmt: skip
LOCAL, ROUTED = {"num_local_experts": E}, {"n_routed_experts": E, "moe_intermediate_size": 128}
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 32}  # fmt: skip
# Class of transformers -> (sizes, number of Linears and matrices of experts in codes). The layouts differ: names of the files, shared
# experts, dense layers, transposed parameters that files hold as one tensor, routers with another name.
KINDS = {
    "Mixtral": (LOCAL, 24),
    "Qwen3Moe": ({"num_experts": E, "moe_intermediate_size": 128}, 24),
    "DeepseekV3": (ROUTED | LATENT | {"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}, 24),
    "GptOss": (LOCAL | {"head_dim": 32}, 24),
    "GraniteMoe": (LOCAL, 24),
    "Phimoe": (LOCAL, 24),
    "Olmoe": ({"num_experts": E, "eos_token_id": 0}, 24),
    "Llama4": (LOCAL | {"num_experts_per_tok": 1, "intermediate_size_mlp": 256, "head_dim": 32}, 30),
}  # fmt: skip
CONFIGS = {"Llama4": "Llama4TextConfig"}


def mixture(kind="Mixtral", **changes):
    torch.manual_seed(0)
    config = getattr(transformers, CONFIGS.get(kind, f"{kind}Config"))
    own = SIZES | KINDS[kind][0] | changes
    return getattr(transformers, f"{kind}ForCausalLM")(config(**own)).bfloat16()


def saved(folder, model, shard="60KB"):
    model.save_pretrained(folder, max_shard_size=shard)
    return str(folder)


def filled(where, recipe):
    auto, config = transformers.AutoModelForCausalLM, transformers.AutoConfig.from_pretrained(where)
    model = coded_base.empty(auto, config)
    precisions.get("bf16-o3").prepare(model)
    convert(model, recipe)
    return model, coded_base.fill(model, where, CPU)


def same_numbers(one, other):
    one, other = one.state_dict(), other.state_dict()
    assert one.keys() == other.keys()
    for name, each in one.items():
        assert_same(each.clone(), other[name].clone())  # a clone reads the decoded weight


@pytest.mark.filterwarnings("ignore:The explicitly set RoPE scaling factor")
@pytest.mark.parametrize("recipe", quick(["nvfp4"], ["fp8-block", "nvfp4", "int8"]))
@pytest.mark.parametrize("kind", quick(["Mixtral", "DeepseekV3", "GptOss"], list(KINDS)))
def test_codes_are_those_of_the_mixture_loaded_whole(tmp_path, kind, recipe):
    where = saved(tmp_path, mixture(kind))
    model, report = filled(where, recipe)
    assert report.coded == KINDS[kind][1]
    assert all(each.coded_stacks() for _, each in grouped_experts(model))
    whole = transformers.AutoModelForCausalLM.from_pretrained(where, dtype=torch.bfloat16)
    precisions.get("bf16-o3").prepare(whole)
    convert(whole, recipe)
    assert coded_base.hold(whole).coded == report.coded
    same_numbers(model, whole)
    ids = torch.arange(20).reshape(2, 10)
    with torch.no_grad():
        assert_same(model.eval()(ids).logits, whole.eval()(ids).logits)


def test_experts_without_a_recipe_are_read_whole(tmp_path):
    """And those of which one expert has none: a stack is held as codes for all experts or for none."""
    where = saved(tmp_path, mixture())
    plain = transformers.AutoModelForCausalLM.from_pretrained(where, dtype=torch.bfloat16)
    for left, coded in (("*.experts", 8), ("*.1.mlp.experts.2.*", 16)):
        model, report = filled(where, {"*": "fp8-block", left: None})
        kept = [name for names in report.kept.values() for name in names]
        assert report.coded == coded and "model.layers.1.mlp.experts.down_proj" in kept
        found, expected = (each.model.layers[1].mlp.experts.down_proj for each in (model, plain))
        assert_same(found.detach(), expected.detach())


def test_no_stack_is_ever_wide_as_a_whole(tmp_path):
    """Bounded: what stays, one file, and the float32 copies of a cast of one expert's matrix."""
    where = saved(tmp_path, mixture(num_local_experts=16, vocab_size=32), shard="100KB")
    files = [path.stat().st_size for path in coded_base.files_of(where)]
    with LiveBytes() as live:
        _, report = filled(where, "fp8-block")
    # A cast of gate and up: 4 copies in float32, and both in 16 bits before they are one matrix.
    largest = (4 * 4 + 2 * 2) * 512 * 128
    assert live.peak < report.code_bytes + report.wide_bytes + max(files) + largest < sum(files)
    assert largest < 2 * 16 * 512 * 128  # control: a stack in 16 bits would not fit in the bound


@pytest.mark.parametrize(("scales", "is_taken"), [(512.0, True), (500.0, False)])
def test_codes_of_a_block_fp8_mixture_are_taken_as_they_are(tmp_path, scales, is_taken):
    """As DeepSeek's and Qwen's FP8 folders: codes of gate and up become one matrix."""
    where = saved(tmp_path, mixture(), shard="1GB")
    [path] = coded_base.files_of(where)
    tensors = {}
    for name, each in load_file(path).items():
        if ".experts." in name:
            shape = [-(-size // 128) for size in each.shape]
            tensors[f"{name}_scale_inv"] = torch.full(shape, 1 / scales)
            each = (each.float() * scales).to(torch.float8_e4m3fn)
        tensors[name] = each
    save_file(tensors, path, metadata={"format": "pt"})
    model, report = filled(where, "fp8-block")
    assert (report.taken, report.recoded) == ((16, 0) if is_taken else (0, 16))
    gate, up = (tensors[f"model.layers.1.block_sparse_moe.experts.3.{each}.weight"] for each in ("w1", "w3"))  # fmt: skip
    layer = model.model.layers[1].mlp.experts.slices("gate_up_proj")[3]
    if is_taken:
        codes = layer.frozen.codes.view(torch.float8_e4m3fn)
        assert_same(codes, torch.cat([gate, up]))
        assert_same(
            layer.weight.detach().clone(), (torch.cat([gate, up]).float() / scales).bfloat16()
        )
    else:
        wide = torch.cat([gate, up]).float() / scales
        assert 0 < (layer.weight.float() - wide).norm() / wide.norm() < 2**-4


def test_what_no_file_holds_is_refused(tmp_path):
    where = saved(tmp_path, mixture(), shard="1GB")
    [path] = coded_base.files_of(where)
    whole, name = load_file(path), "model.layers.1.block_sparse_moe.experts.3.w3.weight"

    def put(**changes):
        kept = {key: each for key, each in whole.items() if key not in changes}
        kept |= {key: each for key, each in changes.items() if each is not None}
        save_file(kept, path, metadata={"format": "pt"})

    put(**{name: None})
    with raises(ConfigError, "model.missing-weights", name):
        filled(where, "fp8-block")
    put(**{name: whole[name][:-1].clone()})
    with raises(ConfigError, "model.shapes", "[256, 128]"):
        filled(where, "fp8-block")
    broken = whole[name].clone()
    broken[0, 0] = float("inf")
    put(**{name: broken})
    with raises(ConfigError, "weights.not-finite", name):
        filled(where, "fp8-block")
    put(**{each: None for each in whole if ".experts." in each})
    with raises(ConfigError, "model.missing-weights", "experts.down_proj"):
        filled(where, "fp8-block")


def mixed_files(where, seed):
    """Tensors of a folder, in other files and another order."""
    tensors = [
        item for path in coded_base.files_of(where) for item in load_file(path).items()
    ]  # fmt: skip
    random.Random(seed).shuffle(tensors)
    for path in Path(where).glob("model*"):
        path.unlink()
    parts = [dict(tensors[start::3]) for start in range(3)]
    names = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    for name, part in zip(names, parts, strict=True):
        save_file(part, Path(where) / name, metadata={"format": "pt"})
    index = {key: name for name, part in zip(names, parts, strict=True) for key in part}
    (Path(where) / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


@pytest.mark.parametrize("seed", range(3))
def test_the_order_of_tensors_and_files_does_not_matter(tmp_path, seed):
    where = saved(tmp_path, mixture())
    model, _ = filled(where, "nvfp4")
    mixed_files(where, seed)
    same_numbers(filled(where, "nvfp4")[0], model)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    where = saved(tmp_path, mixture())
    first, second, *_ = coded_base.files_of(where)
    twice = load_file(first)
    save_file(twice | load_file(second), second, metadata={"format": "pt"})
    with raises(ConfigError, "model.weights-twice", second.name):
        filled(where, "nvfp4")


@pytest.fixture(scope="module")
def base(text, tmp_path_factory):
    """A mixture with the tokenizer of a tiny run."""
    folder = tmp_path_factory.mktemp("mixture")
    config = tiny.settings(text, folder / "run", recipe="bf16", steps=1)
    assert loop.run(config) == 0
    final = Path(config.output) / "final"
    saved(folder / "base", mixture(vocab_size=300), shard="1GB")
    for each in final.glob("tokenizer*"):
        (folder / "base" / each.name).write_bytes(each.read_bytes())
    return folder / "base"


def test_adapters_are_trained_over_experts_in_codes_and_resumed(base, make):
    pytest.importorskip("peft")
    asked = {"model": str(base), "vocab_size": 4096, "lora": "r=4", "base": "nvfp4", "steps": 4}
    asked |= {"checkpoint_every": 2, "keep": 3, "learning_rate": 5e-3, "warmup_steps": 1}
    config = make("straight", **asked)
    assert training.run(config) == 0
    names = load_file(Path(config.output) / "final" / "adapter_model.safetensors")
    assert len(names) == 16 and not any("experts" in name for name in names)
    copied = Path(config.output).with_name("resumed")
    shutil.copytree(config.output, copied)
    shutil.rmtree(copied / "checkpoints" / "step-00000004")
    shutil.rmtree(copied / "final")
    assert training.run(replace(config, output=str(copied), resume=True)) == 0
    assert tiny.losses(copied) == tiny.losses(Path(config.output))
    for name, each in load_file(copied / "final" / "adapter_model.safetensors").items():
        assert_same(each, names[name])


@pytest.mark.parametrize("codes", quick(["nvfp4"], ["nvfp4", "fp8-block"]))
def test_a_plan_counts_the_experts_as_codes(base, make, monkeypatch, tmp_path, codes):
    """It has fake tensors, and the names of the files follow from real ones."""
    pytest.importorskip("peft")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "plans"))
    config = resolved(make(model=str(base), vocab_size=4096, lora="r=4", base=codes))
    found = command.answered(
        config, "", "", table=False, full=True, measure=False, tell=lambda *_: None
    )
    _, report = filled(str(base), codes)
    # Other weights are in float32 there, in 16 bits here; adapters of rank 4 beside 8 Linears.
    expected = report.code_bytes + 2 * report.wide_bytes + 4 * 8 * 2 * 4 * 128
    assert found["parts"]["weights"] == pytest.approx(expected, rel=0.01)


def test_targets_that_only_experts_have_are_refused(base, make):
    pytest.importorskip("peft")
    asked = {"model": str(base), "vocab_size": 4096, "base": "nvfp4", "steps": 1}
    with raises(ConfigError, "lora.targets", "down_proj"):
        loop.run(make(**asked, lora="r=4,targets=down_proj"))
