"""Which product is suspect, why, and which line ends it (exact, but for the shares of gradients)."""

from __future__ import annotations

import json

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge import recipes
from narrowgauge.conversion.products import parse
from narrowgauge.errors import ConfigError
from narrowgauge.formats import E2M1, INT4
from narrowgauge.lab.blame import Blame, blame
from narrowgauge.lab.blame.confirm import in_16_bits
from narrowgauge.recipe import GEMMS, Cast
from tests.lab.blame.planted import IDS, compute, converted, dropping, recast, train
from tests.raising import raises, require
from tests.selection import quick


@pytest.mark.parametrize("recipe", quick(["fp8-delayed", "int8"], recipes.names()))
@pytest.mark.parametrize("steps", quick([0], [0, 20]))
def test_a_healthy_model_has_no_suspect(recipe, steps):
    model = converted(recipe)
    train(model, steps)
    found = blame(model, compute(model))
    assert not found.suspects and found.setting == "", found
    assert found.sentences()[0].startswith("No product is suspect among 18 products of 6 layers")


@pytest.mark.parametrize("product", GEMMS)
@pytest.mark.parametrize(
    ("side", "format"),
    quick([("lhs", E2M1)], [(side, each) for side in ("lhs", "rhs") for each in (E2M1, INT4)]),
)
def test_an_operand_of_too_few_bits_is_found_and_named(product, side, format):
    model = converted()
    recast(model.layers[1].down_proj, product, side, Cast(format=format))
    healthy = converted()
    for baseline in (None, blame(healthy, compute(healthy))):
        found = blame(model, compute(model), baseline=baseline, confirm=0)
        [suspect] = found.suspects
        assert suspect is found.findings[0] and suspect.name == f"layers.1.down_proj:{product}"
        assert suspect.worse is getattr(suspect, side) and suspect.worse.format.startswith(
            format.name
        )
        assert found.setting == f'recipe.layers = ["layers.1.down_proj=bf16:{product}"]'
        assert found.sentences()[-1] == found.setting
        assert f"{suspect.worse.role} as {format.name}" in found.sentences()[1]


@pytest.mark.parametrize(("factor", "words"), [(1 / 16, "saturates"), (2.0**17, "becomes zero")])
def test_a_window_that_lags_is_found_with_its_reason(factor, words):
    model = converted("fp8-delayed")
    train(model, 3)
    healthy = blame(model, compute(model))
    window = model.layers[2].up_proj.amax_history("w")
    window.history *= factor
    window.live[0] *= factor
    for baseline in (None, healthy):
        found = blame(model, compute(model), baseline=baseline, confirm=0)
        assert {each.name for each in found.suspects} == {
            f"layers.2.up_proj:{each}" for each in ("output", "grad_input")
        }
        require(found.suspects[0].reason, "amax-history", words)


def test_a_gradient_that_passes_its_window_a_little_is_no_suspect():
    model = converted("fp8-delayed")
    train(model, 3)
    for factor, suspects in ((1 / 3.5, 0), (1 / 4.5, 2)):
        window = model.layers[0].up_proj.amax_history("gy")
        compute(model)()
        present = float(window.live[1])
        window.live[0] = present * factor
        found = blame(model, compute(model), confirm=0)
        assert len(found.suspects) == suspects, found


@pytest.mark.parametrize("product", GEMMS)
def test_a_kernel_that_drops_columns_is_the_kernel(product):
    model = converted()
    with dropping(model.layers[0].up_proj, product):
        found = blame(model, compute(model), confirm=0)
    [suspect] = found.suspects
    assert suspect.name == f"layers.0.up_proj:{product}" and suspect.is_kernel
    assert suspect.reason.code == "kernel"
    assert not blame(model, compute(model)).suspects


def test_numbers_that_are_not_finite_come_first():
    model = converted()
    recast(model.layers[1].down_proj, "output", "lhs", Cast(format=E2M1))
    model.layers[2].up_proj.weight.data[3, 5] = float("inf")
    found = blame(model, compute(model), confirm=0)
    assert not found.findings[0].is_finite and found.findings[0].reason.code == "not-finite"
    assert json.dumps(found.as_dict()["suspects"])


def test_confirmed_by_what_the_gradient_gains():
    model = converted()
    recast(model.layers[1].down_proj, "grad_input", "lhs", Cast(format=INT4))
    found = blame(model, compute(model))
    [confirmation] = found.confirmations
    assert confirmation.products == ("layers.1.down_proj:grad_input",)
    assert confirmation.hurts and confirmation.numbers["share"] > 0.2
    assert "confirmed" in "\n".join(found.sentences())


def test_what_the_gradient_does_not_show_is_not_known():
    """A layer that adds next to nothing: its error reaches no gradient."""
    model = converted()
    model.layers[2].down_proj.weight.data *= 1e-4
    recast(model.layers[2].down_proj, "output", "rhs", Cast(format=E2M1))
    found = blame(model, compute(model))
    [confirmation] = found.confirmations
    assert confirmation.hurts is None and confirmation.numbers["share"] < 0.1
    assert any(confirmation.words in line for line in found.sentences())


@pytest.mark.parametrize("recipe", quick(["int4-hq-lss"], recipes.names()))
def test_every_product_of_every_recipe_can_be_had_in_16_bits(recipe):
    model = converted(recipe)
    layer = model.layers[1].down_proj
    before = layer.recipe
    findings = blame(model, compute(model), confirm=0).findings
    own = [each for each in findings if each.layer == "layers.1.down_proj"]
    for each in own:
        with in_16_bits(model, [each]):
            assert getattr(layer.recipe, each.product) == recipes.BF16.output
        [entry] = Blame((each,)).recipes or [f"{each.layer}=bf16:{each.product}"]
        name, _, value = entry.partition("=")
        assert (
            getattr(
                ng.convert(converted(recipe), {name: parse(value)}).layers[1].down_proj.recipe,
                each.product,
            ).lhs
            is None
        )
    assert layer.recipe is before


def test_json_gives_the_same_back():
    model = converted("fp8-delayed")
    recast(model.layers[1].down_proj, "output", "lhs", Cast(format=E2M1))
    found = blame(model, compute(model))
    again = Blame.from_dict(json.loads(json.dumps(found.as_dict())))
    assert again == found and str(again) == str(found)


def test_frozen_layers_have_the_products_that_they_compute():
    model = converted()
    for parameter in model.layers[0].parameters():
        parameter.requires_grad_(False)
    ng.memory.freeze(model, "layers.1.up_proj", codes=True)
    found = blame(model, compute(model))
    for layer in ("layers.0.up_proj", "layers.1.up_proj"):
        assert {each.product for each in found.findings if each.layer == layer} == {
            "output",
            "grad_input",
        }
    assert not found.suspects


def test_a_batch_of_keyword_arguments_is_a_step():
    class WithLoss(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = converted()

        def forward(self, ids, factor):
            return {"loss": None}, self.inner(ids).square().mean() * factor

    class Plain(WithLoss):
        def forward(self, ids):
            return self.inner(ids).square().mean()

    assert len(blame(Plain(), {"ids": IDS}).findings) == 18
    with raises(ConfigError, "blame.no-loss"):
        blame(WithLoss(), {"ids": IDS, "factor": 1})


def test_what_cannot_be_observed_is_refused():
    plain = nn.Linear(32, 32)
    with raises(ConfigError, "blame.not-converted"):
        blame(plain, lambda: None)
    model = converted()
    with raises(ConfigError, "blame.compiled"):
        blame(model, lambda: None)
    with raises(ConfigError, "convert.not-a-module"):
        blame("model", lambda: None)
    with ng.suspended(model), raises(ConfigError, "blame.not-converted"):
        blame(model, compute(model))
    parameter = model.layers[0].up_proj.weight
    handle = parameter.register_post_accumulate_grad_hook(lambda each: None)
    with raises(ConfigError, "blame.step-in-backward", "'layers.0.up_proj.weight'"):
        blame(model, compute(model))
    handle.remove()


def test_few_products_of_a_kind_and_a_missing_backward_pass_are_said():
    net = ng.convert(nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32)), "fp8-current")
    found = blame(net, lambda: net(torch.randn(16, 32)))
    assert [note.code for note in found.notes] == ["blame.too-few", "blame.no-gradient"]
