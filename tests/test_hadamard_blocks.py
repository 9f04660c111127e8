"""calibrate_blocks: the choice by output error (bounded), the rule that fails, and bad input."""

from __future__ import annotations

import pytest
import torch

import narrowgauge as ng
from benchmarks.hadamard_blocks import add_errors, calibrate_blocks
from narrowgauge.errors import ConfigError
from narrowgauge.ops.hadamard import rotate
from narrowgauge.ops.quantize import dequantize, quantize
from narrowgauge.recipe import Hadamard
from tests.compare import assert_same
from tests.raising import raises

GEMM = ng.recipes.get("int4-lsq-luq").output  # the first step of a learned one
BLOCKS = [1, 2, 4, 8, 16, 32, 64, 128]


def operands(x_outliers: float, w_outliers: float) -> tuple[torch.Tensor, torch.Tensor]:
    """256 tokens, 8 of 512 channels of x and w scaled."""
    torch.manual_seed(0)
    x, w = torch.randn(256, 512), torch.randn(256, 512)
    channels = torch.randperm(512)[:8]
    x[:, channels] *= x_outliers
    w[:, channels] *= w_outliers
    return x, w


def output_errors(x: torch.Tensor, w: torch.Tensor) -> dict[int, float]:
    sums: dict[int, torch.Tensor] = {}
    add_errors(sums, x, w, GEMM)
    return {block: float(sums[block] / sums[0]) for block in BLOCKS}


def product_of_errors(x: torch.Tensor, w: torch.Tensor) -> dict[int, float]:
    """The rule of arXiv 2306.11987, A.5: |x_k - x| |w_k - w|."""
    found = {}
    for block in BLOCKS:
        turned = [
            operand if block == 1 else rotate(operand, Hadamard(block=block)) for operand in (x, w)
        ]
        errors = [(dequantize(quantize(operand, GEMM.lhs)) - operand).norm() for operand in turned]
        found[block] = float(errors[0] * errors[1])
    return found


def test_outliers_of_x_alone_are_rotated_away() -> None:
    errors = output_errors(*operands(20.0, 1.0))
    assert min(errors, key=errors.get) in (16, 32, 64, 128)
    assert errors[1] > 4 * errors[32]


def test_compensated_outliers_are_left_alone_where_the_product_of_errors_would_rotate() -> None:
    """The counter-example: x times 32, the same columns of w over 32. Rotation doubles the error of the output."""
    x, w = operands(32.0, 1 / 32)
    errors, products = output_errors(x, w), product_of_errors(x, w)
    by_output, by_product = min(errors, key=errors.get), min(products, key=products.get)
    assert by_output == 1 and by_product >= 8
    assert errors[by_product] > 1.9 * errors[1]


class Two(torch.nn.Module):
    """A layer with outliers in its input, and one that compensates them."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.smooth = (
            torch.nn.Linear(512, 256, bias=False),
            torch.nn.Linear(512, 256, bias=False),
        )
        self.small = torch.nn.Linear(20, 16)

    def forward(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return self.plain(a) + self.smooth(b) + self.small(a[:, :20]).sum()


def model_and_batch() -> tuple[Two, tuple[torch.Tensor, torch.Tensor]]:
    model = Two()
    (a, w), (b, v) = operands(20.0, 1.0), operands(32.0, 1 / 32)
    with torch.no_grad():
        model.plain.weight.copy_(w)
        model.smooth.weight.copy_(v)
    return ng.convert(model, "int4-lsq-luq"), (a, b)  # type: ignore[return-value]


def test_each_layer_gets_its_block_and_describe_tells() -> None:
    model, batch = model_and_batch()
    model.small.eval()
    errors = calibrate_blocks(model, [batch, batch])
    assert (
        model.plain.recipe.output.rotate is not None and model.smooth.recipe.output.rotate is None
    )
    assert model.plain.recipe.output.rotate.block == min(errors["plain"], key=errors["plain"].get)
    assert set(errors) == {"plain", "smooth", "small"} and set(errors["plain"]) == set(BLOCKS)
    assert set(errors["small"]) == {1, 2, 4, 8, 16, 32}, (
        "a block of 32 holds all 20 features, 64 would only add zeros"
    )
    rows = {row.name: row for row in ng.describe(model)}
    assert f"Hadamard {model.plain.recipe.output.rotate.block}" in rows["plain"].output
    assert "Hadamard" not in rows["smooth"].output
    assert model.training and not model.small.training and not model.plain.is_suspended
    again = calibrate_blocks(model, [batch])
    assert again["smooth"] == pytest.approx(errors["smooth"])
    model(*batch).sum().backward()


def test_a_layer_whose_axis_the_block_does_not_divide_says_so() -> None:
    rows = ng.describe(ng.convert(torch.nn.Sequential(torch.nn.Linear(48, 32)), "int4-hq-bs"))
    assert "contracted axis filled up from 48 to 64 for the rotation" in rows[0].note


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (
            lambda a: a.fill_(0.0),
            r"the input of 'plain' is all zeros in one of the batches.*Give batches of real data",
        ),
        (
            lambda a: a[3, 5].fill_(float("nan")),
            r"the input of 'plain' holds 1 numbers that are not finite",
        ),
        (lambda a: a[3, 5].fill_(float("inf")), r"holds 1 numbers that are not finite"),
    ],
)
def test_a_batch_that_says_nothing_is_refused_and_nothing_changes(spoil, words) -> None:  # type: ignore[no-untyped-def]
    model, (a, b) = model_and_batch()
    before = model.plain.recipe
    spoiled = a.clone()
    spoil(spoiled)
    with pytest.raises(ConfigError, match=words):
        calibrate_blocks(model, [(a, b), (spoiled, b)])
    assert model.plain.recipe is before and model.training and not model.plain.is_suspended
    assert not model.plain._forward_pre_hooks


def test_nothing_to_choose_is_an_error() -> None:
    x = torch.randn(4, 32)
    with pytest.raises(
        ConfigError, match=r"no Linear of the model has a recipe that rotates.*'int4-hq-bs'"
    ):
        calibrate_blocks(
            ng.convert(torch.nn.Sequential(torch.nn.Linear(32, 32)), "fp8-current"), [x]
        )
    model = ng.convert(torch.nn.Sequential(torch.nn.Linear(32, 32)), "int4-hq-bs")
    with pytest.raises(ConfigError, match="no batch was given"):
        calibrate_blocks(model, [])
    with pytest.raises(
        ConfigError, match=r"in 2 batches no row came to a Linear whose recipe rotates.*not empty"
    ):
        calibrate_blocks(model, [x[:0], x[:0]])
    torch.nn.init.zeros_(model[0].weight)
    with pytest.raises(ConfigError, match=r"the output of '0' has a squared norm of 0\.0"):
        calibrate_blocks(model, [x])


def test_calibration_leaves_the_output_of_a_layer_to_its_recipe() -> None:
    """Inputs by name; the layer computes by the recipe afterwards, not suspended (exact)."""
    layer = ng.convert(torch.nn.Linear(64, 32), "int4-hq-bs")
    x = torch.randn(16, 64)
    calibrate_blocks(layer, [{"input": x}])
    assert_same(layer(x), ng.linear(x, layer.weight, layer.bias, layer.recipe))


@pytest.mark.parametrize("rows", [0, -1])
def test_rows_that_are_none_are_refused(rows):
    with raises(ConfigError, "hadamard.rows", rows):
        calibrate_blocks(torch.nn.Linear(4, 4), [], rows=rows)
