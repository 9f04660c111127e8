"""Freezing (exact): what trains, what is refused, where backward stops, what is not kept."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.errors import ConfigError
from narrowgauge.memory import freeze, saved_bytes, train_only
from tests.memory.models import batch, llama, step
from tests.raising import coded, raises


def trainable(model):
    return [name for name, parameter in model.named_parameters() if parameter.requires_grad]


def test_patterns_name_modules_and_parameters():
    model = llama()
    report = freeze(model, "embed*,layers.0-1, layers.2.mlp,layers.3.self_attn.q_proj.weight")
    frozen = {name for name, _ in model.named_parameters()} - set(trainable(model))
    prefixes = ("model.embed_tokens", "model.layers.0.", "model.layers.1.", "model.layers.2.mlp.")
    expected = {name for name, _ in model.named_parameters() if name.startswith(prefixes)}
    assert frozen == expected | {"model.layers.3.self_attn.q_proj.weight"}
    assert report.trainable == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert report.gradient_bytes_saved == 4 * (report.parameters - report.trainable)
    assert report.optimizer_bytes_saved == 8 * (report.parameters - report.trainable)
    saved = report.optimizer_bytes_saved / 2**20
    assert f"{report.trainable:,} of {report.parameters:,} parameters" in str(report)
    assert f"and {saved:.3g} MiB" in str(report)


@pytest.mark.parametrize(
    ("dtype", "options"),
    [
        (torch.float32, {"states": "fp32"}),
        (torch.float32, {"states": "8bit"}),
        (torch.float32, {"states": "4bit", "embeddings": "same"}),
        (torch.bfloat16, {"states": "fp8", "master": "bf16-remainder"}),
    ],
    ids=str,
)
def test_saved_states_are_those_that_the_optimizer_would_keep(dtype, options):
    """Exact: what it keeps for all parameters less what it keeps for those that train."""
    model = llama(hidden_size=128, intermediate_size=160).to(
        dtype
    )  # matrices large enough for narrow states
    whole = ng.optim.state_bytes(ng.optim.AdamW(model, **options))
    report = freeze(model, "embed*,layers.0-2", optimizer_bytes=whole.of)
    rest = ng.optim.state_bytes(ng.optim.AdamW(model, **options))
    assert report.optimizer_bytes_saved == whole.total - rest.total > 0
    with raises(ConfigError, "state-bytes.parameter"):
        freeze(model, "layers.3.mlp", optimizer_bytes=rest.of)
    assert model.model.layers[
        3
    ].mlp.up_proj.weight.requires_grad  # refused before anything is changed


def test_integer_parameters_have_no_state_to_save():
    model = llama()
    model.table = nn.Parameter(torch.zeros(1000, dtype=torch.int64), requires_grad=False)
    report = freeze(model, "layers.0")
    assert (
        report.optimizer_bytes_saved == 2 * report.gradient_bytes_saved
    )  # float32 gradients, and two moments


def test_freezing_adds_up_and_train_only_decides_all():
    model = llama()
    freeze(model, "embed*")
    freeze(model, ["layers.0"])
    assert trainable(model)[0] == "model.layers.1.self_attn.q_proj.weight"
    train_only(model, "layers.0,lm_head")
    assert {name.split(".")[0] + "." + name.split(".")[-2] for name in trainable(model)} >= {
        "lm_head.lm_head"
    }
    assert all(name.startswith(("model.layers.0.", "lm_head")) for name in trainable(model))


@pytest.mark.parametrize("verb", [freeze, train_only])
@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        ("embd*", coded("pattern.no-match", "'embd*'", "'embed_tokens'")),
        ("layers.0-9", coded("pattern.no-match", "' of pattern '", "0-9")),
        ("lm_head,layers.17", coded("pattern.no-match", "17")),
        (" , ", coded("pattern.none")),
    ],
)
def test_a_pattern_without_a_match_changes_nothing(verb, patterns, words):
    model = llama()
    with raises(ConfigError, words):
        verb(model, patterns)
    assert len(trainable(model)) == len(list(model.parameters()))


def test_nothing_left_to_train_is_an_error():
    model = llama()
    freeze(model, "layers.*")
    with raises(ConfigError, "freeze.nothing-left", "LlamaForCausalLM"):
        freeze(model, "embed*,norm,lm_head")
    assert "lm_head.weight" in trainable(model)


def test_tied_weights_are_told():
    model = llama(tie_word_embeddings=True)
    report = freeze(model, "embed_tokens")
    assert not model.lm_head.weight.requires_grad
    assert report.tied == (("model.embed_tokens.weight", "lm_head.weight"),)
    assert "together: model.embed_tokens.weight and lm_head.weight" in str(report)
    assert freeze(model, "layers.0").tied == ()


@pytest.mark.parametrize("recipe", ["int4-hq-lss", "int4-lsq-luq"])
def test_the_order_of_freezing_and_converting_does_not_matter(recipe):
    """Learned steps are parameters of the layer: those of a frozen one are frozen, or backward would go down to it."""
    before, after = llama(), llama()
    freeze(before, "embed*,layers.0-1")
    ng.convert(before, recipe)
    ng.convert(after, recipe)
    freeze(after, "embed*,layers.0-1")
    assert trainable(before) == trainable(after)
    assert any(".steps." in name for name in trainable(before))
    assert saved_bytes(before, batch()).total == saved_bytes(after, batch()).total
    before.get_submodule("model.layers.1.mlp.up_proj").recipe = recipe
    assert trainable(before) == trainable(after)


@pytest.mark.parametrize("recipe", [None, "fp8-current", "fp8-delayed", "fp8-row"])
def test_frozen_lower_layers_keep_nothing(recipe):
    model = llama()
    if recipe:
        ng.convert(model, recipe, weight_codes="recast")  # those of weights are no activations
    freeze(model, "embed*,layers.0-1")
    saved = saved_bytes(model, {**batch(), "use_cache": False})
    assert (
        saved.below("model.layers.0")
        == saved.below("model.layers.1")
        == saved.below("model.embed_tokens")
        == 0
    )
    assert saved.below("model.layers.2") > 0
    _, gradients = step(model)
    assert {name for name, gradient in gradients.items() if gradient is not None} == set(
        trainable(model)
    )


@pytest.mark.parametrize("save", ["original", "quantized"])
def test_a_frozen_linear_in_the_middle_keeps_no_input(save):
    from dataclasses import replace

    recipe = replace(ng.recipes.get("fp8-row"), save=save)
    layers = [ng.QLinear(32, 32, bias=False, recipe=recipe) for _ in range(3)]
    model = nn.Sequential(*layers)
    for layer in layers:
        layer.weight_codes = "recast"  # those of weights are no activations
    x = torch.randn(64, 32)
    whole = saved_bytes(model, x)
    freeze(model, "1")
    frozen = saved_bytes(model, x)
    assert whole.below("1") > 0 and frozen.below("1") == 0
    assert frozen.below("2") == whole.below("2") > 0
    model(x).sum().backward()
    assert layers[0].weight.grad is not None and layers[1].weight.grad is None
