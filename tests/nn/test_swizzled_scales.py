"""Scales that a cast wrote for the tensor cores of 10.0 alone: the numbers of a layer stay (exact), and what a Linear launches there."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

import narrowgauge as ng
from narrowgauge import recipes
from narrowgauge.conversion.measure import LinearWorkload
from narrowgauge.conversion.predict import counted
from narrowgauge.formats import E4M3
from narrowgauge.nn.operands import Operand
from narrowgauge.ops.mm import cublas
from narrowgauge.ops.timing.cards import card
from narrowgauge.qtensor import QTensor, SwizzledQTensor
from narrowgauge.scaling import swizzled, swizzled_length, to_exponents, unswizzled
from tests.compare import assert_same

MX, NV, SQUARE = (
    recipes.get("mxfp8").output.lhs,
    recipes.get("nvfp4").output.lhs,
    recipes.get("nvfp4").output.rhs,
)


def by_definition(q: QTensor) -> SwizzledQTensor:
    """The same tensor as a cast on a B200 leaves it, by plain torch."""
    scale = q.scale.repeat_interleave(q.cast.tile[0], dim=0)[: q.shape[0]]
    codes = E4M3.encode(scale) if q.cast.scale.two_level else to_exponents(scale)
    return SwizzledQTensor.of_units(
        q.data, swizzled(codes).view(torch.uint8), q.cast, q.inner, q.global_scale
    )


@pytest.mark.parametrize("shape", [(1, 1), (128, 4), (67, 5), (300, 9)])
def test_a_layout_and_its_inverse(shape):
    scale = torch.randint(0, 256, shape, dtype=torch.uint8)
    flat = swizzled(scale)
    assert len(flat) == swizzled_length(*shape)
    assert_same(unswizzled(flat, *shape), scale)
    # A number at row r and column c of a block, by cuBLAS' formula.
    r, c = shape[0] - 1, shape[1] - 1
    place = (r // 128 * -(-shape[1] // 4) + c // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + c % 4
    assert flat[place] == scale[r, c]


@pytest.mark.parametrize("cast", [MX, NV, SQUARE], ids=["mxfp8", "nvfp4", "nvfp4 weights"])
def test_scales_are_decoded_when_they_are_read(cast):
    q = ng.quantize(torch.randn(67, 131) * torch.logspace(-9, 2, 67)[:, None], cast)
    q = q if not q.is_expanded else q.compact()
    mine = by_definition(q)
    for each in (
        mine,
        copy.deepcopy(mine),
        replace(mine, checked=True),
        mine.to(torch.device("cpu")),
    ):
        assert_same(each.scale, q.scale)
        assert_same(ng.dequantize(each), ng.dequantize(q))
    assert replace(mine, checked=True).units is None, "its codes may be others"
    # What the product gets is what plain torch lays out.
    ours, theirs = cublas.mx_operand(mine), cublas.mx_operand(q)
    assert_same(ours.scales[0].view(torch.uint8), theirs.scales[0].view(torch.uint8))
    assert (ours.kinds, ours.swizzles) == (theirs.kinds, theirs.swizzles)


@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4"])
def test_a_layer_computes_the_same(monkeypatch, recipe):
    """Output and gradients with casts as a B200 makes them, saved for backward too."""

    def run() -> list[torch.Tensor]:
        torch.manual_seed(3)
        layer = torch.nn.Linear(96, 80, dtype=torch.bfloat16)
        ng.convert(model := torch.nn.Sequential(layer), recipe)
        x = torch.randn(64, 96, dtype=torch.bfloat16, requires_grad=True)
        y = model(x)
        y.backward(torch.randn_like(y))
        return [y.detach(), x.grad, model[0].weight.grad]

    plain, seen = run(), []
    cast = Operand.cast

    def swizzling(self, *arguments):
        made = cast(self, *arguments)
        if isinstance(made, QTensor):
            seen.append(made)
            made = by_definition(made)
        return made

    monkeypatch.setattr(Operand, "cast", swizzling)
    for ours, theirs in zip(run(), plain, strict=True):
        assert_same(ours, theirs)
    assert len(seen) >= 3


def test_what_mxfp8_launches_and_moves_on_a_b200():
    """A cast writes codes and scales of both orientations: 4 launches, w twice; 10 % above reading w once."""
    tokens, width = 8192, 4096
    workload = LinearWorkload(tokens=tokens, inputs=width, outputs=width, dtype=torch.bfloat16)
    done = counted(workload, "mxfp8", card("b200"))
    beside = [each for each in done if each.kind != "products"]
    assert [each.operation for each in beside] == ["cast_blocks"] * 4
    least = 2 * _least(tokens * width) + _least(width * width)
    assert sum(each.nbytes for each in beside) <= 1.10 * least


def _least(elements: int) -> float:
    """Bytes: 16-bit numbers read once, a byte for each in both orientations, and one for 32 of them."""
    return elements * (2 + 2 * (1 + 1 / 32))
