"""nvfp4 and mxfp4 through a QLinear: gradients unbiased (statistical), error within what the casts allow (bounded)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import narrowgauge as ng
from narrowgauge.nn.linear import QLinear
from tests.compare import assert_same, sqnr_db, z_limit, z_score
from tests.selection import quick

T, K, N = 96, 64, 48
REPLICATES = 128
RECIPES = ("nvfp4", "mxfp4")


def operands(tokens=T):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(tokens, K, generator=generator)
    w = torch.randn(N, K, generator=generator) / K**0.5
    sizes = torch.exp(1.5 * torch.randn(tokens, 1, generator=generator))  # heavy-tailed rows
    return x, w, torch.randn(tokens, N, generator=generator) * sizes


def layer(recipe, w):
    made = QLinear(
        K, N, bias=False, recipe=ng.recipes.get(recipe) if isinstance(recipe, str) else recipe
    )
    made.weight.data.copy_(w)
    return made


def gradients(recipe, x, w, gy):
    made, leaf = layer(recipe, w), x.clone().requires_grad_()
    y = made(leaf)
    y.backward(gy)
    return y.detach(), leaf.grad, made.weight.grad


@pytest.mark.parametrize("recipe", RECIPES)
def test_error_is_that_of_four_bits(recipe):
    """SQNR against fp64.

    A normal operand in e2m1 with small tiles has some 19 to 20 dB to nearest and 15 to 16 stochastically;
    the errors of two operands add, which gives 16 dB forward; backward 13 to 14 dB where one operand is stochastic (nvfp4), 12
    where both are (mxfp4). Floors are 2 dB lower.
    """
    x, w, gy = operands()
    y, grad_input, grad_weight = gradients(recipe, x, w, gy)
    x, w, gy = x.double(), w.double(), gy.double()
    floor = {"nvfp4": 11.5, "mxfp4": 10.0}[recipe]
    assert sqnr_db(x @ w.T, y) > 14
    assert sqnr_db(gy @ w, grad_input) > floor
    assert sqnr_db(gy.T @ x, grad_weight) > floor


def expected(recipe, x, w, gy):
    """What the gradients are the mean of: operands rounded to nearest are what they are, stochastic ones are exact."""
    chosen = ng.recipes.get(recipe)
    if recipe == "mxfp4":
        return gy.double() @ w.double(), gy.double().T @ x.double()
    from narrowgauge.ops.hadamard import draw_signs, rotate

    turn = chosen.grad_weight.rotate
    signs = draw_signs(turn, len(x), x.device)
    w_cast = ng.dequantize(ng.quantize(w.T, chosen.grad_input.rhs)).double()
    x_cast = ng.dequantize(ng.quantize(rotate(x.T, turn, signs), chosen.grad_weight.rhs)).double()
    return gy.double() @ w_cast.T, rotate(gy.T, turn, signs).double() @ x_cast.T


def z_of(found, mean, generator):
    """The largest |z| of projections on the mean itself and 32 random directions that overlap with it."""
    directions = [
        mean,
        *(
            torch.rand(mean.shape, generator=generator, dtype=torch.float64) * mean
            for _ in range(32)
        ),
    ]
    ratios = [
        torch.stack([(each * d).sum() / (mean * d).sum() for each in found]) for d in directions
    ]
    return max(abs(z_score(ratio, 1.0, ratio.std().item())) for ratio in ratios)


def draws(recipe, x, w, gy):
    pairs = [gradients(recipe, x, w, gy)[1:] for _ in range(REPLICATES)]
    return [torch.stack([pair[i] for pair in pairs]).double() for i in (0, 1)]


@pytest.mark.parametrize("tokens", quick([37], [96, 37]), ids=["whole tiles", "ragged"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_gradients_are_unbiased(recipe, tokens):
    x, w, gy = operands(tokens)
    gy[5] = 0
    generator = torch.Generator().manual_seed(4)
    for found, mean in zip(draws(recipe, x, w, gy), expected(recipe, x, w, gy), strict=True):
        assert z_of(found, mean, generator) < z_limit(1e-4, 33)


@pytest.mark.slow
def test_without_the_guard_gradients_are_biased():
    """Negative control: MXFP4 rounded down, and no 3/4."""
    chosen = ng.recipes.MXFP4
    bare = replace(chosen.grad_input.lhs, headroom=1)
    gemm = replace(chosen.grad_input, lhs=bare, rhs=bare)
    x, w, gy = operands()
    found = draws(chosen.with_gemm(grad_input=gemm, grad_weight=gemm), x, w, gy)
    generator = torch.Generator().manual_seed(4)
    means = expected("mxfp4", x, w, gy)
    assert max(
        z_of(each, mean, generator) for each, mean in zip(found, means, strict=True)
    ) > 2 * z_limit(1e-4, 33)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES)
def test_averages_fall_as_one_over_their_number(recipe):
    """Of unbiased draws the error has no floor: 16 times more draws, 16 times less; 4 standard errors of a chi-squared allowed."""
    x, w, gy = operands()
    for found, mean in zip(draws(recipe, x, w, gy), expected(recipe, x, w, gy), strict=True):
        single = (found - mean).square().sum(dim=(1, 2)).mean()
        averaged = (
            (found.reshape(8, 16, *mean.shape).mean(dim=1) - mean).square().sum(dim=(1, 2)).mean()
        )
        assert 0.8 < (16 * averaged / single).item() < 1.25


@pytest.mark.parametrize("recipe", RECIPES)
def test_zero_gradients_stay_zero(recipe):
    x, w, gy = operands()
    _, grad_input, grad_weight = gradients(recipe, x, w, torch.zeros_like(gy))
    assert grad_input.count_nonzero() == 0 and grad_weight.count_nonzero() == 0


def test_forward_and_backward_of_nvfp4_see_the_same_weight():
    """16x16 tiles: the cast of w.T is the cast of w, turned (exact)."""
    _, w, _ = operands()
    cast = ng.recipes.NVFP4.output.rhs
    assert_same(ng.dequantize(ng.quantize(w.T, cast)), ng.dequantize(ng.quantize(w, cast)).T)


def test_codes_of_nvfp4_saved_for_backward_change_no_gradient():
    """x is rounded to nearest, so packed codes of the rotated x.T give what x gives (exact)."""
    x, w, gy = operands(37)
    saved = replace(ng.recipes.NVFP4, save="quantized")
    results = []
    for recipe in (ng.recipes.NVFP4, saved):
        torch.manual_seed(7)
        results.append(gradients(recipe, x, w, gy))
    assert_same(results[1], results[0])
