"""What keeps float32 in a 16-bit model (exact): one rounding, types that readers find, the list and its refusals."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch import nn

import narrowgauge as ng
from narrowgauge.errors import ConfigError
from narrowgauge.fuse import fusions, unfuse
from narrowgauge.nn.float32_modules import (
    EMBEDDINGS,
    NORMS,
    Float32Forward,
    kept_modules,
    summary,
    to_16_bits,
)
from narrowgauge.ops.norm_act import Kind, value
from tests.compare import assert_same
from tests.raising import raises

SIZES = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
T5 = {
    "vocab_size": 64,
    "d_model": 32,
    "d_kv": 16,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 2,
    "decoder_start_token_id": 0,
}
GPT2 = {
    "vocab_size": 64,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 16,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES)),
    "gemma2": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(**SIZES, head_dim=16)
    ),
    "gpt2": lambda: transformers.GPT2LMHeadModel(transformers.GPT2Config(**GPT2)),
    "bert": lambda: transformers.BertForMaskedLM(transformers.BertConfig(**SIZES)),
    "t5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5)),
}


def inputs_of_linears(model: nn.Module) -> set[torch.dtype]:
    """The types that Linears, Conv1Ds too, read in a forward and a backward pass."""
    seen: set[torch.dtype] = set()
    hooks = [
        module.register_forward_pre_hook(lambda _, given: seen.add(given[0].dtype))
        for module in model.modules()
        if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"
    ]
    ids = torch.arange(8)[None]
    model(input_ids=ids, labels=ids).loss.backward()
    for hook in hooks:
        hook.remove()
    return seen


@pytest.mark.parametrize("name", MODELS)
def test_norms_keep_float32_and_hand_over_bfloat16(name):
    torch.manual_seed(0)
    model = MODELS[name]()
    kept = to_16_bits(model, torch.bfloat16, [NORMS])
    assert set(kept) == {
        path for path, module in model.named_modules() if "norm" in type(module).__name__.lower()
    }
    assert inputs_of_linears(model) == {torch.bfloat16}
    for path, parameter in model.named_parameters():
        wide = path.rpartition(".")[0] in kept
        assert parameter.dtype == (torch.float32 if wide else torch.bfloat16), path
        assert parameter.grad is None or parameter.grad.dtype == parameter.dtype, path


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_norm_is_rounded_once(name, fused):
    """Against the float32 model's own norm, of what bfloat16 inputs it reads; fused, where no kernel runs, as well."""
    torch.manual_seed(0)
    wide = MODELS[name]()
    with torch.no_grad():
        for parameter in wide.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    model = copy.deepcopy(wide)
    kept = to_16_bits(model, torch.bfloat16, [NORMS])
    ng.convert(model, "fp8-current", fuse=fused)
    assert fused == any(
        not each.reason and each.function.endswith("norm") for each in fusions(model)
    )
    assert set(kept_modules(model)) == set(kept)
    x = torch.randn(3, 32).to(torch.bfloat16)
    for path in kept:
        assert_same(
            model.get_submodule(path)(x), wide.get_submodule(path)(x.float()).to(torch.bfloat16)
        )
    if fused:
        assert inputs_of_linears(model) == {torch.bfloat16}
        unfuse(model)
        assert all(
            isinstance(module.__dict__["forward"], Float32Forward)
            for module in kept_modules(model).values()
        )


def test_the_definition_of_a_wide_norm_rounds_once():
    """The kernels' definition beside the module: rms-norm of bfloat16 by float32 weights."""
    torch.manual_seed(0)
    x, weight = torch.randn(5, 48).to(torch.bfloat16), torch.randn(48)
    wide = x.float()
    exact = (weight * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-6)).to(
        torch.bfloat16
    )
    found = value(Kind("rms-norm", 1e-6, wide=True), (x, weight))
    assert_same(found, exact)
    assert value(Kind("rms-norm", 1e-6), (x, weight)).dtype == torch.float32  # as autocast's norms


def test_tied_weights_are_kept_in_all_who_hold_them():
    model = MODELS["gpt2"]()
    kept = to_16_bits(model, torch.bfloat16, [EMBEDDINGS])
    assert set(kept) == {"transformer.wte", "transformer.wpe", "lm_head"}
    assert (
        model.lm_head.weight is model.transformer.wte.weight
        and model.lm_head.weight.dtype == torch.float32
    )
    assert model(input_ids=torch.arange(8)[None]).logits.dtype == torch.bfloat16


def test_a_pattern_names_modules_and_what_is_below_them():
    model = MODELS["llama"]()
    kept = to_16_bits(model, torch.bfloat16, ["layers.1.mlp", "lm_head", NORMS])
    assert {path for path in kept if "norm" not in path} == {
        "lm_head", *(f"model.layers.1.mlp.{each}_proj" for each in ("gate", "up", "down"))
    }  # fmt: skip
    ng.convert(model, "fp8-current")
    assert inputs_of_linears(model) == {torch.bfloat16}
    text = " ".join(str(ng.describe(model)).split())
    assert f"float32: {summary(kept_modules(model))}" in text
    assert "model.layers.*.input_layernorm (2)" in summary(kept)


def test_a_pattern_that_names_nothing_is_refused_with_the_closest():
    model = MODELS["llama"]()
    with raises(ConfigError, "pattern.no-match", "gate_proj"):
        to_16_bits(model, torch.bfloat16, ["layers.0.mlp.gate"])
    with raises(ConfigError, "pattern.no-match", "'norms'"):
        to_16_bits(model, torch.bfloat16, ["norm_s"])
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}, "changed"
