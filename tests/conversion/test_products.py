"""Recipes for some products of a layer, by pattern (exact)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge import recipes
from narrowgauge.conversion.products import PRODUCTS
from narrowgauge.errors import ConfigError
from narrowgauge.recipe import Gemm
from narrowgauge.train.config import recipe_syntax
from tests.compare import assert_same
from tests.raising import coded, raises
from tests.small_model import IDS, Model, recipe_names


def layer(name: str, *patterns: object) -> ng.QLinear:
    model = ng.convert(Model(), *patterns)
    found = model.get_submodule(name)
    assert isinstance(found, ng.QLinear)
    return found


def test_one_product_has_another_recipe_and_the_others_stay():
    recipe = layer(
        "layers.1.down_proj", {"*": "fp8-current", "layers.1.down_proj": "bf16:grad_weight"}
    ).recipe
    assert recipe.grad_weight == Gemm()
    assert (
        recipe.output == recipes.FP8_CURRENT.output
        and recipe.grad_input == recipes.FP8_CURRENT.grad_input
    )
    assert recipe.name == "fp8-current+bf16:grad_weight"


def test_its_gradient_is_that_of_bfloat16_and_the_others_that_of_the_recipe():
    def gradients(patterns):
        torch.manual_seed(0)
        net = ng.convert(nn.Sequential(nn.Linear(32, 48)), patterns)
        x = torch.randn(64, 32, requires_grad=True)
        y = net(x)
        y.square().mean().backward()
        return y, x.grad, net[0].weight.grad

    narrow, mixed = gradients("mxfp8"), gradients({"*": "mxfp8", "0": "bf16:grad_weight"})
    for a, b in zip(narrow[:2], mixed[:2], strict=True):
        assert_same(a, b)
    assert not torch.equal(narrow[2], mixed[2])


def test_several_parts_follow_one_another_and_a_whole_recipe_ends_them():
    patterns = {
        "*": "bf16:output",
        "layers.*": "fp8-row",
        "layers.0.*": "bf16:backward",
        "layers.0.up_proj": "int8:output",
    }
    model = ng.convert(Model(), {"*": "fp8-current", **patterns})
    names = recipe_names(model)
    assert names["layers.1.up_proj"] == "fp8-row"
    assert names["layers.0.down_proj"] == "fp8-row+bf16:grad_input,grad_weight"
    assert model.layers[0].up_proj.recipe.output == recipes.INT8_ROW.output


def test_a_part_alone_goes_to_what_the_layer_has():
    model = ng.convert(Model(), "fp8-current")
    ng.convert(model, {"layers.1.down_proj": "bf16:output+grad_weight"})
    assert model.layers[1].down_proj.recipe.gemms()["grad_input"] == recipes.FP8_CURRENT.grad_input
    assert (
        model.layers[1].down_proj.recipe.output
        == model.layers[1].down_proj.recipe.grad_weight
        == Gemm()
    )
    assert model.layers[0].down_proj.recipe is recipes.FP8_CURRENT


@pytest.mark.parametrize(
    ("patterns", "words"),
    [
        ({"layers.1.down_proj": "bf16:grad_weight"}, coded("products.no-base")),
        (
            {"*": "fp8-current", "layers.0.*": "bf16:gradweight"},
            coded("products.unknown", "'grad_weight'"),
        ),
        ({"*": "fp8-current", "layers.0.*": "bf61:output"}, coded("recipes.unknown", "'bf61'")),
        (
            {"*": "int4-hq-bs", "layers.0.*": "int8:grad_weight"},
            coded("products.mixed", "grad_weight", "'int8'"),
        ),
    ],
)
def test_what_cannot_be_is_refused(patterns, words):
    with raises(ConfigError, words):
        ng.convert(Model(), patterns)


def test_a_model_with_such_recipes_trains():
    model = ng.convert(Model(), {"*": "fp8-delayed", "layers.0-1.*": "bf16:grad_weight"})
    model(IDS).square().mean().backward()
    ng.advance(model)
    assert all(
        each.grad is not None and each.grad.isfinite().all() for each in model.layers.parameters()
    )


def test_settings_and_convert_know_the_same_products():
    assert recipe_syntax.PRODUCTS == PRODUCTS
