"""convert and describe: what is taken, what stays, and that a model keeps working as the module it was."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.errors import ConfigError
from narrowgauge.nn.linear import QLinear
from narrowgauge.recipe import Gemm
from tests.compare import assert_same
from tests.raising import raises
from tests.small_model import IDS, Model, recipe_names


def test_one_line_takes_every_linear_but_heads_and_routers() -> None:
    names = recipe_names(ng.convert(Model(), "fp8-current"))
    assert {name for name, recipe in names.items() if recipe == "none"} == {
        "lm_head", "layers.0.gate", "layers.1.gate", "layers.2.gate",
    }  # fmt: skip
    assert names["layers.1.up_proj"] == "fp8-current"


def test_later_patterns_win_and_letters_name_kept_layers() -> None:
    model = ng.convert(
        Model(), {"*": "fp8-row", "layers.0.*": "mxfp8", "down_proj": None, "lm_head": "bf16"}
    )
    names = recipe_names(model)
    assert names["layers.0.up_proj"] == "mxfp8"
    assert names["layers.1.up_proj"] == "fp8-row"
    assert names["layers.0.down_proj"] == "none"
    assert names["lm_head"] == "bf16"
    assert names["layers.0.gate"] == "none"


def test_converting_again_changes_only_what_is_named() -> None:
    model = ng.convert(ng.convert(Model(), "fp8-row"), {"layers.2.up_proj": "int8"})
    names = recipe_names(model)
    assert names["layers.2.up_proj"] == "int8"
    assert names["layers.1.up_proj"] == "fp8-row"


def test_pattern_without_a_match_names_the_closest() -> None:
    with raises(ConfigError, "pattern.no-match", "'layers.*.up'", "up_proj"):
        ng.convert(Model(), {"layers.*.up": "fp8-row"})


def test_failed_conversion_changes_nothing() -> None:
    model = Model()
    with raises(ConfigError, "recipes.unknown", "'fp8-curent'", "'fp8-current'"):
        ng.convert(model, {"*": "fp8-row", "lm_head": "fp8-curent"})
    assert not any(isinstance(module, QLinear) for module in model.modules())


def test_failed_choice_of_auto_changes_nothing() -> None:
    """Nor the layers that another pattern names: what is chosen is known before the first layer changes."""
    model = Model()
    with raises(ConfigError, "auto.tokens", "None"):
        ng.convert(model, {"*": "fp8-row", "layers.0.*": "auto"})
    assert not any(isinstance(module, QLinear) for module in model.modules())


def test_model_without_linears_is_an_error() -> None:
    with raises(ConfigError, "convert.no-linear", "nn.Linear"):
        ng.convert(nn.Sequential(nn.LayerNorm(4)), "fp8-row")


def test_model_whose_linears_are_all_kept_is_an_error_that_says_why() -> None:
    model = nn.ModuleDict({"lm_head": nn.Linear(32, 64), "small": nn.Linear(8, 8)})
    with raises(ConfigError, "convert.all-kept", "'lm_head'", "output head", "'small'", "--recipe"):
        ng.convert(model, "fp8-current")
    ng.convert(model, {"lm_head": "fp8-current"})


def test_head_is_found_by_what_the_model_says_not_by_its_name() -> None:
    from transformers import BertConfig, BertForMaskedLM

    sizes = BertConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
    )
    rows = {row.name: row for row in ng.describe(ng.convert(BertForMaskedLM(sizes), "fp8-current"))}
    assert rows["cls.predictions.decoder"].recipe == "none"
    assert rows["cls.predictions.decoder"].note == "output head"
    assert rows["bert.encoder.layer.0.intermediate.dense"].recipe == "fp8-current"


def test_bare_linear_can_be_converted() -> None:
    layer = nn.Linear(32, 32)
    assert ng.convert(layer, "fp8-current") is layer
    assert isinstance(layer, QLinear)


def test_identity_hooks_and_ties_survive() -> None:
    model = Model()
    layer, parameters = model.layers[0].up_proj, [id(parameter) for parameter in model.parameters()]
    calls: list[int] = []
    layer.register_forward_hook(lambda *_: calls.append(1))
    ng.convert(model, {"*": "fp8-current", "lm_head": "fp8-current"})
    assert model.layers[0].up_proj is layer
    assert [id(parameter) for parameter in model.parameters()] == parameters
    assert model.lm_head.weight is model.embed.weight
    model(IDS).sum().backward()
    assert calls == [1]
    assert model.embed.weight.grad is not None


def test_shared_module_is_converted_once_and_runs_in_both_places() -> None:
    shared = nn.Linear(32, 32)
    model = nn.Sequential(shared, nn.ReLU(), shared)
    ng.convert(model, "fp8-delayed")
    assert model[0] is model[2]
    model(torch.randn(4, 32)).sum().backward()
    assert len(ng.describe(model)) == 1


def test_none_gives_the_ordinary_model_back() -> None:
    model, truth = ng.convert(Model(), "fp8-delayed"), Model()
    ng.convert(model, None)
    assert not any(isinstance(module, QLinear) for module in model.modules())
    assert_same(dict(model.state_dict()), dict(truth.state_dict()))
    assert_same(model(IDS), truth(IDS))
    assert str(model) == str(truth)


def test_suspended_computes_as_before_and_comes_back() -> None:
    model, truth = ng.convert(Model(), "fp8-current"), Model()
    narrow = model(IDS)
    with ng.suspended(model):
        assert_same(model(IDS), truth(IDS))
        assert "suspended" in ng.describe(model)[0].note
    assert_same(model(IDS), narrow)
    assert not torch.equal(narrow, truth(IDS))


def test_suspended_restores_after_an_error() -> None:
    model = ng.convert(Model(), "fp8-current")
    with pytest.raises(KeyError), ng.suspended(model):
        raise KeyError
    assert not model.layers[0].up_proj.is_suspended


def test_one_product_can_be_put_back_to_16_bits() -> None:
    model = ng.convert(Model(), ng.recipes.FP8_CURRENT.with_gemm(grad_weight=Gemm()))
    row = next(row for row in ng.describe(model) if row.name == "layers.0.up_proj")
    assert row.grad_weight == "16-bit"
    assert row.recipe == "fp8-current+grad_weight:16-bit"
    model(IDS).sum().backward()


def test_state_dict_travels_between_converted_models() -> None:
    first = ng.convert(Model(), "fp8-delayed")
    first(IDS).sum().backward()
    ng.advance(first)
    second = ng.convert(Model(), "fp8-delayed")
    assert second.load_state_dict(first.state_dict())
    assert_same(second(IDS), first(IDS))
    plain = {name: value for name, value in first.state_dict().items() if ".scaling." not in name}
    assert set(plain) == set(Model().state_dict())


def test_deepcopy_is_independent() -> None:
    model = ng.convert(Model(), "fp8-delayed")
    twin = copy.deepcopy(model)
    model(IDS).sum().backward()
    ng.advance(model)
    window = twin.layers[0].up_proj.scaling["x"]
    assert not window.history.any()


def test_training_by_any_optimizer_follows_the_weights() -> None:
    """Weights written through .data keep their version counter; `advance` alone must be enough."""
    model = ng.convert(Model(), "fp8-current")
    for _ in range(2):
        model.zero_grad()
        model(IDS).square().mean().backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.data.sub_(parameter.grad, alpha=0.5)
        ng.advance(model)
        fresh = ng.convert(Model(), "fp8-current")
        fresh.load_state_dict(model.state_dict())
        assert_same(model(IDS), fresh(IDS))


def test_layer_parametrized_after_conversion_can_be_turned_back() -> None:
    """torch gave it a class of its own, whose weight is a property: it stays, without a recipe."""
    model = nn.Sequential(nn.Linear(32, 32))
    ng.convert(model, "fp8-current")
    nn.utils.parametrizations.weight_norm(model[0])
    ng.convert(model, None)
    x = torch.randn(4, 32)
    assert_same(model(x), nn.functional.linear(x, model[0].weight, model[0].bias))


@pytest.mark.parametrize("recipe", [5, {"*": 5}, {3: "fp8-row"}, {}], ids=str)
def test_wrong_types_change_nothing(recipe: object) -> None:
    model = nn.Sequential(nn.Linear(32, 32))
    with pytest.raises(ConfigError, match="convert: "):
        ng.convert(model, recipe)  # type: ignore[arg-type]
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize(
    ("verb", "call"),
    [
        ("convert", lambda model: ng.convert(model, "fp8-current")),
        ("convert", lambda model: ng.convert(model, None)),
        ("describe", ng.describe),
        ("advance", ng.advance),
        ("suspended", lambda model: ng.suspended(model).__enter__()),
        ("switch", lambda model: ng.switch(model, "bf16")),
        ("groups", ng.optim.groups),
        ("freeze", lambda model: ng.memory.freeze(model, "0")),
        ("train_only", lambda model: ng.memory.train_only(model, "0")),
        ("checkpoint", lambda model: ng.memory.checkpoint(model, "full")),
        ("compress_activations", ng.memory.compress_activations),
        ("offload", ng.memory.offload),
        ("blocks", ng.memory.find_blocks),
    ],
)
def test_what_is_no_model_is_refused_in_words(verb, call):
    with raises(ConfigError, "convert.not-a-module", verb):
        call("fp8-current")


def test_a_layer_with_two_names_is_found_by_either() -> None:
    shared = nn.Linear(32, 32)
    model = ng.convert(nn.ModuleDict({"first": shared, "second": shared}), {"second": "int8"})
    assert model["first"].recipe is model["second"].recipe and model["first"].recipe.name == "int8"


def test_a_layer_that_was_parametrized_before_says_what_to_do() -> None:
    layer = nn.utils.parametrizations.weight_norm(nn.Linear(32, 32))
    with raises(ConfigError, "convert.all-kept"):
        ng.convert(nn.Sequential(layer), "int8")


def test_one_linear_under_two_names_takes_one_recipe():
    """The last pattern won, without a word. One that names it by all its names, or again by the same, still decides."""
    shared = nn.Linear(32, 32)
    model = nn.ModuleDict({"a": shared, "b": shared})
    with raises(ConfigError, "convert.tied-conflict", "'a'", "'b'", "bf16", "fp8-row"):
        ng.convert(model, {"a": "bf16", "b": "fp8-row"})
    assert type(shared) is nn.Linear
    for patterns in (
        {"a": "bf16", "b": "bf16"},
        {"*": "fp8-row", "b": "bf16"},
        {"a": "int8", "b": "fp8-row", "*": "bf16"},
    ):
        assert ng.convert(model, patterns)["a"].recipe.name == "bf16"


def test_an_unknown_save_leaves_the_model_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.Linear(64, 64))
    with raises(ConfigError, "fuse.save"):
        ng.convert(model, "fp8-row", fuse=True, save="bogus")
    assert type(model[0]) is nn.Linear


def test_layers_turned_back_while_suspended_leave_the_others_as_they_were() -> None:
    model = ng.convert(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), "nvfp4")
    with ng.suspended(model):
        ng.convert(model[0], None)
    assert type(model[0]) is nn.Linear and not model[1].is_suspended
