"""Moments: the error bound of each format in every tile (bounded), its mean (statistical), and its edges (exact)."""

from __future__ import annotations

import math

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor

from narrowgauge.optim import moments, noise
from narrowgauge.optim.moments import STATES, Moment, SmallFloat
from tests.compare import assert_same, z_limit, z_score

NARROW = {
    "e5m2": moments.E5M2, "tapered8": moments.TAPERED8, "dynamic4": moments.DYNAMIC4, "linear4": moments.LINEAR4,
    "e4m3-first": moments.E4M3_FIRST, "e4m3-second": moments.E4M3_SECOND, "e4m3": moments.E4M3, "fp16": moments.FP16,
    "fp16-first": moments.FP16_FIRST, "e4m3-positive": moments.E4M3_POSITIVE,
}  # fmt: skip
SECONDS = ("tapered8", "linear4", "e4m3-second", "fp16", "e4m3-positive")


def round_trip(format: Moment, x: Tensor, key: int = 1) -> Tensor:
    """x [tiles, tile], each row a tile."""
    index = torch.arange(x.numel()).view(1, *x.shape)
    return format.decode(format.encode(x[None], noise.bits(key, index)))[0]


def bound(name: str, x: Tensor) -> Tensor:
    """The docstring's table, plus two roundings of float32 (the products with the scale)."""
    amax = x.abs().amax(-1, keepdim=True).double()
    drops = moments.BF16_DROPS if name in ("dynamic4", "linear4") else moments.POW2_DROPS
    scale = moments.scales(x, drops).double()[:, None]
    x = x.abs().double()
    slack = 2.0**-22 * (x + amax)
    if name == "e5m2":
        return x / 4 + scale * 2.0**-31 + slack
    if name == "dynamic4":
        levels = torch.tensor(moments.DYNAMIC_LEVELS, dtype=torch.float64)
        above = torch.bucketize(x / scale, levels).clamp(1, 7)
        return scale * (levels[above] - levels[above - 1]) / 2 + slack
    if name == "tapered8":
        share = x / scale
        parts = torch.ones_like(share)
        for octaves, codes in ((59, 2), (27, 4), (11, 8), (3, 16)):
            parts = torch.where(share >= 2.0**-octaves, codes, parts)
        return x / parts + scale * 2.0**-73 + slack
    if name == "linear4":
        return scale / 16 + slack
    if name.startswith("fp16"):
        return x * 2.0**-10 + scale * 2.0**-39 + slack
    format = NARROW[name]
    assert isinstance(format, SmallFloat)
    found = format._expansion(x.float()[None])
    k = 1.0 if found is None else 2.0 ** found[0].double()[:, None]
    # (1 + 2^-4)^(1/k) - 1 above the format's smallest normal number 2^-6 of 2^8, else half a subnormal step there.
    relative = (1 + (2.0**-4 if format.signed else 2.0**-3)) ** (1 / k) - 1
    return x * relative * 1.001 + scale * (2.0**-14) ** (1 / k) * relative + slack


@st.composite
def tiles(draw: st.DrawFn) -> Tensor:
    """Two tiles of 32: magnitudes spread over up to 10 decades, at any place, with zeros."""
    seed = draw(st.integers(0, 2**31))
    decades, place = draw(st.floats(0, 10)), draw(st.floats(-18, 8))
    zeros = draw(st.sampled_from([0.0, 0.5, 1.0]))
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.rand(2, 32, generator=generator) * decades + place - decades
    sign = torch.randint(0, 2, (2, 32), generator=generator) * 2 - 1
    return 10**exponent * sign * (torch.rand(2, 32, generator=generator) >= zeros)


@pytest.mark.parametrize("name", NARROW)
@hypothesis.settings(max_examples=20)
@hypothesis.given(x=tiles())
def test_no_element_errs_by_more_than_its_bound(name: str, x: Tensor) -> None:
    x = x.abs() if name in SECONDS else x
    error = (round_trip(NARROW[name], x).double() - x.double()).abs()
    worst = (error - bound(name, x)).max()
    assert worst <= 0, f"{name}: {float(worst)} beyond the bound"


@pytest.mark.parametrize("name", ["tapered8", "e4m3-second"])
def test_seven_decades_in_one_tile_survive(name: str) -> None:
    """The second moment of a tile spans 1e-7 to 1: every element within 30 % (e4m3: k = 1/2; tapered8: 2 bits), none zero."""
    x = torch.logspace(-7, 0, 128)[None]
    found = round_trip(NARROW[name], x)
    ratio = (found / x).double()
    assert float(ratio.max()) < 1.3 and float(ratio.min()) > 0.75, (
        float(ratio.min()),
        float(ratio.max()),
    )


@pytest.mark.parametrize("name", SECONDS)
def test_nothing_above_zero_becomes_zero(name: str) -> None:
    """A zero v under a moment that is none would make the update m / eps."""
    x = torch.tensor([[1.0, 1e-20, 1e-9, 0.5]])
    assert (round_trip(NARROW[name], x) > 0).all()


@pytest.mark.parametrize("name", NARROW)
def test_zeros_constants_and_poison(name: str) -> None:
    format = NARROW[name]
    assert_same(round_trip(format, torch.zeros(2, 8)).abs(), torch.zeros(2, 8))
    same = torch.full((1, 8), 0.75)
    assert float((round_trip(format, same) - same).abs().max()) <= float(bound(name, same).max())
    for poison in (math.nan, math.inf):
        x = torch.ones(2, 8)
        x[0, 3] = poison
        found = round_trip(format, x)
        assert found[0].isnan().all() and found[1].isfinite().all()


@pytest.mark.parametrize("name", SECONDS)
def test_second_moments_keep_their_mean(name: str) -> None:
    """40,000 draws of values inside the range, false alarm 1e-5 over all of them."""
    values = torch.tensor([1.0, 0.83, 0.51, 0.277, 0.0931])
    x = torch.cat((values, torch.zeros(3))).expand(40_000, 8).contiguous()
    found = round_trip(NARROW[name], x, key=77)[:, :5].double()
    for place, value in enumerate(values.double().tolist()):
        spread = float(found[:, place].std())
        if spread:
            assert abs(z_score(found[:, place] - value, 0.0, spread)) < z_limit(1e-5, 5)
        else:
            assert float(found[0, place]) == pytest.approx(value, rel=2**-11)


def test_a_second_moment_decays_where_rounding_to_nearest_would_hold_it() -> None:
    """v <- 0.999 v for 700 steps: 0.4964 of the start on average; to nearest, all but the largest would stay (decisions/optimizers.md)."""
    x = torch.rand(1, 4096, generator=torch.Generator().manual_seed(3)).view(16, 256) * 0.4
    start = x.double().mean()
    x[:, 0] = 1.0
    for step in range(700):
        x = x * 0.999
        x[:, 0] = 1.0  # keeps the scale where it is
        x = round_trip(moments.TAPERED8, x, key=noise.key(noise.step_key(0, step), 0))
    ratio = float(x[:, 1:].double().mean() / start)
    # One element's relative deviation is about sqrt(gap / 2) = 0.2; the mean of 4,080: 0.004. And 1 / 256 left out.
    assert abs(ratio - 0.999**700) < 4 * 0.004 + 0.004


@pytest.mark.parametrize(("decades", "error"), [(17.7, 0.5), (21.9, 1.0)])
def test_a_tapered_second_moment_reaches_21_decades(decades, error) -> None:
    """Gradients of a tile over ten decades: each v within a factor of itself, and the mean of many draws within 5 sigma."""
    x = torch.logspace(-decades, 0, 128)[None]
    found = torch.cat([round_trip(moments.TAPERED8, x, key=key) for key in range(200)])
    ratio = (found / x).double()
    assert float(ratio.max()) <= 1 + error and float(ratio.min()) >= 1 / (1 + error)
    assert (ratio.mean(0) - 1).abs().max() < 5 * error / 2 / 200**0.5


def test_the_second_moment_after_sixty_steps() -> None:
    """N(0, 1) gradients at beta2 = 0.999, relative to the exact moment in the norm: what docs/optimizers.md states."""
    generator = torch.Generator().manual_seed(3)
    exact = torch.zeros(16, 256, dtype=torch.float64)
    v = torch.zeros(16, 256)
    for step in range(60):
        g = torch.randn(16, 256, generator=generator) * 0.01
        exact = exact * 0.999 + g.double() ** 2 * 0.001
        v = round_trip(
            moments.TAPERED8, v * 0.999 + g * g * 0.001, key=noise.key(noise.step_key(0, step), 0)
        )
    assert float((v - exact).norm() / exact.norm()) < 0.08


def key(seed: int, parameter: int, step: int) -> int:
    return noise.key(noise.step_key(seed, step), parameter)


def test_noise_is_uniform_and_its_key_matters() -> None:
    u = noise.uniform(noise.bits(key(1, 2, 3), torch.arange(1_000_000))).double()
    assert abs(z_score(u, 0.5, 12**-0.5)) < z_limit(1e-5)
    counts = torch.histc(u, 256, 0, 1)
    chi2 = float(((counts - 1e6 / 256) ** 2 / (1e6 / 256)).sum())
    assert abs(chi2 - 255) < 5 * (2 * 255) ** 0.5
    other = noise.uniform(noise.bits(key(1, 2, 4), torch.arange(1_000_000))).double()
    correlation = float(((u - 0.5) * (other - 0.5)).mean() * 12)
    assert abs(correlation) * 1000 < z_limit(1e-5)
    halves = u.view(-1, 2, 8)  # of one mixing
    correlation = float(((halves[:, 0] - 0.5) * (halves[:, 1] - 0.5)).mean() * 12)
    assert abs(correlation) * 500_000**0.5 < z_limit(1e-5)
    assert len({key(s, p, t) for s in range(9) for p in range(9) for t in range(99)}) == 9 * 9 * 99


@pytest.mark.parametrize("name", STATES)
def test_square_roots_are_correctly_rounded(name: str) -> None:
    x = torch.rand(10_000) * 10.0 ** (len(name) - 6)
    numpy = pytest.importorskip("numpy")
    assert_same(moments.square_root(x), torch.from_numpy(numpy.sqrt(x.numpy())))
