"""rotate: the matrix (exact against Kronecker products), products that stay what they were (bounded), ragged axes, bad input."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from narrowgauge import formats, recipes
from narrowgauge.errors import ShapeError
from narrowgauge.nn.linear import QLinear
from narrowgauge.ops.hadamard import (
    definition,
    draw_signs,
    hadamard_matrix,
    rotate,
    rotated_length,
    unrotate,
)
from narrowgauge.recipe import Cast, Gemm, Hadamard, Recipe
from tests.compare import assert_same, sqnr_db
from tests.raising import coded, raises

BLOCKS = [2, 4, 16, 32, 128, 1024]
SIGNS = ["none", "fixed", "random"]
CPU = torch.device("cpu")


@pytest.mark.parametrize("block", BLOCKS)
def test_matrix_is_sylvesters(block: int) -> None:
    """H_2n = [[H, H], [H, -H]] / sqrt(2), by Kronecker products."""
    two, expected = torch.tensor([[1.0, 1.0], [1.0, -1.0]]), torch.ones(1, 1)
    while expected.shape[0] < block:
        expected = torch.kron(two, expected)
    assert_same(hadamard_matrix(block, CPU), expected * block**-0.5)


@pytest.mark.parametrize("signs", SIGNS)
@pytest.mark.parametrize("inner", [1, 31, 32, 33, 100])
def test_unrotate_is_the_inverse_and_lengths_are_kept(inner: int, signs: str) -> None:
    hadamard = Hadamard(block=32, signs=signs)  # type: ignore[arg-type]
    x = torch.randn(7, inner)
    drawn = draw_signs(hadamard, inner, CPU)
    y = rotate(x, hadamard, drawn)
    assert y.shape == (7, rotated_length(inner, hadamard)) == (7, -(-inner // 32) * 32)
    torch.testing.assert_close(y.norm(dim=1), x.norm(dim=1))
    torch.testing.assert_close(unrotate(y, hadamard, inner, drawn), x, atol=2e-6, rtol=0)


@pytest.mark.parametrize("signs", SIGNS)
def test_product_of_rotated_operands_is_the_product(signs: str) -> None:
    hadamard = Hadamard(block=16, signs=signs)  # type: ignore[arg-type]
    x, w = torch.randn(9, 70), torch.randn(5, 70)
    drawn = draw_signs(hadamard, 70, CPU)
    found = rotate(x, hadamard, drawn).double() @ rotate(w, hadamard, drawn).double().T
    assert sqnr_db(x.double() @ w.double().T, found) > 120


def test_one_outlier_is_spread_over_its_block_only() -> None:
    x = torch.zeros(1, 64)
    x[0, 40] = 32.0
    y = rotate(x, Hadamard(block=16))
    assert_same(
        y.abs(),
        torch.cat((torch.zeros(32), torch.full((16,), 8.0), torch.zeros(16))).reshape(1, 64),
    )


def test_signs_are_what_their_name_says() -> None:
    fixed = Hadamard(block=16, signs="fixed")
    expected = torch.tensor([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1.0])
    assert_same(draw_signs(fixed, 33, CPU), expected.repeat(3))
    assert_same(
        draw_signs(replace(fixed, block=64), 64, CPU), draw_signs(replace(fixed, block=64), 64, CPU)
    )
    assert draw_signs(Hadamard(), 64, CPU) is None
    torch.manual_seed(3)
    first, second = (draw_signs(Hadamard(signs="random"), 4096, CPU) for _ in range(2))
    torch.manual_seed(3)
    assert_same(
        draw_signs(Hadamard(signs="random"), 4096, CPU), first
    )  # torch's generator, which a checkpoint holds
    assert not torch.equal(first, second)
    assert (
        set(first.tolist()) == {1.0, -1.0} and abs(first.mean()) < 5 / 64
    )  # 5 standard deviations


def test_constants_are_made_once_for_a_device() -> None:
    """A GPU waits for numbers that come from the host, and may not while a CUDA graph is captured."""
    for constant in (definition.fixed_signs, definition.hadamard_matrix):
        assert constant(64, CPU) is constant(64, CPU) and constant(16, CPU) is not constant(64, CPU)


def test_empty_and_poisoned_matrices() -> None:
    assert rotate(torch.zeros(0, 40), Hadamard()).shape == (0, 64)
    assert rotate(torch.zeros(3, 0), Hadamard()).shape == (3, 0)
    x = torch.zeros(2, 64)
    x[0, 5] = float("nan")
    y = rotate(x, Hadamard())
    assert y[0, :32].isnan().all() and (y[0, 32:] == 0).all() and (y[1] == 0).all()


def test_autocast_does_not_round_the_rotation() -> None:
    x = torch.randn(8, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(rotate(x, Hadamard()), rotate(x, Hadamard()))
        inside = rotate(x, Hadamard())
    assert_same(inside, rotate(x, Hadamard()))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (
            lambda: rotate(torch.ones(3), Hadamard()),
            coded("rotate.shape", "[3]", "x.flatten", "(0, -2)"),
        ),
        (lambda: rotate(torch.ones(3, 4).int(), Hadamard()), coded("rotate.shape", "torch.int32")),
        (
            lambda: rotate(torch.ones(3, 40), Hadamard(), torch.ones(40)),
            coded("rotate.signs", "[40]", "[64]"),
        ),
        (
            lambda: unrotate(torch.ones(3, 40), Hadamard(), 40),
            coded("unrotate.columns", "40", "of 32", "are 64"),
        ),
    ],
)
def test_bad_input_is_refused_in_words(call, words) -> None:  # type: ignore[no-untyped-def]
    with raises(ShapeError, words):
        call()


INT8_ROWS = Cast(format=formats.INT8, tile=(1, -1))


@pytest.mark.parametrize("product", ["output", "grad_input", "grad_weight"])
@pytest.mark.parametrize(
    ("signs", "save"),
    [("none", "quantized"), ("fixed", "quantized"), *((signs, "original") for signs in SIGNS)],
)
def test_a_linear_whose_products_are_rotated_computes_the_same(
    product: str, signs: str, save: str
) -> None:
    """Every axis ragged for the block. Outliers in the contracted axis make a rotation that is not undone fail by far."""
    rotated = Gemm(lhs=INT8_ROWS, rhs=INT8_ROWS, rotate=Hadamard(block=16, signs=signs))  # type: ignore[arg-type]
    plain = replace(rotated, rotate=None)
    gemms = dict.fromkeys(("output", "grad_input", "grad_weight"), plain) | {product: rotated}
    layer = QLinear(37, 27, recipe=Recipe(name="r", save=save, **gemms))  # type: ignore[arg-type]
    layer.empty_cache(keep=True)
    x = torch.randn(21, 37)
    x[:, 3] *= 30
    gy = torch.randn(21, 27)
    for _ in range(2):
        leaf = x.clone().requires_grad_()
        layer.zero_grad()
        y = layer(leaf)
        y.backward(gy)
        truth = torch.nn.functional.linear(x.double(), layer.weight.double(), layer.bias.double())
        assert sqnr_db(truth, y.detach()) > 28
        assert sqnr_db(gy.double() @ layer.weight.double(), leaf.grad) > 28
        assert sqnr_db(gy.double().T @ x.double(), layer.weight.grad) > 28


@pytest.mark.parametrize(
    "name", ["int4-hq-bs", pytest.param("int4-hq-lss", marks=pytest.mark.slow)]
)
def test_signs_of_a_straight_through_product_are_those_of_its_operands(name):
    """Fixed signs s: the layer is the one without, on x diag(s) and w diag(s), and so are its gradients (exact: flips round nothing)."""
    recipe = recipes.get(name)
    signed = replace(recipe, output=replace(recipe.output, rotate=Hadamard(signs="fixed")))
    signs = draw_signs(Hadamard(signs="fixed"), 64, CPU)
    torch.manual_seed(1)
    x, weight, gradient = torch.randn(40, 64), torch.randn(24, 64), torch.randn(40, 24)

    def computed(recipe, x, weight):
        layer = QLinear(64, 24, bias=False, recipe=recipe)
        layer.weight.data.copy_(weight)
        x = x.clone().requires_grad_()
        torch.manual_seed(2)
        y = layer(x)
        y.backward(gradient)
        return y.detach(), x.grad, layer.weight.grad

    y, grad_input, grad_weight = computed(signed, x, weight)
    expected = computed(recipe, x * signs, weight * signs)
    assert_same(y, expected[0])
    assert_same(grad_input, expected[1] * signs)
    assert_same(grad_weight, expected[2] * signs)
