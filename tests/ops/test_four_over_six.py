"""Four over six: each tile of e2m1 takes the better of two scales."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from narrowgauge.errors import ConfigError
from narrowgauge.formats import E2M1, E4M3
from narrowgauge.lab.blame.recast import own_scale
from narrowgauge.ops import chunking
from narrowgauge.ops.quantize import definition, dequantize, quantize
from narrowgauge.recipe import Cast
from narrowgauge.scaling import E4M3_FOUR_OVER_SIX, E4M3_TWO_LEVEL, WHOLE, halved_sum
from tests.compare import assert_same
from tests.raising import raises

LEVELS = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
TILES = ((1, 16), (16, 16))


def cast(tile: tuple[int, int], rule=E4M3_FOUR_OVER_SIX) -> Cast:
    return Cast(format=E2M1, tile=tile, scale=rule)


def values(kind: str, rows: int = 48, columns: int = 160) -> Tensor:
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(3))
    if kind == "sparse":
        return x * (torch.rand(x.shape, generator=torch.Generator().manual_seed(4)) < 0.1)
    return x * x.mul(3).exp() if kind == "heavy" else x


def error_by_hand(tile: Tensor, scale: Tensor) -> float:
    """Squared error of the nearest levels, in float64, whatever their order or ties."""
    levels = torch.cat((-LEVELS.flip(0), LEVELS)) * scale.double()
    return float((tile.double().flatten()[:, None] - levels).abs().amin(1).square().sum())


@pytest.mark.parametrize("tile", TILES, ids=str)
@pytest.mark.parametrize("kind", ["normal", "sparse", "heavy"])
def test_no_tile_has_a_larger_error_than_with_its_other_scale(kind, tile):
    """Each tile by hand: its scale is one of two, and the other one is not better."""
    x = values(kind)
    found = quantize(x, cast(tile))
    whole = found.global_scale
    assert_same(whole, (x.abs().max().double() / (256 * 6)).float())
    chose_four = 0
    for row, column in torch.cartesian_prod(*(torch.arange(size) for size in found.scale.shape)):
        part = x[row * tile[0] :, column * tile[1] :][: tile[0], : tile[1]]
        six, four = (
            E4M3.round((part.abs().max().double() / 6).float() * factor / whole)
            for factor in (1.0, 1.5)
        )
        taken = found.scale[row, column]
        assert taken in (six, four)
        errors = [error_by_hand(part, scale * whole) for scale in (taken, six, four)]
        # By hand nothing is rounded to float32, which is off by up to 2**-24 of each element.
        least, size = min(errors[1:]), float(part.square().sum())
        assert errors[0] <= least + 2.0**-21 * (least * size) ** 0.5 + 2.0**-46 * size
        chose_four += int(taken == four and four != six)
    assert 0 < chose_four < found.scale.numel()


@pytest.mark.parametrize(("kind", "limit"), [("normal", 0.84), ("sparse", 0.62), ("heavy", 0.9)])
def test_the_error_falls(kind, limit):
    """Squared error of a 1x16 cast, beside the rule with one scale."""
    x = values(kind, 96, 1024)
    old, new = (
        float((dequantize(quantize(x, cast((1, 16), rule))) - x).square().sum())
        for rule in (E4M3_TWO_LEVEL, E4M3_FOUR_OVER_SIX)
    )
    assert new < limit * old


def test_pieces_have_the_bits_of_the_whole(monkeypatch):
    x = values("heavy", 67, 90)
    for tile in TILES:
        whole = quantize(x, cast(tile), backend="reference")
        monkeypatch.setattr(definition, "PIECE", 500)
        monkeypatch.setattr(chunking, "PIECE", 500)
        monkeypatch.setattr(chunking, "type_of", lambda device: "cuda")
        pieces = quantize(x, cast(tile), backend="reference")
        monkeypatch.undo()
        assert_same(pieces.data, whole.data)
        assert_same(pieces.scale, whole.scale)


def test_a_poisoned_tensor_and_zeros():
    x = values("normal")
    x[3, 5] = float("nan")
    assert quantize(x, cast((1, 16))).scale.isnan().all()
    zeros = quantize(torch.zeros(20, 40), cast((16, 16)))
    assert dequantize(zeros).count_nonzero() == 0


def test_blame_finds_the_scales_that_the_cast_chose():
    for tile in TILES:
        x = values("heavy")
        assert_same(own_scale(x, cast(tile)), quantize(x, cast(tile)).full_scale())


def test_what_has_no_tiles_to_compare_is_refused():
    for tile, headroom in (((WHOLE, WHOLE), 1.0), ((1, WHOLE), 1.0), ((1, 16), 17 / 16)):
        with raises(ConfigError, "cast.compared-scales"):
            Cast(format=E2M1, tile=tile, scale=E4M3_FOUR_OVER_SIX, headroom=headroom)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 16])
def test_the_order_of_a_sum(size):
    """The later half is added to the earlier one; the middle of an odd number waits."""
    tile = torch.rand(1, 1, size, dtype=torch.float64)
    left = tile.flatten().tolist()
    while len(left) > 1:
        half = -(-len(left) // 2)
        left = [left[i] + left[i + half] if i + half < len(left) else left[i] for i in range(half)]
    assert halved_sum(tile).item() == left[0]
