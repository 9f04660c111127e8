"""Expanded values that a CPU's cast multiplied by their scales: the codes, scales and products of the definition (exact)."""

from __future__ import annotations

import copy
import pickle
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from narrowgauge import recipes
from narrowgauge.formats import E2M1, E4M3, E5M2
from narrowgauge.ops.mm import mm
from narrowgauge.ops.quantize import cpp, dequantize, quantize
from narrowgauge.qtensor import FoldedQTensor, QTensor
from narrowgauge.recipe import WHOLE, Cast
from narrowgauge.scaling import (
    E4M3_FOUR_OVER_SIX,
    E4M3_TWO_LEVEL,
    E8M0_CEIL,
    E8M0_FLOOR,
    FP32,
    POW2,
    times_scale,
)
from tests.compare import assert_same
from tests.selection import quick

pytestmark = pytest.mark.skipif(bool(cpp.LIBRARY.missing), reason="needs a C++ compiler")

TILES = [(1, WHOLE), (1, 32), (1, 128), (128, 128), (3, 5), (WHOLE, 1), (1, 1)]
CASTS = [
    Cast(format=format, tile=tile, scale=rule)
    for format in (E4M3, E5M2, E2M1) for rule in (POW2, E8M0_CEIL, E8M0_FLOOR) for tile in TILES
]  # fmt: skip
TWO_LEVEL = [
    Cast(format=format, tile=tile, scale=rule, headroom=headroom)
    for format in (E2M1, E4M3) for rule, headroom in ((E4M3_TWO_LEVEL, 1), (E4M3_FOUR_OVER_SIX, 1), (E4M3_TWO_LEVEL, 1.25))
    for tile in ((1, 16), (16, 16))
]  # fmt: skip
WIDE, NARROW = torch.float32, torch.bfloat16
DTYPES = [(WIDE, WIDE), (NARROW, NARROW), (NARROW, WIDE)]  # of values, of the result
SHAPES = [(1, 1), (5, 37), (64, 96), (130, 257)]


def spread(shape: tuple[int, int], exponents: tuple[float, float], seed: int = 0) -> Tensor:
    """Normal numbers, each row and column times a power of two between these."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator)
    low, high = exponents
    for axis in (0, 1):
        sizes = [shape[0], 1] if axis == 0 else [1, shape[1]]
        x *= torch.exp2((low + (high - low) * torch.rand(sizes, generator=generator)).round() / 2)
    return x


def pair(x: Tensor, cast: Cast, expand: torch.dtype) -> tuple[QTensor, QTensor]:
    return tuple(quantize(x, cast, expand=expand, backend=name) for name in ("native-cpp", "reference"))  # type: ignore[return-value]  # fmt: skip


def one_nan(x: Tensor) -> Tensor:
    """NaN has many bits, and the kernel chooses others."""
    return torch.where(x.isnan(), torch.full_like(x, float("nan")), x)


@pytest.mark.parametrize("expand", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cast", quick([*CASTS[::5], TWO_LEVEL[0]], [*CASTS, *TWO_LEVEL]), ids=str)
def test_values_and_scales_are_those_of_the_definition(cast: Cast, expand: torch.dtype) -> None:
    # A row with one scale of two levels is not folded.
    for shape in SHAPES[1:] if cast.scale.two_level else SHAPES:
        for x in (spread(shape, (-8, 8)), spread(shape[::-1], (-8, 8)).T.bfloat16()):
            mine, theirs = pair(x, cast, expand)
            assert isinstance(mine, FoldedQTensor) and not isinstance(theirs, FoldedQTensor)
            assert mine.shape == theirs.shape and mine.is_expanded and not mine.is_packed
            folded = times_scale(theirs.data.float(), theirs.scale, cast.tile)
            assert_same(mine.memory.float(), folded)
            assert "plain" not in vars(mine)  # nothing so far divided by the scales
            assert_same(mine.scale, theirs.scale)
            assert_same(mine.data, theirs.data)
            assert_same(dequantize(mine), dequantize(theirs))
            assert_same(mine.compact().data.view(torch.uint8), theirs.compact().data.view(torch.uint8))  # fmt: skip
            packed = mine.compact()
            assert packed.is_packed == theirs.compact().is_packed and not packed.is_expanded
            assert type(packed) is QTensor and packed.nbytes == theirs.compact().nbytes
            assert_same(packed.one_to_a_byte().view(torch.uint8), theirs.compact().one_to_a_byte().view(torch.uint8))  # fmt: skip
            changed = replace(mine, scale=mine.scale * 2, checked=True)
            assert_same(dequantize(changed), 2 * dequantize(theirs))
            for twin in (copy.deepcopy(mine), pickle.loads(pickle.dumps(mine)), copy.copy(mine)):
                assert isinstance(twin, FoldedQTensor)
                assert_same(twin.data, theirs.data)
            if cast.tile[0] == cast.tile[1]:
                assert_same(mine.transposed().memory, mine.memory.T)
                assert_same(mine.transposed().data, theirs.data.T)


@pytest.mark.parametrize("expand", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cast", quick(CASTS[:3], CASTS), ids=str)
def test_numbers_at_the_ends_and_beyond_are_those_of_the_definition(
    cast: Cast, expand: torch.dtype
) -> None:
    """Where a product with a scale is not exact in bfloat16, or a scale is NaN, nothing is folded."""
    folded = 0
    ends = [(-298, -290), (-252, -250), (-240, -200), (-150, 150), (200, 250), (0, 0)]
    for number, exponents in enumerate(ends):
        x = spread((40, 70), exponents, seed=number)
        if number == len(ends) - 1:
            x[3, 5], x[17, 8], x[20], x[:, 33] = float("nan"), float("inf"), 0.0, -0.0
        mine, theirs = pair(x, cast, expand)
        folded += isinstance(mine, FoldedQTensor)
        for one, other in ((mine.data, theirs.data), (mine.scale, theirs.scale)):
            assert_same(one_nan(one), one_nan(other))
        assert_same(one_nan(dequantize(mine)), one_nan(dequantize(theirs)))
    assert 0 < folded < len(ends)


@pytest.mark.parametrize("seed", quick(range(3), range(30)))
@pytest.mark.parametrize("cpu", [True, False], indirect=True)
def test_products_are_those_of_the_definition(seed: int, cpu: Any) -> None:
    """Random casts, shapes, ranges and dtypes: the result with values times scales, and with both apart."""
    draw = random.Random(seed)
    counts = {True: 0, False: 0}
    for number in range(20):
        m, n, k = (draw.choice([1, 2, 17, 40, 129]) for _ in range(3))
        casts = [draw.choice([*CASTS[:28], *TWO_LEVEL]) for _ in range(2)]
        if any(cast.tile[1] not in (1, WHOLE) for cast in casts):
            k = 640  # whole tiles: the definition leaves the rest of a tile in memory, and BLAS adds in another order
        expand, dtype = draw.choice(DTYPES)
        sides, plain = [], []
        for rows, cast in zip((m, n), casts, strict=True):
            middle = draw.choice([0, 0, -20, 20, -90, -120, 90])
            x = spread((rows, k), (middle - 6, middle + 6), seed=100 * seed + number)
            mine, theirs = pair(x, cast, expand)
            counts[isinstance(mine, FoldedQTensor)] += 1
            sides.append(mine)
            plain.append(theirs)
        bias = draw.choice([None, torch.ones(n, dtype=dtype)])
        expected = mm(*plain, bias=bias, out_dtype=dtype, backend="reference")
        for given in (sides, [plain[0], sides[1]], [sides[0], plain[1]]):
            found = mm(*given, bias=bias, out_dtype=dtype, backend="reference")
            assert_same(one_nan(found), one_nan(expected))
    assert counts[True] > counts[False]


def test_casts_whose_products_with_scales_round_or_leave_the_sum_are_not_folded() -> None:
    x = torch.randn(32, 64)
    for cast in (
        Cast(format=E4M3, tile=(1, WHOLE), scale=FP32),
        Cast(format=E4M3, tile=(WHOLE, WHOLE), scale=POW2),
        Cast(format=E2M1, tile=(1, 64), scale=E4M3_TWO_LEVEL),
    ):
        assert not isinstance(quantize(x, cast, expand=torch.bfloat16), FoldedQTensor)


@pytest.mark.parametrize(
    "recipe", ["fp8-row", "fp8-block", "mxfp8", "mxfp4", "tetrajet2", "nvfp4", "nvfp4-46"]
)
def test_no_product_of_a_layer_divides_by_scales(recipe: str, monkeypatch: Any) -> None:
    """The multiplication by scales is the cast's own: nothing undoes it in forward or backward."""
    import narrowgauge as ng

    divided = []
    before = FoldedQTensor.data.fget
    monkeypatch.setattr(
        FoldedQTensor, "data", property(lambda self: divided.append(1) or before(self), FoldedQTensor.data.fset)  # type: ignore[func-returns-value, misc]
    )  # fmt: skip
    layer = ng.QLinear(96, 64, recipe=recipes.get(recipe))
    for _ in range(3):
        layer(torch.randn(40, 96, requires_grad=True)).square().sum().backward()
        ng.advance(layer)
    assert not divided
