"""Exact: `tensor_statistics` on every finite bf16 value, against rational arithmetic and against torch's casts."""

from __future__ import annotations

import bisect
import math
from fractions import Fraction

import pytest
import torch

from narrowgauge.diagnose.statistics import ROUNDING, tensor_statistics
from narrowgauge.errors import ConfigError, ShapeError
from tests.raising import raises
from tests.selection import quick

# name: (exponent bits, mantissa bits, largest), and the torch dtype to ask as a second opinion
FORMATS = {"e4m3": (4, 3, 448.0), "e5m2": (5, 2, 57344.0), "e2m1": (2, 1, 6.0)}
CASTS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}


def magnitudes(name: str) -> list[Fraction]:
    """Every magnitude that the format holds, by code: zero, subnormals, normals up to the largest."""
    exponent, mantissa, largest = FORMATS[name]
    bias = 2 ** (exponent - 1) - 1
    found = []
    for code in range(2 ** (exponent + mantissa)):
        power, fraction = code >> mantissa, Fraction(code % 2**mantissa, 2**mantissa)
        found.append(Fraction(2) ** (max(power, 1) - bias) * (fraction + (power > 0)))
    return [value for value in found if value <= largest]


def becomes_zero(code: float, held: list[Fraction]) -> bool:
    """Nearest of the held magnitudes, ties to the even code."""
    above = bisect.bisect_left(held, Fraction(code))
    near = range(max(above - 1, 0), min(above + 1, len(held)))
    return min(near, key=lambda place: (abs(held[place] - Fraction(code)), place % 2)) == 0


def every_finite_bf16() -> torch.Tensor:
    codes = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    values = codes.view(torch.bfloat16)
    return values[values.isfinite()]


def expected_histogram(values: list[float]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for value in values:
        exponent = math.frexp(abs(value))[1] - 1
        counts[exponent] = counts.get(exponent, 0) + 1
    return counts


def as_counts(histogram: dict) -> dict[int, int]:
    lowest = histogram["lowest_exponent"]
    return {lowest + i: count for i, count in enumerate(histogram["counts"]) if count}


@pytest.mark.parametrize(
    ("name", "scale"),
    quick(
        [("e4m3", 0.37), ("e2m1", 1.0)],
        [("e4m3", 0.37), ("e4m3", 3e30), ("e5m2", 2.0**-120), ("e2m1", 1.0)],
    ),
)
def test_shares_match_rational_arithmetic_on_every_bf16_value(name, scale):
    x, held = every_finite_bf16().abs().unique(), magnitudes(name)
    largest, smallest = float(held[-1]), float(held[1])
    found = tensor_statistics(x, largest, smallest, scale)
    codes = (
        x.float().abs() * (1 / torch.tensor(scale))
    ).tolist()  # the fp32 reciprocal is part of the rule
    codes = [code for code, value in zip(codes, x.tolist(), strict=True) if value != 0]
    zero = [becomes_zero(code, held) if math.isfinite(code) else False for code in codes]
    over = [
        not math.isfinite(code) or Fraction(code) > Fraction(largest) * (1 + Fraction(2) ** -22)
        for code in codes
    ]
    assert found["underflow"] == sum(zero) / len(codes)
    assert found["saturated"] == sum(over) / len(codes)


@pytest.mark.parametrize("name", CASTS)
def test_underflow_is_what_torch_casts_to_zero(name):
    held = magnitudes(name)
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) * float(held[1])
    found = tensor_statistics(x, float(held[-1]), float(held[1]), 1.7)
    assert (
        found["underflow"]
        == (x * (1 / torch.tensor(1.7))).to(CASTS[name]).float().eq(0).sum().item() / x.numel()
    )
    assert 0.1 < found["underflow"] < 0.9


def test_the_tie_at_half_the_smallest_subnormal_becomes_zero_and_the_next_value_does_not():
    tie = 2.0**-10
    assert tensor_statistics(torch.tensor([tie]), 448.0, 2.0**-9, 1.0)["underflow"] == 1.0
    above = torch.tensor([tie]).nextafter(torch.tensor([1.0]))
    assert tensor_statistics(above, 448.0, 2.0**-9, 1.0)["underflow"] == 0.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_histogram_is_floor_log2_at_powers_of_two_neighbours_and_subnormals(dtype):
    info = torch.finfo(dtype)
    powers = torch.tensor([2.0**k for k in range(-20, 15)], dtype=dtype)
    edges = [powers, powers.nextafter(powers * 2), powers.nextafter(torch.zeros_like(powers))]
    tiny = torch.tensor([info.smallest_normal], dtype=dtype)
    subnormal = tiny * torch.tensor([0.75, 0.5, 0.25, info.eps], dtype=dtype)
    x = torch.cat(
        [
            *edges,
            tiny,
            tiny.nextafter(torch.zeros_like(tiny)),
            subnormal,
            torch.tensor([info.max], dtype=dtype),
        ]
    )
    x = torch.cat([x, -x])
    assert as_counts(tensor_statistics(x, 448.0, 2.0**-9, 1.0)["histogram"]) == expected_histogram(
        x.double().tolist()
    )


def test_histogram_of_every_bf16_value():
    x = every_finite_bf16()
    found = tensor_statistics(x, 448.0, 2.0**-9, 1.0)
    assert as_counts(found["histogram"]) == expected_histogram(
        [value for value in x.double().tolist() if value]
    )
    assert found["zeros"] == 2
    assert found["amax"] == x.float().max().item()


def test_subnormals_count_when_the_processor_flushes_them():
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals")
    try:
        found = tensor_statistics(
            torch.tensor([1, 2**22], dtype=torch.int32).view(torch.float32), 448.0, 2.0**-9, 1.0
        )
    finally:
        torch.set_flush_denormal(False)
    assert as_counts(found["histogram"]) == {-149: 1, -127: 1}
    assert found["zeros"] == 0


def test_a_tensor_scaled_to_its_amax_shows_no_saturation():
    """The two roundings of amax / (amax / 448) stay below the allowance; without it about one in twelve would show."""
    amax = torch.rand(4000, generator=torch.Generator().manual_seed(1)) + 0.5
    x = amax[:, None]
    found = tensor_statistics(x, 448.0, 2.0**-9, x / 448.0)
    assert found["saturated"] == 0.0
    assert (x / (x / 448.0) > 448.0).any()
    assert (
        tensor_statistics(torch.tensor([448.0 * (1 + 4 * ROUNDING)]), 448.0, 2.0**-9, 1.0)[
            "saturated"
        ]
        == 1.0
    )


def test_what_lies_at_the_allowance_still_fits():
    """Exact, in float64: the allowance is the largest value that counts as the format's own."""
    edge = torch.tensor([448.0 * (1 + ROUNDING)], dtype=torch.float64)
    assert tensor_statistics(edge, 448.0, 2.0**-9, 1.0)["saturated"] == 0.0
    beyond = torch.nextafter(edge, edge + 1)
    assert tensor_statistics(beyond, 448.0, 2.0**-9, 1.0)["saturated"] == 1.0


def test_spread_tile_scales_count_as_the_tiles_one_by_one():
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(5, 7, generator=generator).exp()  # ragged: tiles of 2 x 3
    scale = torch.rand(3, 3, generator=generator) * torch.tensor([0.1, 1.0, 9.0])
    spread = scale.repeat_interleave(2, 0)[:5].repeat_interleave(3, 1)[:, :7]
    tiles = [(x[i : i + 2, j : j + 3], scale[i // 2, j // 3]) for i in (0, 2, 4) for j in (0, 3, 6)]
    alone = [(tensor_statistics(tile, 6.0, 0.5, s), tile.numel()) for tile, s in tiles]
    together = tensor_statistics(x, 6.0, 0.5, spread)
    for key in ("underflow", "saturated"):
        assert together[key] * 35 == pytest.approx(
            sum(found[key] * count for found, count in alone), abs=1e-9
        )
    assert 0 < together["underflow"] < 1 and 0 < together["saturated"] < 1
    assert tensor_statistics(x.T, 6.0, 0.5, spread.T) == together  # strides do not matter


def test_nan_and_infinity_are_counted_apart():
    x = torch.tensor([math.nan, math.inf, -math.inf, 0.0, -0.0, 3.0])
    found = tensor_statistics(x, 448.0, 2.0**-9, 1.0)
    assert (found["nan"], found["inf"], found["zeros"], found["amax"]) == (1, 2, 2, 3.0)
    assert found["histogram"] == {"lowest_exponent": 1, "counts": [1]}
    assert found["underflow"] == found["saturated"] == 0.0


@pytest.mark.parametrize(
    "x",
    [torch.empty(0, 4), torch.zeros(3, 3), torch.full((2,), math.nan)],
    ids=["empty", "zeros", "nan"],
)
def test_a_tensor_without_finite_non_zero_values_has_no_shares(x):
    found = tensor_statistics(x, 448.0, 2.0**-9, 1.0)
    assert (found["amax"], found["underflow"], found["saturated"]) == (0.0, 0.0, 0.0)
    assert found["histogram"] == {"lowest_exponent": 0, "counts": []}


def test_what_does_not_fit_is_refused_in_words():
    with raises(ShapeError, "statistics.scale", "[3]", "[2, 2]"):
        tensor_statistics(torch.ones(2, 2), 448.0, 2.0**-9, torch.ones(3))
    with raises(ShapeError, "statistics.scale"):
        tensor_statistics(torch.ones(2), 448.0, 2.0**-9, torch.ones(2, 2))
    with raises(ConfigError, "statistics.dtype"):
        tensor_statistics(torch.ones(2, dtype=torch.uint8), 448.0, 2.0**-9, 1.0)
