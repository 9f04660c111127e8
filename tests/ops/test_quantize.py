"""quantize and dequantize against a loop over tiles (exact), against error bounds derived from the format (bounded)."""

from __future__ import annotations

import hashlib
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge import formats, recipes, scaling
from narrowgauge.errors import ConfigError, ShapeError
from narrowgauge.formats import DYNAMIC_UNSIGNED, E2M1, E4M3, E5M2, INT4, INT8, NF4
from narrowgauge.ops.quantize import dequantize, quantize, tile_amax
from narrowgauge.ops.quantize.definition import tile_rms
from narrowgauge.recipe import CURRENT, WHOLE, Cast
from narrowgauge.scaling import (
    E4M3_TWO_LEVEL,
    E8M0_CEIL,
    E8M0_FLOOR,
    FP32,
    POW2,
    scale_shape,
    tile_sizes,
)
from tests.compare import assert_same, assert_sqnr, sqnr_db
from tests.oracles import (
    FLOAT32_MAX,
    INF,
    NAN,
    from_bits,
    plain,
    quantize_by_loop,
    smallest_scale,
)
from tests.raising import raises
from tests.selection import quick
from tests.test_formats import digests_under_flush_to_zero

TILES = (
    (WHOLE, WHOLE),
    (1, WHOLE),
    (WHOLE, 1),
    (1, 1),
    (1, 4),
    (3, 5),
    (2, WHOLE),
    (WHOLE, 3),
    (16, 16),
)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)

NVFP4 = Cast(format=E2M1, tile=(1, 16), scale=E4M3_TWO_LEVEL)
MXFP4 = Cast(format=E2M1, tile=(1, 32), scale=E8M0_CEIL)
INT4_ROWS = Cast(format=INT4, tile=(1, WHOLE))
NF4_64 = Cast(format=NF4, tile=(1, 64))
FOUR_BIT = (NVFP4, MXFP4, INT4_ROWS, NF4_64)
RECIPE_CASTS = (
    # To nearest, of the tensor's own amax: noise, calibration and scales that are chosen by their
    # errors (test_four_over_six.py) have tests of their own.
    tuple(
        dict.fromkeys(
            replace(cast, rounding="nearest", calibrate=CURRENT)
            for recipe in recipes.ALL
            for gemm in recipe.gemms().values()
            for cast in (gemm.lhs, gemm.rhs)
            if cast and not cast.scale.reads_elements
        )
    )
)
ALL_CASTS = (*RECIPE_CASTS, *FOUR_BIT)

casts = st.builds(
    Cast,
    format=st.sampled_from(formats.ELEMENTS),
    tile=st.sampled_from(TILES),
    scale=st.sampled_from([rule for rule in scaling.RULES if not rule.reads_elements]),
)
SPECIAL = (
    0.0,
    -0.0,
    1e-40,
    -1e-45,
    2.0**-126,
    1e-30,
    3e38,
    -FLOAT32_MAX,
    INF,
    -INF,
    NAN,
    448.0,
    6.0,
    -1.0,
)


@st.composite
def matrices(draw, special=SPECIAL, exponents=(-120, 118), dtypes=DTYPES):
    """[rows, columns] with ragged and empty shapes, any layout, a wide range of magnitudes and a few special values."""
    rows, columns = draw(st.integers(0, 9)), draw(st.integers(0, 37))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    center, width = draw(st.integers(*exponents)), draw(st.sampled_from([0, 3, 12]))
    exponent = np.clip(center + width * generator.standard_normal((rows, columns)), -149, 120)
    values = (generator.standard_normal((rows, columns)) * np.exp2(exponent)).astype(np.float32)
    for _ in range(draw(st.integers(0, 3)) if values.size and special else 0):
        values.flat[draw(st.integers(0, values.size - 1))] = draw(st.sampled_from(special))
    x = torch.from_numpy(values).to(draw(st.sampled_from(dtypes)))
    layout = draw(st.sampled_from(["rows", "columns", "strided"]))
    if layout == "columns":
        return x.T.contiguous().T
    if layout == "strided":
        wide = torch.full((rows, 2 * columns), NAN, dtype=x.dtype)
        wide[:, ::2] = x
        return wide[:, ::2]
    return x


def matrix(rows, columns, seed=0):
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))


def assert_same_quantization(actual, expected):
    assert_same(actual.data, expected.data)
    assert_same(plain(actual.scale), plain(expected.scale))
    assert (actual.global_scale is None) == (expected.global_scale is None)
    if expected.global_scale is not None:
        assert_same(plain(actual.global_scale), plain(expected.global_scale))


# --- the definition --------------------------------------------------------------------------------------------------------


@given(x=matrices(), cast=casts)
@settings(max_examples=400, deadline=None, derandomize=True)
def test_quantize_is_a_loop_over_tiles(x, cast):
    """Scales by fractions, one float32 reciprocal, nearest value by search, tile after tile (exact).

    Ragged and empty shapes, all layouts and dtypes, every format and rule, subnormals, infinities and NaN.
    """
    q = quantize(x, cast)
    elements, scale, global_scale = quantize_by_loop(x, cast)
    assert_same(plain(q.scale), plain(scale))
    if global_scale is not None:
        assert_same(plain(q.global_scale), plain(global_scale))
    assert_same(plain(q.values()), elements)


@given(x=matrices(), cast=casts)
@settings(max_examples=100, deadline=None, derandomize=True)
def test_expanded_values_are_the_codes_decoded(x, cast):
    """In float32 and, except for tables, in bfloat16; the numbers are the same to the bit."""
    q = quantize(x, cast)
    for dtype in (
        (torch.float32,)
        if cast.format.name in ("nf4", "dynamic-signed", "dynamic-unsigned")
        else (
            torch.float32,
            torch.bfloat16,
        )
    ):
        expanded = quantize(x, cast, expand=dtype)
        assert expanded.data.dtype == dtype and expanded.is_expanded
        assert_same(plain(expanded.data.float()), plain(q.values()))
        assert_same(plain(expanded.scale), plain(q.scale))
        assert_same(plain(dequantize(expanded)), plain(dequantize(q)))


@pytest.mark.parametrize("cast", ALL_CASTS, ids=str)
@pytest.mark.parametrize("shape", [(33, 130), (1, 1), (128, 256), (5, 31)], ids=str)
def test_casts_of_recipes_in_every_form(cast, shape):
    """Codes, float32 and bfloat16 hold the same numbers; the definition holds too (exact)."""
    x = matrix(*shape)
    q = quantize(x, cast)
    elements, scale, _ = quantize_by_loop(x, cast)
    assert_same(q.values(), elements)
    assert_same(q.scale, scale)
    for dtype in (torch.float32, torch.bfloat16)[: 1 if cast.format is NF4 else 2]:
        assert_same(dequantize(quantize(x, cast, expand=dtype)), dequantize(q))


def test_dequantize_multiplies_once_and_rounds_once():
    x = matrix(7, 40)
    for cast in ALL_CASTS:
        q = quantize(x, cast)
        a, b = tile_sizes(q.shape, cast.tile)
        full = q.full_scale().repeat_interleave(a, 0).repeat_interleave(b, 1)[:7, :40]
        assert_same(dequantize(q), q.values() * full)
        for dtype in (torch.bfloat16, torch.float16, torch.float64):
            assert_same(dequantize(q, dtype), (q.values() * full).to(dtype))


def test_quantizing_again_changes_nothing():
    """A tile's decoded values with the same scale are codes again (exact)."""
    x = matrix(9, 70)
    for cast in ALL_CASTS:
        if cast.scale.two_level or cast.format is NF4:
            continue
        q = quantize(x, cast)
        again = quantize(dequantize(q), cast, amax=q.scale * cast.format.max)
        assert_same(again.data, q.data)
        assert_same(again.scale, q.scale)


@given(
    x=matrices(special=(), exponents=(-60, 60), dtypes=(torch.float32,)),
    cast=casts,
    power=st.integers(-30, 30),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_powers_of_two_pass_through(x, cast, power):
    """Q(2**k x) = 2**k Q(x), by the scales alone; far from the ends of float32 (exact)."""
    x = torch.where(x.abs() < 2.0**-85, 0.0, x)
    q, shifted = quantize(x, cast), quantize(x * 2.0**power, cast)
    assert_same(shifted.data, q.data)
    nonzero = tile_amax(x, cast.tile) > 0
    if cast.scale.two_level:
        assert_same(shifted.scale, q.scale)
    else:
        assert_same(shifted.scale[nonzero], q.scale[nonzero] * 2.0**power)
    assert_same(dequantize(shifted), dequantize(q) * 2.0**power)


# --- tiles are independent ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cast", [cast for cast in ALL_CASTS if not cast.scale.two_level], ids=str)
def test_shards_at_tile_edges_are_quantized_alike(cast):
    """Shard-then-quantize is quantize-then-shard, along both axes where tiles end there (exact)."""
    x = matrix(256, 320, seed=1)
    q = quantize(x, cast)
    if cast.tile[0] != WHOLE:
        top, bottom = quantize(x[:128], cast), quantize(x[128:], cast)
        assert_same(torch.cat((top.data, bottom.data)), q.data)
        assert_same(torch.cat((top.scale, bottom.scale)), q.scale)
    if cast.tile[1] != WHOLE:
        left, right = quantize(x[:, :128], cast), quantize(x[:, 128:], cast)
        assert_same(torch.cat((left.data, right.data), dim=1), q.data)
        assert_same(torch.cat((left.scale, right.scale), dim=1), q.scale)


@given(
    cast=casts.filter(lambda cast: not cast.scale.two_level),
    row=st.integers(0, 6),
    column=st.integers(0, 22),
    bad=st.sampled_from([NAN, INF, -INF]),
)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_poison_stays_in_its_tile(cast, row, column, bad):
    """A non-finite element makes the scale and all of its tile NaN, and nothing else (exact)."""
    x = matrix(7, 23)
    poisoned = x.clone()
    poisoned[row, column] = bad
    q, p = quantize(x, cast), quantize(poisoned, cast)
    a, b = tile_sizes((7, 23), cast.tile)
    tile = torch.zeros(7, 23, dtype=torch.bool)
    tile[row // a * a : row // a * a + a, column // b * b : column // b * b + b] = True
    assert dequantize(p)[tile].isnan().all()
    assert_same(dequantize(p)[~tile], dequantize(q)[~tile])
    assert int(p.scale.isnan().sum()) == 1 and p.scale[row // a, column // b].isnan()


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_poison_reaches_every_tile_of_a_two_level_cast(bad):
    """They share the float32 of the tensor."""
    x = matrix(4, 40)
    x[2, 3] = bad
    assert dequantize(quantize(x, NVFP4)).isnan().all()


@pytest.mark.parametrize("cast", ALL_CASTS, ids=str)
def test_zeros_stay_zero(cast):
    for zero in (torch.zeros(4, 40), -torch.zeros(4, 40), torch.full((4, 40), 1e-40)):
        q = quantize(zero, cast)
        assert (dequantize(q) == 0).all() and q.scale.isfinite().all()
        assert (q.scale == (0 if cast.scale.two_level else 1)).all()


@pytest.mark.parametrize("cast", ALL_CASTS, ids=str)
def test_one_outlier_costs_its_own_tile_only(cast):
    """1e37 among numbers near 1: its tile is flushed, finite, and other tiles do not see it."""
    x = matrix(4, 256)
    loud = x.clone()
    loud[1, 70] = 1e37
    q, p = quantize(x, cast), quantize(loud, cast)
    assert dequantize(p).isfinite().all()
    if not cast.scale.two_level:
        untouched = p.scale == q.scale
        assert int((~untouched).sum()) == 1
    assert dequantize(p)[1, 70].item() == pytest.approx(1e37, rel=0.2)


# --- inputs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cast", ALL_CASTS, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_type_of_the_input_does_not_matter(cast, dtype):
    """Every float type is read as float32 (exact)."""
    x = matrix(20, 150).to(dtype)
    assert_same_quantization(quantize(x, cast), quantize(x.float(), cast))


def test_small_fp16_numbers_are_not_lost():
    """float16 subnormals are normal in float32: amax 6e-8 is an ordinary tile, not zero."""
    x = torch.tensor([[2.0**-24, -3 * 2.0**-24]], dtype=torch.float16)
    for cast in ALL_CASTS:
        assert sqnr_db(x.float(), dequantize(quantize(x, cast))) > 12, str(cast)


def test_float64_beyond_float32_is_poison():
    assert (
        quantize(torch.tensor([[1e300, 1.0]], dtype=torch.float64), Cast(format=E4M3))
        .scale.isnan()
        .all()
    )


@pytest.mark.parametrize("cast", ALL_CASTS, ids=str)
@pytest.mark.parametrize("shape", [(0, 0), (0, 5), (5, 0), (0, 64), (64, 0)], ids=str)
def test_empty_tensors_pass_through(cast, shape):
    for expand in (None, torch.float32):
        q = quantize(torch.empty(shape), cast, expand=expand)
        assert q.shape == shape and dequantize(q).shape == shape
        assert tuple(q.scale.shape) == scale_shape(shape, cast.tile)
        assert (
            quantize(torch.empty(shape), cast, amax=torch.ones(1, 1), expand=expand).shape == shape
        )


def test_quantize_leaves_autograd_and_its_input_alone():
    x = matrix(4, 40).requires_grad_()
    before = x.detach().clone()
    for cast in ALL_CASTS:
        assert not dequantize(quantize(x, cast)).requires_grad
    assert_same(x.detach(), before)


# --- given amax ------------------------------------------------------------------------------------------------------------


def test_a_given_amax_replaces_the_tensors_own():
    """Delayed scaling: larger elements saturate, infinity too (exact)."""
    x = torch.tensor([[1.0, -3.0, 100.0, INF]])
    q = quantize(x, Cast(format=E4M3), amax=torch.tensor([[2.0]]))
    assert q.scale.item() == FP32(torch.tensor(2.0), E4M3).item()
    assert q.values().tolist() == [[224.0, -448.0, 448.0, 448.0]]
    for cast in ALL_CASTS:
        y = matrix(20, 150)
        own = tile_amax(y, cast.tile)
        assert_same_quantization(quantize(y, cast, amax=own), quantize(y, cast))
        assert_same_quantization(
            quantize(y, cast, amax=torch.full((1, 1), 3.0)),
            quantize(y, cast, amax=torch.full_like(own, 3.0)),
        )
        assert_same_quantization(quantize(y, cast, amax=own.double()), quantize(y, cast))


@pytest.mark.parametrize("bad", [NAN, INF])
def test_a_poisoned_amax_poisons(bad):
    for cast in ALL_CASTS:
        assert dequantize(quantize(matrix(2, 20), cast, amax=torch.tensor([[bad]]))).isnan().all()


# --- amax ------------------------------------------------------------------------------------------------------------------


@given(x=matrices(), tile=st.sampled_from(TILES))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_tile_amax_is_the_largest_magnitude_of_each_tile(x, tile):
    a, b = tile_sizes(tuple(x.shape), tile)
    expected = [
        [x[i : i + a, j : j + b].abs().max().float() for j in range(0, x.shape[1], b)]
        for i in range(0, x.shape[0], a)
    ]
    expected = torch.tensor(expected).reshape(scale_shape(tuple(x.shape), tile))
    assert_same(plain(tile_amax(x, tile)).abs(), plain(expected))


@pytest.mark.parametrize("tile", TILES, ids=str)
def test_tile_amax_sees_nan_in_every_position(tile):
    """Beside infinity too: a maximum by comparison would drop a NaN that comes first, or last."""
    a, b = tile_sizes((4, 6), tile)
    for row in range(4):
        for column in range(6):
            x = torch.full((4, 6), INF)
            x[row, column] = NAN
            amax = tile_amax(x, tile)
            assert amax[row // a, column // b].isnan() and int(amax.isnan().sum()) == 1


@pytest.mark.parametrize(
    ("tile", "huge", "traced"),
    [
        ((WHOLE, WHOLE), 1e30, False),
        ((WHOLE, WHOLE), 1e30, True),
        ((1, WHOLE), -3e38, False),
        ((3, 16), 1.9e20, False),
    ],
    ids=str,
)
def test_an_outlier_whose_square_overflows_leaves_a_finite_spread(tile, huge, traced, monkeypatch):
    """Bounded: each square and each sum of float32 errs by 2**-24 at most, 280 of them. Exact in the tiles beside it."""
    monkeypatch.setattr(
        torch.compiler, "is_compiling", lambda: traced
    )  # as a compiler reads it, which cannot look at values
    x = torch.randn(7, 40, generator=torch.Generator().manual_seed(3))
    expected = tile_rms(x, tile)
    x[4, 18] = huge
    found, outer, inner = tile_rms(x, tile), *tile_sizes(tuple(x.shape), tile)
    hit = (4 // outer, 18 // inner)
    part = x[hit[0] * outer : (hit[0] + 1) * outer, hit[1] * inner : (hit[1] + 1) * inner].double()
    assert float(found[hit]) == pytest.approx(float(part.square().mean().sqrt()), rel=1e-5)
    expected[hit] = found[hit]
    assert_same(found, expected)
    for bad in (INF, NAN):
        x[4, 19] = bad
        assert not tile_rms(x, tile)[hit].isfinite()


def test_tile_amax_wants_two_axes():
    with raises(ShapeError, "quantize.amax-axes", "[3]", "tile_amax"):
        tile_amax(torch.ones(3), (1, 1))


# --- errors stay within what the format promises ---------------------------------------------------------------------------


@pytest.mark.slow
@given(
    x=matrices(special=(0.0, -0.0, 1e-40, 2.0**-126, 1e-30, 1e30), dtypes=(torch.float32,)),
    cast=casts.filter(
        lambda cast: cast.scale in (FP32, POW2) and not isinstance(cast.format, formats.TableFormat)
    ),
)
@settings(max_examples=200, deadline=None, derandomize=True)
def test_the_error_is_at_most_half_a_gap(x, cast):
    """Q6. With u = 2**-24: y = x / s (1 + u), value v = y (1 + h) or y + g / 2, result v s (1 + u); so

    abs(error) <= max(2**-(mantissa + 1) abs(x), s g / 2) + 4 u abs(x), g the smallest step, mantissa of the format.
    """
    q = quantize(x, cast)
    a, b = tile_sizes(q.shape, cast.tile)
    scale = (
        q.scale.double().repeat_interleave(a, 0).repeat_interleave(b, 1)[: x.shape[0], : x.shape[1]]
    )
    relative = (
        2.0 ** -(cast.format.mantissa + 1) if isinstance(cast.format, formats.FloatFormat) else 0.0
    )
    exact = x.double()
    bound = (
        torch.maximum(relative * exact.abs(), scale * cast.format.smallest / 2)
        + 4 * 2.0**-24 * exact.abs()
    )
    assert ((dequantize(q).double() - exact).abs() <= bound).all()


@pytest.mark.parametrize(
    ("cast", "floor_db"),
    [
        # Q12: measured on 2**20 Gaussian numbers, seed 0, less half a decibel.
        (Cast(format=E4M3), 31.56 - 0.5),
        (Cast(format=E5M2), 25.57 - 0.5),
        (Cast(format=INT8, tile=(1, 128)), 43.77 - 0.5),
        (Cast(format=INT4, tile=(1, 32)), 20.26 - 0.5),
        (Cast(format=INT4, tile=(1, 128)), 18.61 - 0.5),
        (Cast(format=INT4), 14.14 - 0.5),
        # Floors of peers' own tests (reference, section 4): rowwise, blockwise, MXFP8, MXFP4, NVFP4.
        (Cast(format=E4M3, tile=(1, WHOLE), scale=POW2), 25),
        (Cast(format=E4M3, tile=(1, 128), scale=POW2), 28),
        (Cast(format=E4M3, tile=(128, 128), scale=POW2), 28),
        (Cast(format=E4M3, tile=(1, 32), scale=E8M0_CEIL), 18),
        (Cast(format=E4M3, tile=(1, 32), scale=E8M0_FLOOR), 18),
        (MXFP4, 13),
        (NVFP4, 8),
    ],
    ids=str,
)
def test_noise_of_a_gaussian_tensor(cast, floor_db):
    x = matrix(1024, 1024)
    assert_sqnr(dequantize(quantize(x, cast)), x, floor_db)


def test_smaller_tiles_are_better():
    x = matrix(64, 512) * torch.exp2(4 * matrix(64, 512, seed=1))
    noise = [
        sqnr_db(x, dequantize(quantize(x, Cast(format=INT8, tile=tile))))
        for tile in ((WHOLE, WHOLE), (1, WHOLE), (1, 32))
    ]
    assert noise == sorted(noise)


def test_the_top_of_float32_decodes_to_infinity():
    """Above 255.5 * 2**120 the nearest 4-bit mantissa is 2**128: infinity, as when float32 is rounded to bfloat16.

    Not poison: codes and scale are finite. A smaller scale would saturate what POW2 promises to keep.
    """
    q = quantize(torch.tensor([[FLOAT32_MAX]]), Cast(format=E4M3, scale=POW2))
    assert q.scale.item() == 2.0**120 and q.values().item() == 256
    assert dequantize(q).item() == INF == torch.tensor(FLOAT32_MAX).to(torch.bfloat16).item()
    largest_kept = torch.tensor([[247.0 * 2.0**120]])
    assert (
        dequantize(quantize(largest_kept, Cast(format=E4M3, scale=POW2))).item() == 240 * 2.0**120
    )


# --- stochastic rounding -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cast", quick(ALL_CASTS[::4], ALL_CASTS), ids=str)
def test_the_mean_over_all_noise_is_the_input(cast):
    """Noise k / 256 for all k: the mean is within one step of the noise, a 256th of the gap (exact counting).

    Two-level scales round down by up to 2**-4 and may saturate the top of a tile, which no noise undoes.
    """
    cast = replace(cast, rounding="stochastic")
    x = matrix(4, 64)
    amax = tile_amax(x, cast.tile) * (1.1 if cast.scale.two_level else 1.0)
    total = sum(
        dequantize(quantize(x, cast, amax=amax, noise=torch.full_like(x, k / 256))).double()
        for k in range(256)
    )
    low = dequantize(quantize(x, cast, amax=amax, noise=torch.full_like(x, 1 - 2.0**-24))).double()
    high = dequantize(quantize(x, cast, amax=amax, noise=torch.zeros_like(x))).double()
    assert ((total / 256 - x).abs() <= (high - low) / 256 + 1e-6 * x.abs()).all()
    assert ((low <= x + 1e-6 * x.abs()) & (x <= high + 1e-6 * x.abs())).all()


def test_noise_is_taken_elementwise_whatever_the_layout():
    """The same draw for the same element in any form of the tensor, so that a recompute can replay it (exact)."""
    cast = Cast(format=E4M3, tile=(1, 16), scale=POW2, rounding="stochastic")
    x, noise = matrix(6, 50), torch.rand(6, 50)
    expected = quantize(x, cast, noise=noise)
    assert_same_quantization(
        quantize(x.T.contiguous().T, cast, noise=noise.T.contiguous().T), expected
    )
    assert_same(
        dequantize(quantize(x, cast, noise=noise, expand=torch.bfloat16)), dequantize(expected)
    )
    assert_same_quantization(
        quantize(x[2:4], cast, noise=noise[2:4]), quantize(x[2:4].clone(), cast, noise=noise[2:4])
    )
    assert_same(quantize(x[2:4], cast, noise=noise[2:4]).data, expected.data[2:4])


# --- refusals ----------------------------------------------------------------------------------------------------------------


STOCHASTIC = Cast(format=E4M3, rounding="stochastic")


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda: quantize(torch.ones(3), INT4_ROWS),
            ShapeError,
            r"x is \[3\] torch.float32.*x\.flatten\(0, -2\)",
        ),
        (lambda: quantize(torch.ones(1, 2, 3), INT4_ROWS), ShapeError, r"x is \[1, 2, 3\]"),
        (
            lambda: quantize(torch.ones(2, 3).int(), INT4_ROWS),
            ShapeError,
            r"torch.int32; it must be a two-dimensional float",
        ),
        (
            lambda: quantize(torch.ones(4, 40), NVFP4, amax=torch.ones(4, 2)),
            ShapeError,
            r"amax is \[4, 2\]; tiles of \(1, 16\) on \[4, 40\] need \[4, 3\], or \[1, 1\] for all",
        ),
        (
            lambda: quantize(torch.ones(4, 4), Cast(format=E4M3), amax=torch.ones(())),
            ShapeError,
            r"amax is \[\]",
        ),
        (
            lambda: quantize(torch.ones(2, 3), STOCHASTIC),
            ConfigError,
            r"draws random numbers, but noise was not given",
        ),
        (
            lambda: quantize(torch.ones(2, 3), Cast(format=E4M3), noise=torch.rand(2, 3)),
            ConfigError,
            r"draws no random numbers, but noise was given",
        ),
        (
            lambda: quantize(torch.ones(2, 3), STOCHASTIC, noise=torch.rand(3, 2)),
            ShapeError,
            r"noise is \[3, 2\], x \[2, 3\]; .* one number for each of its elements, \[2, 3\]",
        ),
        (
            lambda: quantize(torch.ones(2, 3), NF4_64, expand=torch.bfloat16),
            ConfigError,
            r"levels of nf4 are not exact in torch.bfloat16\. Use expand=torch.float32",
        ),
        (
            lambda: quantize(torch.ones(2, 3), Cast(format=E4M3), expand=torch.float16),
            ConfigError,
            r"expand is torch.float16; values are kept in torch.float32 or torch.bfloat16",
        ),
    ],
)
def test_calls_that_cannot_work_are_refused_in_words(call, error, words):
    with pytest.raises(error, match=words):
        call()


# --- flush-to-zero -------------------------------------------------------------------------------------------------------------


def digests() -> dict[str, str]:
    """SHA-256 of all that quantize and dequantize give, on tensors of every magnitude, made without float arithmetic."""
    generator = np.random.default_rng(9)
    found = {}
    for lowest in (0, 1, 5, 10, 12, 20, 127, 230):  # exponent fields; 0 is subnormal
        exponent = generator.integers(lowest, lowest + 14, (8, 48)) * (
            generator.random((8, 48)) > 0.1
        )
        exponent[3] = 0  # a row of subnormals
        mantissa, sign = generator.integers(0, 2**23, (8, 48)), generator.integers(0, 2, (8, 48))
        x = from_bits((sign << 31 | exponent << 23 | mantissa).astype(np.uint32))
        for format in (E4M3, E5M2, E2M1, INT8, NF4, DYNAMIC_UNSIGNED):
            for rule in scaling.RULES:
                for tile in ((1, WHOLE), (3, 16)):
                    if rule.reads_elements and WHOLE in tile:
                        continue
                    q = quantize(x, Cast(format=format, tile=tile, scale=rule))
                    floats = [plain(result) for result in (q.scale, q.full_scale(), dequantize(q))]
                    parts = [
                        result.contiguous().numpy().tobytes()
                        for result in (q.data.view(torch.uint8), *floats)
                    ]
                    found[f"{lowest} {q.cast}"] = hashlib.sha256(b"".join(parts)).hexdigest()
    return found


@pytest.mark.slow
def test_flush_to_zero_changes_nothing():
    """Codes, scales and decoded values, down to tensors of subnormals only."""
    here, flushed = digests(), digests_under_flush_to_zero("tests.ops.test_quantize")
    assert [name for name in here if here[name] != flushed[name]] == []


def test_every_smallest_scale_is_reached():
    """The tensors above include some whose scale is floored (control)."""
    x = torch.full((1, 4), 2.0**-125)
    for format in formats.ELEMENTS:
        assert quantize(x, Cast(format=format)).scale.item() == smallest_scale(format)
        assert math.isfinite(dequantize(quantize(x, Cast(format=format)))[0, 0].item())


# --- wrong rules -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("tile", [(1, WHOLE), (1, 8)], ids=str)
def test_a_division_would_be_noticed(tile):
    """Control: at 17/16 of a scale, a tie in e4m3, x * (1 / s) falls to the other side than x / s."""
    amax = (torch.linspace(1, 2, 4000) * 448)[:, None]
    scale = FP32(amax, E4M3)
    x = scale * (17 / 16)
    q = quantize(x, Cast(format=E4M3, tile=tile), amax=amax)
    assert_same(q.values(), E4M3.round(x * (1 / q.scale)))
    assert 0.01 < (E4M3.round(x / q.scale) != q.values()).double().mean() < 0.5


@pytest.mark.parametrize(
    "call",
    [
        lambda q: quantize([1.0], q.cast),
        lambda q: quantize(q, q.cast),
        lambda q: quantize(torch.zeros(2, 2), "e4m3"),
        lambda q: dequantize(torch.zeros(2, 2)),
        lambda q: dequantize(q, torch.int32),
        lambda q: dequantize(q, "float32"),
    ],
)
def test_wrong_types_are_told(call):
    with pytest.raises(ConfigError, match=r"quantize: .*; give a"):
        call(quantize(torch.zeros(2, 2), Cast(format=E4M3)))
