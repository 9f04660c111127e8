"""EDEN: codes to nearest, scales corrected for each rotated block (exact, bounded, statistical)."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from narrowgauge.errors import ConfigError, ShapeError
from narrowgauge.formats import E2M1, E4M3, INT4
from narrowgauge.lab.blame.recast import Recast
from narrowgauge.nn.rotation import Rotation
from narrowgauge.ops import chunking
from narrowgauge.ops.hadamard import unrotate
from narrowgauge.ops.quantize import definition, dequantize, quantize
from narrowgauge.ops.quantize.eden import corrections
from narrowgauge.ops.random import Key
from narrowgauge.ops.triton import cast_constants
from narrowgauge.recipe import Cast, ClippedRms, Gemm, Hadamard, Recipe
from narrowgauge.scaling import (
    E4M3_EDEN,
    E4M3_EDEN_FOUR_OVER_SIX,
    E4M3_TWO_LEVEL,
    E8M0_CEIL,
    WHOLE,
)
from tests.compare import assert_same
from tests.raising import raises

EDEN = Cast(format=E2M1, tile=(1, 16), scale=E4M3_EDEN, rounding="eden")
EDEN_46 = replace(EDEN, scale=E4M3_EDEN_FOUR_OVER_SIX)
INT4_EDEN = Cast(format=INT4, tile=(1, 128), rounding="eden")
CASTS = (EDEN, EDEN_46, INT4_EDEN)
CLIPPED = replace(INT4_EDEN, calibrate=ClippedRms())
ROTATION = Hadamard(block=128, signs="random")


def values(rows: int = 16, columns: int = 256, seed: int = 3) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def noise_for(x: Tensor, cast: Cast, key: int = 5) -> Tensor | None:
    return Key((key, 7)).uniform(cast.noise_shape(tuple(x.shape))) if cast.draws else None


def drawn(x: Tensor, cast: Cast, seed: int, hadamard: Hadamard = ROTATION) -> Tensor:
    """x after one random rotation, cast and the rotation back."""
    torch.manual_seed(seed)
    rotation = Rotation.draw(hadamard, x)
    rotated = rotation(x)
    made = dequantize(quantize(rotated, cast, noise=noise_for(rotated, cast, seed)))
    for signs in (rotation.second, rotation.signs):
        made = made if signs is None else unrotate(made, hadamard, x.shape[1], signs)
    return made


@pytest.mark.parametrize("cast", CASTS, ids=str)
def test_a_block_by_hand(cast):
    """S of one block is the ratio of two sums; codes are those of a cast to nearest."""
    x = values(4, 384)
    plain = quantize(x, replace(cast, rounding="nearest"))
    found = quantize(x, cast, noise=noise_for(x, cast))
    assert_same(found.data, plain.data)
    q = dequantize(plain).double()
    for row in range(4):
        for block in range(3):
            part = slice(128 * block, 128 * block + 128)
            own, decoded = x[row, part].double(), q[row, part]
            ratio = float(own.square().sum() / (own * decoded).sum())
            tiles = slice(128 * block // cast.tile[1], 128 * (block + 1) // cast.tile[1])
            scales, before = found.scale[row, tiles], plain.scale[row, tiles]
            if cast.draws:  # one of the two e4m3 numbers around the corrected scale
                gap = 2.0 ** (torch.floor(torch.log2(before * ratio)) - 3)
                assert ((scales - before * ratio).abs() < gap * 1.0001).all()
                assert_same(E4M3.round(scales), scales)
            else:
                torch.testing.assert_close(scales, before * ratio, rtol=2.0**-22, atol=0)


def test_float32_scales_make_the_product_of_a_block_with_itself_exact():
    """<S q, x> = <x, x> in every block of 128."""
    x = values(8, 512)
    q = dequantize(quantize(x, INT4_EDEN))
    along, size = ((each * x).double().reshape(8, 4, 128).sum(2) for each in (q, x))
    torch.testing.assert_close(along, size, rtol=1e-6, atol=0)


@pytest.mark.parametrize("cast", (*CASTS, CLIPPED), ids=str)
def test_it_is_unbiased_over_the_signs_on_normal_numbers(cast):
    """Statistical: 24 draws of 4,096 elements, the mean's squared error beside an unbiased one's.

    For an unbiased cast of variance v the squared error of the mean of n draws is v / n. Its ratio
    to that has the mean 1 and a standard deviation of about sqrt(2 / 4096) = 0.022; correlations
    within a block of 128 at most raise it to sqrt(2 / 32) = 0.25, and were measured as 0.03. The
    slope of a mean of 24 deviates by sqrt(v / 4096 / 24) = 0.0004. Limits of 0.15 and of 5 deviations.
    """
    x, draws = values(), 24
    found = torch.stack([drawn(x, cast, seed) for seed in range(draws)]).double()
    off = (found - x).square().sum(dim=(1, 2)).mean()
    mean = found.mean(dim=0)
    assert (mean - x).square().sum() / (off / draws) == pytest.approx(1, abs=0.15)
    assert float((mean * x).sum() / x.double().square().sum()) == pytest.approx(1, abs=0.0018)


def test_rounding_to_nearest_alone_would_fail_that_test():
    """The negative control: rotation and codes without the correction, where large elements clip."""
    x, draws = values(), 24
    cast = replace(CLIPPED, rounding="nearest")
    found = torch.stack([drawn(x, cast, seed) for seed in range(draws)]).double()
    assert float((found.mean(dim=0) * x).sum() / x.double().square().sum()) < 0.995


@pytest.mark.parametrize("cast", CASTS, ids=str)
def test_two_rounds_are_unbiased_where_two_elements_fill_a_block(cast):
    """Statistical, 24 draws; one round has the same error in each draw.

    Two elements a and b of a block rotate to numbers of two magnitudes, |a + b| and |a - b|. Their
    rounding is the same under all signs, so the mean's squared error is that of one draw: a ratio
    of 24, less what the rounding of the scales adds. The limit of two rounds is 0.25, see above.
    """
    x, draws = torch.zeros(16, 256), 24
    x[:, ::128], x[:, 5::128] = 1.0, 0.7
    ratios = []
    for rounds in (1, 2):
        turn = replace(ROTATION, rounds=rounds)
        found = torch.stack([drawn(x, cast, seed, turn) for seed in range(draws)]).double()
        off = (found - x).square().sum(dim=(1, 2)).mean()
        ratios.append(float((found.mean(dim=0) - x).square().sum() / (off / draws)))
    assert ratios[0] > 2 and ratios[1] == pytest.approx(1, abs=0.25), ratios


def test_two_rounds_cancel_in_a_product():
    """Both operands are rotated by one `Rotation`; without signs two rounds would be no rotation."""
    x, w = values(8, 200), values(6, 200, seed=4)
    rotation = Rotation.draw(replace(ROTATION, rounds=2), x)
    assert rotation.second is not None and not torch.equal(rotation.second, rotation.signs)
    exact = x.double() @ w.double().T
    torch.testing.assert_close(rotation(x) @ rotation(w).T, exact.float(), rtol=1e-4, atol=1e-4)
    for changes in ({"rounds": 3}, {"rounds": 2, "signs": "fixed"}, {"rounds": True}):
        with raises(ConfigError, "hadamard.rounds"):
            replace(ROTATION, **changes)
    turned = Gemm(lhs=INT4_EDEN, rhs=INT4_EDEN, rotate=replace(ROTATION, rounds=2))
    with raises(ConfigError, "recipe.rotated-twice"):
        Recipe(name="r", output=turned)


@pytest.mark.parametrize(
    ("cast", "limit"), [(EDEN, 0.0101), (EDEN_46, 0.0084), (INT4_EDEN, 0.0141)], ids=str
)
def test_the_error_of_normal_numbers(cast, limit):
    """Relative squared error of 64 x 1,024: 0.0098, 0.0082 and 0.0137 (`python -m benchmarks.closed frontier`)."""
    x = values(64, 1024)
    off = (drawn(x, cast, 1) - x).double().square().sum()
    assert off / x.double().square().sum() < limit


@pytest.mark.parametrize("cast", CASTS, ids=str)
def test_layouts_keys_and_pieces_have_the_same_bits(cast, monkeypatch):
    """A strided x, noise as a key or as numbers, and pieces of rows."""
    x = values(67, 300)
    noise = noise_for(x, cast)
    key = Key((5, 7)) if cast.draws else None
    whole = quantize(x, cast, noise=noise)
    for other in (
        quantize(x.T.contiguous().T, cast, noise=noise),
        quantize(x, cast, noise=key),
        quantize(torch.cat((x, x), dim=1)[:, :300], cast, noise=key),
    ):
        assert_same(other.data, whole.data)
        assert_same(other.scale, whole.scale)
    monkeypatch.setattr(definition, "PIECE", 500)
    monkeypatch.setattr(chunking, "PIECE", 500)
    monkeypatch.setattr(chunking, "type_of", lambda device: "cuda")
    for given in (noise, key):
        pieces = quantize(x, cast, noise=given)
        assert_same(pieces.data, whole.data)
        assert_same(pieces.scale, whole.scale)


@pytest.mark.parametrize("cast", CASTS, ids=str)
def test_zeros_poison_outliers_and_empty_tensors(cast):
    zeros = quantize(torch.zeros(3, 200), cast, noise=noise_for(torch.zeros(3, 200), cast))
    assert dequantize(zeros).count_nonzero() == 0
    x = values(4, 256)
    x[1, 3] = float("nan")
    poisoned = dequantize(quantize(x, cast, noise=noise_for(x, cast)))
    assert poisoned[1, :128].isnan().all()
    x[1, 3] = 1e30
    assert dequantize(quantize(x, cast, noise=noise_for(x, cast))).isfinite().all()
    for shape in ((0, 256), (4, 0)):
        empty = torch.empty(shape)
        assert quantize(empty, cast, noise=noise_for(empty, cast)).shape == shape


def test_a_block_that_underflows_keeps_its_scales():
    """Tiles whose e4m3 scale is zero decode to zero: there is nothing to correct."""
    x = torch.zeros(1, 256)
    x[0, 0], x[0, 128:] = 1.0, 1e-9
    cast = EDEN
    found = quantize(x, cast, noise=noise_for(x, cast))
    assert dequantize(found)[0, 128:].count_nonzero() == 0
    full = definition.filled(x, cast.tile)
    q = torch.zeros(1, 16, 16)
    assert_same(corrections(full, q, cast), torch.ones(1, 16))


@pytest.mark.parametrize("cast", CASTS, ids=str)
@pytest.mark.parametrize("is_known", [True, False])
def test_blame_finds_nothing_wrong_and_a_factor_wrong(cast, is_known):
    """The slope, with the noise of the cast and without it."""
    x = values(32, 512)
    noise = noise_for(x, cast)
    for factor, is_sound in ((1.0, True), (0.97, False)):
        found = Recast()
        found.add(x, quantize(x * factor, cast, noise=noise), noise if is_known else None)
        assert (found.over <= 1) == is_sound, (factor, found.over)


def test_kernels_that_correct_nothing_say_so():
    """The Triton kernels, on any device; that of C++ is in test_eden_cpp.py."""
    for cast in CASTS:
        refusal = cast_constants.refuse(cast)
        assert refusal is not None and refusal.code == "rounding"


def test_what_cannot_be_corrected_is_refused():
    for changes in (
        {"tile": (WHOLE, WHOLE), "scale": E4M3_TWO_LEVEL},
        {"tile": (1, WHOLE)},
        {"tile": (16, 16)},
        {"tile": (1, 48)},
        {"scale": E8M0_CEIL},
        {"headroom": 17 / 16, "scale": E4M3_TWO_LEVEL},
    ):
        with raises(ConfigError, "cast.corrected-scales"):
            replace(EDEN, **changes)
    for block in (0, 96, 2048, 2.0):
        with raises(ConfigError, "cast.block"):
            replace(EDEN, block=block)
    with raises(ConfigError, "quantize.noise"):
        quantize(values(), EDEN)
    with raises(ConfigError, "quantize.noise"):
        quantize(values(), INT4_EDEN, noise=values())
    with raises(ShapeError, "quantize.noise-shape"):
        quantize(values(), EDEN, noise=torch.rand(16, 256))


@pytest.mark.parametrize(
    "rotate", [None, Hadamard(block=64, signs="random"), Hadamard(block=128, signs="fixed")]
)
def test_a_product_without_its_rotation_is_refused(rotate):
    """Without new signs the correction is no expectation over anything."""
    for product in ("output", "grad_input", "grad_weight"):
        with raises(ConfigError, "recipe.unrotated-correction", product):
            Recipe(name="r", **{product: Gemm(lhs=EDEN, rhs=EDEN, rotate=rotate)})


def test_a_sum_over_128_is_in_one_order():
    """Of each tile first, then of the tiles of a block: what another kernel has to repeat."""
    full = torch.rand(1, 128, generator=torch.Generator().manual_seed(1))
    tiles = full.reshape(1, 8, 16)

    def halved(left: list[float]) -> float:
        while len(left) > 1:
            half = len(left) // 2
            left = [left[i] + left[i + half] for i in range(half)]
        return left[0]

    squares = halved([halved([float(v) ** 2 for v in tile]) for tile in tiles[0]])
    along = halved([halved([float(v) * math.floor(8 * float(v)) / 8 for v in t]) for t in tiles[0]])
    found = corrections(full, torch.floor(8 * tiles) / 8, EDEN)
    assert_same(found, torch.full((1, 8), squares / along))
