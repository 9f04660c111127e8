"""NVFP4 and MXFP4 casts against torchao's (exact), and what keeps stochastic rounding unbiased (statistical).

Where the two differ, the difference is a test too: all-zero tensors and tiles, tiles far below the tensor's amax, tensors at the
lower end of float32, and float32 amax a rounding error above a power of two.
"""

from __future__ import annotations

import pytest
import torch

from narrowgauge.formats import E2M1
from narrowgauge.ops.quantize import dequantize, quantize, tile_amax
from narrowgauge.recipe import Cast
from narrowgauge.scaling import E4M3_TWO_LEVEL, E4M3_TWO_LEVEL_CEIL, E8M0_CEIL, E8M0_FLOOR
from tests.compare import assert_same, z_limit, z_score
from tests.selection import quick

NVFP4 = Cast(format=E2M1, tile=(1, 16), scale=E4M3_TWO_LEVEL)
MX_RULES = {"FLOOR": E8M0_FLOOR, "RCEIL": E8M0_CEIL}
DTYPES = (torch.float32, torch.bfloat16)
TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # midpoints of 0, 0.5, 1, 1.5, 2, 3, 4, 6


def torchao_nvfp4(x):
    """(scales as float32, scale of the tensor, packed codes)"""
    module = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    whole = module.per_tensor_amax_to_scale(x.abs().max())
    scale, codes = module.nvfp4_quantize(x, 16, whole)
    return scale.float(), whole, codes


def torchao_mx(x, mode):
    """(scales as float32, packed codes)"""
    module = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    scale, codes = module.to_mx(x, torch.float4_e2m1fn_x2, 32, module.ScaleCalculationMode[mode])
    return scale.float(), codes


def random_rows(seed, rows=256, columns=1024, spread=1.0):
    """Rows of normal numbers whose sizes spread over `spread` natural orders of magnitude."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.exp(spread * torch.randn(rows, 1, generator=generator))
    return torch.randn(rows, columns, generator=generator) * sizes


def tie_rows():
    """Every value and tie of e2m1, the floats next to each, both signs and zeros, at powers of two; the amax of each tile is 6."""
    ties = torch.tensor(TIES)
    near = torch.cat((ties, ties.nextafter(torch.tensor(9.0)), ties.nextafter(torch.tensor(0.0))))
    values = torch.cat((near, E2M1.values()[:8], torch.zeros(1)))  # 30 elements
    signed = torch.cat((values, torch.tensor([-0.0, 6.0]), -values, torch.tensor([0.0, -6.0])))
    tiles = signed.reshape(4, 16).clone()
    tiles[:, 0] = 6.0
    return (tiles.reshape(1, 64) * 2.0 ** torch.arange(-20, 20)[:, None]).contiguous()


ORDINARY = {
    "random": lambda: random_rows(0),
    "random, wide": lambda: random_rows(1, spread=2.0),
    "one large element": lambda: torch.cat(
        (torch.full((64, 1), 3000.0), random_rows(2, 64, 63)), dim=1
    ),
    "gradients": lambda: random_rows(3) * 1e-7,
    "tiny": lambda: random_rows(4, 64, 64, 0.5) * 1e-28,
    "large": lambda: random_rows(5, 64, 64, 0.5) * 1e36,
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ORDINARY)
def test_nvfp4_is_torchaos(kind, dtype):
    """Scales, the tensor's scale and packed codes (exact)."""
    x = ORDINARY[kind]().to(dtype)
    scale, whole, codes = torchao_nvfp4(x)
    q = quantize(x, NVFP4)
    ordinary = scale > 2.0**-6  # torchao raises all smaller ones to it; see below
    assert ordinary.double().mean() > 0.95
    assert_same(q.scale[ordinary], scale[ordinary])
    assert_same(q.global_scale, whole)
    assert_same(q.data.reshape(*scale.shape, 8)[ordinary], codes.reshape(*scale.shape, 8)[ordinary])


def test_nvfp4_is_torchaos_at_ties():
    """Tiles at 2**k of a tensor whose own scale is a power of two, so that ties are ties (exact)."""
    rows = (
        tie_rows()[16:26] * 448
    )  # the smallest tile is 2**-9 of the largest: scales of 0.875 and more
    scale, whole, codes = torchao_nvfp4(rows)
    q = quantize(rows, NVFP4)
    assert_same(q.scale, scale)
    assert_same(q.global_scale, whole)
    assert_same(q.data, codes)


def test_dequantized_nvfp4_is_torchaos():
    """decode * (scale * the tensor's scale), rounded in this order by both (exact)."""
    module = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    x = random_rows(6, 32, 64, 0.3)
    whole = module.per_tensor_amax_to_scale(x.abs().max())
    theirs = module.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=whole).dequantize(torch.float32)
    assert_same(dequantize(quantize(x, NVFP4)), theirs)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mode", MX_RULES)
@pytest.mark.parametrize("kind", [*ORDINARY, "ties"])
def test_mxfp4_is_torchaos(kind, mode, dtype):
    """Scales and packed codes (exact)."""
    x = (tie_rows() if kind == "ties" else ORDINARY[kind]()).to(dtype)
    scale, codes = torchao_mx(x, mode)
    q = quantize(x, Cast(format=E2M1, tile=(1, 32), scale=MX_RULES[mode]))
    assert_same(q.scale, scale)
    assert_same(q.data, codes)


# --- where they differ -------------------------------------------------------------------------------------------------------


def test_all_zero_nvfp4_is_zero():
    """torchao divides by its scale of zero: NaN scales and codes that mean 6. Ours are zeros with a scale of zero."""
    zeros = torch.zeros(4, 64)
    assert dequantize(quantize(zeros, NVFP4)).count_nonzero() == 0
    assert torchao_nvfp4(zeros)[0].isnan().all()


def test_zero_tiles_hold_the_same_codes():
    """Beside other tiles: codes of zero in both (exact); torchao's scale is its smallest, ours 0 (NVFP4) or 1 (MX)."""
    x = random_rows(7, 8, 64)
    x[3] = 0
    scale, _, codes = torchao_nvfp4(x)
    q = quantize(x, NVFP4)
    assert_same(q.data, codes)
    assert (scale[3] == 2.0**-6).all() and (q.scale[3] == 0).all()
    for mode, rule in MX_RULES.items():
        scale, codes = torchao_mx(x, mode)
        q = quantize(x, Cast(format=E2M1, tile=(1, 32), scale=rule))
        assert_same(q.data, codes)
        assert (scale[3] == 2.0**-127).all() and (q.scale[3] == 1).all()


def test_small_nvfp4_tiles_keep_e4m3s_subnormal_scales():
    """Tiles with an amax below 2**-14.8 of the tensor's: torchao's scale stays at 2**-6, ours goes on to 2**-9.

    The finer scale is TransformerEngine's too, and its error is smaller; below 2**-10 of the wanted scale both give zeros.
    """
    x = random_rows(8, 64, 256)
    x[0, 0] = 448 * 6.0  # the tensor's scale is 1
    x[1:] *= 6 * 2.0**-8 / tile_amax(x[1:], (1, -1))
    scale, whole, _ = torchao_nvfp4(x)
    q = quantize(x, NVFP4)
    assert whole == 1 and (scale[1:] == 2.0**-6).all() and (q.scale[1:] <= 2.0**-8).all()
    module = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    theirs = module.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=whole).dequantize(torch.float32)
    error, coarser = (dequantize(q) - x)[1:].square().sum(), (theirs - x)[1:].square().sum()
    assert error < 0.5 * coarser


def test_rounding_up_is_exact_next_to_powers_of_two():
    """torchao takes ceil(log2(amax / 6)) in float32, which can be a power too low just above one: the top saturates there."""
    x = torch.full((1, 32), 6.0 * 2**20).nextafter(torch.tensor(1e9))
    ours = quantize(x, Cast(format=E2M1, tile=(1, 32), scale=E8M0_CEIL))
    assert ours.scale.item() == 2.0**21 and torchao_mx(x, "RCEIL")[0].item() == 2.0**20


# --- guards ------------------------------------------------------------------------------------------------------------------

GUARDED = {
    "MXFP4 4/3": Cast(
        format=E2M1, tile=(1, 32), scale=E8M0_FLOOR, rounding="stochastic", headroom=4 / 3
    ),
    "MXFP4 ceil": Cast(format=E2M1, tile=(1, 32), scale=E8M0_CEIL, rounding="stochastic"),
    "NVFP4 17/16": Cast(
        format=E2M1, tile=(1, 16), scale=E4M3_TWO_LEVEL, rounding="stochastic", headroom=17 / 16
    ),
    "NVFP4 ceil": Cast(format=E2M1, tile=(1, 16), scale=E4M3_TWO_LEVEL_CEIL, rounding="stochastic"),
}
UNGUARDED = {
    "MXFP4": Cast(format=E2M1, tile=(1, 32), scale=E8M0_FLOOR, rounding="stochastic"),
    "NVFP4": Cast(format=E2M1, tile=(1, 16), scale=E4M3_TWO_LEVEL, rounding="stochastic"),
}
REPLICATES = 256
ONES_IN = 1e-4  # false alarms, over all directions of a cast together


def gradient(rows=32, columns=256):
    """Rows of very different sizes, as gradients have."""
    return random_rows(9, rows, columns, 1.5)


def projections(cast, x, directions):
    """<Q(x), d> / <x, d> for REPLICATES draws, [directions, REPLICATES]."""
    found = []
    for _ in range(REPLICATES):
        values = dequantize(quantize(x, cast, noise=torch.rand_like(x))).double()
        found.append(torch.stack([(values * d).sum() / (x.double() * d).sum() for d in directions]))
    return torch.stack(found, dim=1)


def directions_of(x):
    """x itself, its largest elements, and 16 random ones (made to overlap with x, since a sum near zero tells nothing)."""
    generator = torch.Generator().manual_seed(11)
    largest = torch.where(x.abs() > 0.8 * x.abs().amax(dim=1, keepdim=True), x, 0.0)
    noisy = [torch.rand(x.shape, generator=generator) * x for _ in range(16)]
    return [d.double() for d in (x, largest, *noisy)]


def largest_z(cast, x):
    found = projections(cast, x, directions_of(x))
    return max(abs(z_score(a, 1.0, a.std().item())) for a in found)


@pytest.mark.parametrize(
    "cast", quick([GUARDED["MXFP4 4/3"], GUARDED["NVFP4 ceil"]], GUARDED.values()), ids=GUARDED
)
def test_guarded_casts_are_unbiased(cast):
    """Mean projection on the true direction, the tops of the rows and 16 random directions."""
    assert largest_z(cast, gradient()) < z_limit(ONES_IN, 18)


@pytest.mark.parametrize("cast", UNGUARDED.values(), ids=UNGUARDED)
def test_unguarded_casts_are_biased(cast):
    """Negative control: what saturates is lost, and the same test sees it."""
    assert largest_z(cast, gradient()) > z_limit(ONES_IN, 18)


@pytest.mark.parametrize("cast", GUARDED.values(), ids=GUARDED)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_guarded_casts_never_saturate(cast, dtype):
    """No element passes 6 by more than the rounding of the division, over all amax mantissas of bfloat16 and a wide range."""
    mantissas = (torch.arange(128, 256) / 128)[:, None] * torch.linspace(-1, 1, 32)
    x = torch.cat(
        (mantissas, mantissas * 2.0 ** torch.randint(-5, 5, (128, 1)), random_rows(12, 512, 32))
    ).to(dtype)
    q = quantize(x, cast, noise=torch.rand(x.shape))
    tile = cast.tile[1]
    scaled = x.float().reshape(len(x), -1, tile) / q.full_scale()[:, :, None]
    assert scaled.abs().max() <= 6 * (1 + 2.0**-22)


def test_unguarded_nvfp4_saturates_one_element_in_thirty():
    """Of the largest elements of normal tiles; the figure is what the guard is for (arXiv 2509.25149 has none)."""
    x = torch.randn(512, 1024)
    q = quantize(x, NVFP4)
    scaled = x.reshape(512, 64, 16).abs() / q.full_scale()[:, :, None]
    assert 6.2 < scaled.max() <= 6.375 * (1 + 1e-6)
    assert 0.02 < (scaled > 6).double().mean() < 0.05


def test_small_tiles_are_unbiased_when_scales_are_rounded_up_only():
    """Among e4m3's subnormals a scale rounds down by up to half: 17/16 no longer covers it, rounding up does.

    Tiles at 2**-17 of the tensor's amax, wanted scales around 1.4 * 2**-9.
    """
    x = torch.randn(16, 256)
    x[0, 0] = 448 * 6.0
    x[1:] *= 6 * 1.4 * 2.0**-9 / tile_amax(x[1:], (1, 16)).repeat_interleave(16, 1)
    small = x[1:].double()
    for name, biased in (("NVFP4 17/16", True), ("NVFP4 ceil", False)):
        draws = [
            dequantize(quantize(x, GUARDED[name], noise=torch.rand_like(x)))[1:]
            for _ in range(REPLICATES)
        ]
        ratios = torch.stack(
            [(draw.double() * small).sum() / small.square().sum() for draw in draws]
        )
        z = z_score(ratios, 1.0, ratios.std().item())
        assert abs(z) > 2 * z_limit(ONES_IN) if biased else abs(z) < z_limit(ONES_IN)


def test_rounding_scales_up_costs_less_than_headroom():
    """Variance of the stochastic rounding: a scale is 1/32 too large on average, not always 1/16."""
    x, errors = gradient(), {}
    for name in ("NVFP4 17/16", "NVFP4 ceil"):
        draws = [
            dequantize(quantize(x, GUARDED[name], noise=torch.rand_like(x))) - x for _ in range(16)
        ]
        errors[name] = torch.stack(draws).double().square().mean().item()
    assert errors["NVFP4 ceil"] < 0.99 * errors["NVFP4 17/16"]
