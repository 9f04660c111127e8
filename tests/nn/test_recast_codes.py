"""backward="recast-codes": backward casts the decoded x and w of the forward pass (exact)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import narrowgauge as ng
from narrowgauge import recipes
from narrowgauge.errors import ConfigError
from narrowgauge.memory import freeze
from narrowgauge.nn.frozen import cast_weight
from narrowgauge.nn.linear import QLinear
from narrowgauge.ops.hadamard import unrotate
from narrowgauge.ops.quantize import dequantize, quantize
from narrowgauge.recipe import DelayedScaling, Gemm, Hadamard, Recipe
from tests.compare import assert_same
from tests.raising import raises

RECIPES = [recipe for recipe in recipes.ALL if recipe.backward == "recast-codes"]
SHAPES = [(48, 64, 32), (33, 130, 70), (1, 16, 16)]  # tokens, in_features, out_features
every_recipe = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)


def layer_of(recipe: Recipe, k: int, n: int) -> QLinear:
    torch.manual_seed(1)
    return QLinear(k, n, recipe=recipe)


def gradients(layer: QLinear, x: Tensor, gy: Tensor) -> dict[str, Tensor]:
    x = x.detach().clone().requires_grad_()
    layer.zero_grad()
    torch.manual_seed(11)  # of the signs and the noise
    layer(x).backward(gy)
    found = {"x": x.grad, "w": layer.weight.grad}
    return {name: each for name, each in found.items() if each is not None}


def decoded(x: Tensor, recipe: Recipe, layer: QLinear) -> Tensor:
    """x as `output` read it, in its own basis."""
    rotate = recipe.output.rotate
    turned = x if rotate is None else ng.ops.hadamard.rotate(x, rotate)
    made = dequantize(quantize(turned, recipe.output.lhs))  # type: ignore[arg-type]
    return made if rotate is None else unrotate(made, rotate, x.shape[1])


@every_recipe
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_gradients_are_those_of_the_decoded_operands(recipe: Recipe, shape) -> None:
    """A recast recipe that is given the decoded x and w has the same ones."""
    tokens, k, n = shape
    layer = layer_of(recipe, k, n)
    x, gy = torch.randn(tokens, k), torch.randn(tokens, n)
    other = layer_of(replace(recipe, backward="recast"), k, n)
    with torch.no_grad():
        other.weight.copy_(decoded(layer.weight, recipe, layer))
    assert_same(gradients(layer, x, gy), gradients(other, decoded(x, recipe, layer), gy))


@every_recipe
def test_of_x_the_packed_codes_are_saved(recipe: Recipe) -> None:
    """Half a byte per element, and a byte for each scale of e4m3."""
    layer, saved = layer_of(recipe, 128, 64), []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        layer(torch.randn(256, 128, requires_grad=True))
    sizes = [each.nbytes for each in saved if each is not layer.weight and each.numel() != 64 * 128]
    scales = 256 * 128 // 16 if recipe.output.lhs.scale.two_level else 4  # type: ignore[union-attr]
    assert sum(sizes) <= 256 * 64 + scales + 4


@every_recipe
def test_a_second_micro_batch_and_a_checkpoint_have_the_same_bits(recipe: Recipe) -> None:
    """With the casts of the step cached, and with a forward pass that is repeated."""
    layer = layer_of(recipe, 64, 32)
    x, gy = torch.randn(40, 64), torch.randn(40, 32)
    first = gradients(layer, x, gy)
    ng.advance(layer)
    for _ in range(2):
        assert_same(gradients(layer, x, gy), first)
    given = x.clone().requires_grad_()
    layer.zero_grad()
    torch.manual_seed(11)
    checkpoint(layer, given, use_reentrant=False).backward(gy)
    assert_same({"x": given.grad, "w": layer.weight.grad}, first)


@every_recipe
def test_a_frozen_weight_gives_the_same_gradient(recipe: Recipe) -> None:
    """Its codes decode to what backward casts again; no second rounding in between."""
    layer = layer_of(recipe, 64, 32)
    layer.weight.requires_grad_(False)
    x, gy = torch.randn(40, 64), torch.randn(40, 32)
    before = gradients(layer, x, gy)
    codes = cast_weight(layer, layer.weight)
    model = nn.Sequential(layer)
    freeze(model, "0.weight", codes=True)
    assert layer.frozen is not None
    assert_same(gradients(layer, x, gy), before)
    assert_same(dequantize(layer.frozen.quantized), dequantize(codes))


def test_layers_that_share_an_input_save_its_codes_once() -> None:
    model = nn.Module()
    model.q, model.k = nn.Linear(64, 32), nn.Linear(64, 32)
    model.forward = lambda x: model.q(x) + model.k(x)  # type: ignore[method-assign]
    ng.convert(model, recipes.QUARTET2)
    x, addresses = torch.randn(48, 64, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: addresses.append(tensor.data_ptr()) or tensor, lambda tensor: tensor
    ):
        model.forward(x).sum().backward()
    shared = [each for each in set(addresses) if addresses.count(each) == 2]
    assert len(shared) == 3, addresses  # codes, scales, and the scale of the tensor


def mean_error(recipe: Recipe, x: Tensor, gy: Tensor, draws: int) -> float:
    """Squared error of the mean gradient of w over what an unbiased mean of so many draws has.

    Beside the gradient of the decoded x. 1: unbiased.
    """
    layer = layer_of(recipe, x.shape[1], gy.shape[1])
    total, squares = torch.zeros(gy.shape[1], x.shape[1], dtype=torch.float64), 0.0
    exact = gy.double().T @ decoded(x, recipe, layer).double()
    for _ in range(draws):
        layer.zero_grad()
        layer(x).backward(gy)
        assert layer.weight.grad is not None
        found = layer.weight.grad.double()
        squares += float((found - exact).square().sum())
        total += found
    return float((total / draws - exact).square().sum()) * draws / (squares / draws)


def test_tetrajet2_has_no_bias_where_eden_has_one() -> None:
    """One element in ten is not zero (statistical).

    With 400 draws tetrajet2 had 0.87 to 1.08 over four seeds, quartet2 22 to 43. The deviation of an
    unbiased one between seeds is about 0.09 for any number of draws.
    """
    torch.manual_seed(3)
    x = torch.randn(64, 32) * (torch.rand(64, 32) < 0.1)
    gy = torch.randn(64, 32) * (torch.rand(64, 32) < 0.1)
    torch.manual_seed(5)
    assert 0.6 < mean_error(recipes.TETRAJET2, x, gy, draws=100) < 1.4
    assert mean_error(recipes.QUARTET2, x, gy, draws=50) > 2


@every_recipe
def test_another_product_makes_it_recast(recipe: Recipe) -> None:
    """Blame and the ladder widen one product: x itself is saved then."""
    for product in ("output", "grad_input", "grad_weight"):
        assert recipe.with_gemm(**{product: Gemm()}).backward == "recast"


def test_what_cannot_be_decoded_or_repeated_is_refused() -> None:
    recipe = recipes.QUARTET2
    lhs = replace(recipes.FP8_CURRENT.output.lhs, calibrate=DelayedScaling())  # type: ignore[type-var]
    for output in (
        Gemm(),
        replace(recipe.output, lhs=None),
        replace(recipe.output, lhs=lhs),
        replace(recipe.output, rhs=recipes.NVFP4.grad_input.lhs),
        replace(recipe.output, rotate=Hadamard(block=16, signs="random")),
    ):
        with raises(ConfigError, "recipe.recast-codes-output"):
            replace(recipe, output=output)
    with raises(ConfigError, "recipe.recast-codes-rotation"):
        replace(recipe, grad_input=Gemm())
    fixed = replace(recipes.NVFP4.grad_weight, rotate=Hadamard(block=16, signs="fixed"))
    with raises(ConfigError, "recipe.recast-codes-save"):
        replace(recipe, grad_input=fixed, grad_weight=fixed, save="quantized")
    with raises(ConfigError, "recipe.backward"):
        replace(recipe, backward="codes")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
def test_compiled_it_computes_the_same_numbers() -> None:
    """In distribution: compiled code draws other random numbers. The forward pass has equal bits."""
    layer = layer_of(recipes.QUARTET2_46, 128, 64)
    x, gy = torch.randn(64, 128), torch.randn(64, 64)
    exact = x.T @ gy
    compiled = torch.compile(layer, fullgraph=True)
    given = x.clone().requires_grad_()
    y = compiled(given)
    y.backward(gy)
    assert_same(y.detach(), layer(x).detach())
    off = (layer.weight.grad.T - exact).square().sum() / exact.square().sum()  # type: ignore[union-attr]
    assert off < 0.04
