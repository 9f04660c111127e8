"""Formats against ml_dtypes and brute-force searches (exact); stochastic rounding by counting (exact) and statistics."""

from __future__ import annotations

import hashlib
import json
import math
import os
import pickle
import subprocess
import sys
from dataclasses import replace
from statistics import NormalDist

import ml_dtypes
import numpy as np
import pytest
import torch

from narrowgauge import formats
from narrowgauge.errors import ConfigError
from narrowgauge.formats import (
    E2M1,
    E3M0,
    E3M4,
    E4M3,
    E8M0,
    INT4,
    INT4X2,
    INT8,
    NF4,
    FloatFormat,
    Format,
    IntFormat,
    TableFormat,
)  # fmt: skip
from tests.compare import assert_same, every_finite
from tests.oracles import (
    INF,
    ML_DTYPES,
    NAN,
    TABLE_LEVELS,
    boundaries,
    codes_by_ml_dtypes,
    decoded,
    finite_values,
    from_bits,
    nearest_by_search,
    plain,
    random_bit_patterns,
    round_half_away,
    values_by_ml_dtypes,
)
from tests.raising import raises

FLOATS = tuple(format for format in formats.ALL if isinstance(format, FloatFormat))
INTEGERS = tuple(format for format in formats.ALL if isinstance(format, IntFormat))
SYMMETRIC = (*FLOATS, *INTEGERS)
TABLES = tuple(format for format in formats.ALL if isinstance(format, TableFormat))
KNOWN_TO_ML_DTYPES = (*(format for format in FLOATS if format.name in ML_DTYPES), *INTEGERS)
LARGEST_NOISE = 1 - 2.0**-24

every_element_format = pytest.mark.parametrize("format", formats.ELEMENTS, ids=str)
every_format = pytest.mark.parametrize("format", formats.ALL, ids=str)
every_16_bit_type = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"]
)


def codes(format, x, noise=None):
    """Codes as they are stored, viewed as uint8."""
    return format.encode(x, noise).view(torch.uint8)


def has_nan(format):
    return bool(format.values().isnan().any())


# --- decoding ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", [formats.get(name) for name in ML_DTYPES], ids=str)
def test_values_of_all_codes_agree_with_ml_dtypes(format):
    theirs = plain(values_by_ml_dtypes(format))
    # ml_dtypes has infinities in e5m2 and e3m4, which no encode makes: codes that are reserved.
    finite = theirs.isfinite()
    assert_same(format.values()[finite], theirs[finite])
    assert not format.values()[~finite].isfinite().any()


def test_the_types_of_ml_dtypes_are_found():
    """By their fields, for every format that has one: none is without its oracle unnoticed."""
    found = {name: each.__name__ for name, each in ML_DTYPES.items()}
    assert (
        found.items()
        >= {
            "e4m3": "float8_e4m3fn",
            "e5m2": "float8_e5m2",
            "e3m4": "float8_e3m4",
            "e3m2": "float6_e3m2fn",
            "e2m3": "float6_e2m3fn",
            "e2m1": "float4_e2m1fn",
            "e8m0": "float8_e8m0fnu",
        }.items()
    )


@pytest.mark.parametrize("format", INTEGERS, ids=str)
def test_codes_of_integers_are_twos_complement(format):
    """Against Python's integers (exact, all codes)."""
    half = 2 ** (format.bits - 1)
    assert format.values().tolist() == [*range(half), *range(-half, 0)]


@pytest.mark.parametrize("format", TABLES, ids=str)
def test_levels_of_tables_agree_with_their_papers(format):
    """Within a unit in the last place: the same sums in another order, then rounded to float32."""
    levels = np.array(TABLE_LEVELS[format.name](), dtype=np.float32)
    np.testing.assert_array_max_ulp(
        format.values().numpy(), levels, maxulp=8 if format is NF4 else 1
    )


@every_format
def test_decode_is_the_table_of_values(format):
    """For codes in every form in which they are stored (exact, all codes)."""
    all_codes = torch.arange(2**format.bits, dtype=torch.uint8)
    if format in INTEGERS:  # one per byte, the sign is extended
        all_codes = format.values().to(torch.int8)
    stored = format.unpack(format.pack(all_codes.view(format.storage)), 2**format.bits)
    assert stored.dtype == format.storage
    assert_same(plain(format.decode(stored)), plain(format.values()))
    assert_same(
        plain(format.decode(stored.reshape(4, -1).T)), plain(format.values()).reshape(4, -1).T
    )


@every_format
def test_constants_agree_with_the_values(format):
    values = format.values()
    finite = values[values.isfinite()]
    assert values.numel() == 2**format.bits
    if (
        format in INTEGERS
    ):  # the most negative code exists and is never produced, nor those beyond max
        finite = finite[finite.abs() <= format.max]
    assert finite.abs().max() == format.max
    assert finite[finite != 0].abs().min().item() == pytest.approx(format.smallest, rel=2**-24)


# --- nearest rounding ----------------------------------------------------------------------------------------------------


@every_16_bit_type
@every_element_format
def test_every_16_bit_value_rounds_to_the_nearest(format, dtype):
    """No representable value lies closer than the one chosen, ties as documented (exact, all finite bf16 and fp16)."""
    x = every_finite(dtype)
    assert_same(format.round(x), nearest_by_search(x, format))
    assert_same(format.encode(x.to(dtype)), format.encode(x))


@every_16_bit_type
@pytest.mark.parametrize("format", KNOWN_TO_ML_DTYPES, ids=str)
def test_every_16_bit_value_agrees_with_ml_dtypes(format, dtype):
    """After clamping, which ml_dtypes leaves to its caller (exact)."""
    x = every_finite(dtype)
    assert_same(codes(format, x), codes_by_ml_dtypes(x.clamp(-format.max, format.max), format))


@every_element_format
def test_boundaries_between_values(format):
    """At, just below and just above every value and every midpoint, both signs, and beyond the maximum (exact)."""
    x = boundaries(format)
    assert_same(format.round(x), nearest_by_search(x, format))
    if format in KNOWN_TO_ML_DTYPES:
        assert_same(codes(format, x), codes_by_ml_dtypes(x.clamp(-format.max, format.max), format))


@every_element_format
def test_a_million_random_bit_patterns(format):
    """Every exponent, subnormals, infinities and NaN (exact)."""
    x = random_bit_patterns(1_000_000, seed=0)
    if format in TABLES:
        levels = format.values().double().numpy()
        expected = np.searchsorted(
            (levels[:-1] + levels[1:]) / 2, torch.where(x.isnan(), 0, x).numpy(), side="left"
        )
        assert_same(codes(format, x), torch.from_numpy(expected.astype(np.uint8)))
        return
    number = ~x.isnan()
    if format not in KNOWN_TO_ML_DTYPES:
        few = x[number][:50_000]
        assert_same(format.round(few) + 0.0, nearest_by_search(few, format) + 0.0)
        at_nan = format.round(x[~number])
        assert at_nan.isnan().all() if has_nan(format) else (at_nan == 0).all()
        return
    expected = codes_by_ml_dtypes(x[number].clamp(-format.max, format.max), format)
    assert_same(codes(format, x)[number], expected)
    at_nan = format.decode(format.encode(x[~number]))
    assert at_nan.isnan().all() if has_nan(format) else (at_nan == 0).all()


@every_element_format
def test_round_is_decode_of_encode(format):
    """Bit for bit, so that expanded values are what the codes say; and idempotent (exact)."""
    x = torch.cat(
        (
            random_bit_patterns(100_000, seed=1),
            boundaries(format),
            torch.tensor([0.0, -0.0, INF, -INF, NAN]),
        )
    )
    assert_same(plain(format.round(x)), plain(format.decode(format.encode(x))))
    assert_same(codes(format, format.round(x)), codes(format, x))
    noise = torch.rand(x.shape)
    assert_same(plain(format.round(x, noise)), plain(format.decode(format.encode(x, noise))))


@every_element_format
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_codes_of_representable_values_are_those_of_encode(format, dtype):
    """The sign of zero too, in both orders of memory."""
    x = torch.cat((random_bit_patterns(20_000, seed=2), torch.tensor([0.0, -0.0, INF, -INF])))
    values = format.round(x).to(dtype)
    values = values[format.round(values) == values].reshape(
        1, -1
    )  # tables are not exact in bfloat16
    for each in (values, values.expand(3, -1).T):
        assert_same(format.codes_of(each), format.encode(each))


@pytest.mark.parametrize(
    "format", [each for each in formats.ALL if each.codes_per_byte == 2], ids=str
)
@pytest.mark.parametrize("length", (31, 32))
def test_packed_codes_decode_as_unpacked_ones(format, length):
    packed = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    for each in (packed, packed.T, packed[3:3]):
        assert_same(format.decode_packed(each, length), format.decode(format.unpack(each, length)))


@every_element_format
def test_infinity_saturates_and_nan_is_kept_where_there_is_one(format):
    ends = torch.tensor([INF, -INF, 3.4e38, -3.4e38])
    levels = finite_values(format)
    top, bottom = float(levels[-1]), float(levels[0])
    for noise in (None, torch.zeros(4), torch.full((4,), LARGEST_NOISE)):
        assert format.round(ends, noise).tolist() == [top, bottom, top, bottom]
    nan = from_bits([0x7FC00000, 0xFFC00000, 0x7F800001, 0xFFFFFFFF])
    for noise in (None, torch.full((4,), 0.5)):
        if has_nan(format):
            assert (
                format.round(nan, noise).isnan().all()
                and format.decode(format.encode(nan, noise)).isnan().all()
            )
        else:
            rounded = format.round(nan, noise)
            assert (rounded == 0).all() and not rounded.signbit().any(), (
                "the sign of a NaN is the device's"
            )
            assert (format.decode(format.encode(nan, noise)) == 0).all()


@every_element_format
def test_rounding_is_monotone(format):
    x = (
        torch.cat((every_finite(torch.bfloat16), boundaries(format), torch.tensor([INF, -INF])))
        .sort()
        .values
    )
    assert (format.round(x).diff() >= 0).all()


@pytest.mark.parametrize("format", SYMMETRIC, ids=str)
def test_rounding_is_odd(format):
    """Exact, the sign of zero included; integers have one zero. Tables are not odd: a tie takes the lower level."""
    x = torch.cat((every_finite(torch.bfloat16), every_finite(torch.float16), boundaries(format)))
    mirrored = -format.round(-x)
    assert_same(format.round(x), mirrored if format in FLOATS else mirrored + 0.0)


@pytest.mark.parametrize("format", FLOATS, ids=str)
def test_the_sign_of_zero_is_kept(format):
    """Also of a number that rounds to zero, with and without noise."""
    x = torch.tensor([0.0, -0.0, format.smallest / 4, -format.smallest / 4, 1e-45, -1e-45])
    expected = torch.tensor([0.0, -0.0, 0.0, -0.0, 0.0, -0.0])
    for noise in (None, torch.tensor([0.5, 0.5, 0.5, 0.0, 0.5, 0.0])):
        assert_same(format.round(x, noise), expected)
        assert_same(format.decode(format.encode(x, noise)), expected)


@pytest.mark.parametrize("format", SYMMETRIC, ids=str)
def test_the_error_stays_below_half_a_gap(format):
    """Q6: abs(e) <= max(2**-(mantissa + 1) abs(x), smallest / 2), here for every finite bf16 in range (exact)."""
    x = every_finite(torch.bfloat16).double()
    x = x[x.abs() <= format.max]
    relative = 2.0 ** -(format.mantissa + 1) if format in FLOATS else 0.0
    error = (format.round(x.float()).double() - x).abs()
    assert (
        error <= torch.maximum(relative * x.abs(), torch.tensor(format.smallest / 2).double())
    ).all()


def test_float64_passes_through_float32():
    """1 + 2**-30 is above the midpoint of 1 and 1.125 less 2**-4, and lost on the way: the documented double rounding."""
    x = torch.tensor([1.0625 + 2.0**-40], dtype=torch.float64)
    assert E4M3.round(x).item() == 1.0
    assert E4M3.round(x).dtype == torch.float32


@every_format
def test_shapes_and_strides_do_not_matter(format):
    x = torch.rand(6, 10) * format.max if format is not E8M0 else torch.rand(6, 10)
    expected = format.encode(x)
    assert_same(format.encode(x.T).T, expected)
    assert_same(format.encode(x[::2, 1::3]), expected[::2, 1::3])
    assert format.encode(x[:0]).shape == (0, 10) and format.round(x[0, 0]).shape == ()


def test_an_unwritten_input_stays_as_it_was():
    for format in formats.ALL:
        x = torch.tensor([0.3, -0.3, INF, NAN])
        before = x.clone()
        format.round(x)
        format.encode(x)
        assert_same(x, before)


# --- E8M0, the format of scales -----------------------------------------------------------------------------------------


def test_e8m0_takes_the_nearest_power_of_two():
    """By search everywhere; against ml_dtypes 0.6 where both have the same rule (exact).

    Ours saturates at 2**127, takes 2**-127 for zero, and the even code at a tie. ml_dtypes makes NaN of the first two, takes
    the upper at a tie, and below 2**-126 does not always take the nearest: 0.66 * 2**-126 becomes 2**-126.
    """
    x = torch.cat(
        (
            random_bit_patterns(200_000, seed=2).abs(),
            boundaries(E8M0).abs(),
            every_finite(torch.bfloat16).abs(),
        )
    )
    x = x[x.isfinite()]
    assert_same(E8M0.round(x), nearest_by_search(x, E8M0))
    same_rule = x[(x >= 2.0**-126) & (x < 1.5 * 2.0**127) & (torch.frexp(x).mantissa != 0.75)]
    assert_same(E8M0.encode(same_rule), codes_by_ml_dtypes(same_rule, E8M0))


def test_e8m0_at_its_edges():
    x = from_bits(
        [0x00000000, 0x80000000, 0x00000001, 0x00600000, 0x00600001, 0x7F7FFFFF, 0x7F800000]
    )
    assert E8M0.encode(x).tolist() == [0, 0, 0, 0, 1, 254, 254]
    assert (E8M0.encode(from_bits([0x80000001, 0xBF800000, 0xFF800000, 0x7FC00000])) == 255).all()
    with raises(ConfigError, "format.noise", "e8m0"):
        E8M0.encode(torch.ones(1), torch.zeros(1))


# --- stochastic rounding ------------------------------------------------------------------------------------------------


def between_values(format, fractions):
    """(x, low, high): points at these fractions of the way between neighbouring values, both signs; float32 each."""
    values = torch.from_numpy(finite_values(format))
    low, high = values[:-1, None], values[1:, None]
    x = (low + (high - low) * torch.tensor(fractions, dtype=torch.float64)).float()
    return x, low.float().expand(x.shape), high.float().expand(x.shape)


@every_element_format
def test_noise_picks_one_of_the_two_neighbours(format):
    """Whatever the noise, its ends 0 and 1 - 2**-24 included (exact)."""
    x, low, high = between_values(format, [0.001, 0.25, 0.5, 0.75, 0.999])
    for noise in (torch.zeros_like(x), torch.full_like(x, LARGEST_NOISE), torch.rand(x.shape)):
        y = format.round(x, noise)
        assert ((y == low) | (y == high)).all()
    assert (format.round(x, torch.zeros_like(x)) == high).all()
    assert (format.round(x, torch.full_like(x, LARGEST_NOISE)) == low).all()


@every_element_format
def test_representable_values_never_move(format):
    x = torch.from_numpy(finite_values(format)).float()
    for noise in (0.0, 2.0**-24, 0.5, LARGEST_NOISE):
        assert_same(format.round(x, torch.full_like(x, noise)), x)


@every_element_format
def test_the_share_of_roundings_up_is_the_distance_from_below(format):
    """Noise k / 512 for all k: of 512 roundings, exactly 512 * distance go up (exact).

    Between every pair of neighbours: negative, subnormal and next to the maximum. In tables 512 * distance is no whole
    number, and itself rounded.
    """
    steps = 512
    x, low, high = between_values(format, [1 / 64, 1 / 4, 1 / 2, 63 / 64])
    noise = (torch.arange(steps) / steps).expand(*x.shape, steps)
    up = (format.round(x[..., None].expand(noise.shape), noise) == high[..., None]).sum(-1)
    exact = (x.double() - low.double()) / (high.double() - low.double()) * steps
    slack = 1.01 if format in TABLES else 0
    assert ((up - exact).abs() <= slack).all()


@pytest.mark.parametrize("format", SYMMETRIC, ids=str)
def test_noise_equal_to_the_distance_stays_below(format):
    """P(up) is the length of [0, distance), so noise == distance must not go up, or representable values could (exact)."""
    x, low, high = between_values(format, [0.25, 0.5, 0.75])
    noise = torch.tensor([0.25, 0.5, 0.75]).expand(x.shape).contiguous()
    assert_same(format.round(x, noise).abs(), low.abs())
    just_below = torch.nextafter(noise, torch.tensor(0.0))
    assert_same(format.round(x, just_below).abs(), high.abs())


@every_element_format
def test_stochastic_rounding_is_unbiased(format):
    """Mean of 20,000 draws at distances that no noise grid is aligned with (statistical).

    Number of roundings up ~ Binomial(n, p) with 0.05 < p < 0.95, close to normal; all points of all formats together (some
    1,600) have a false-alarm rate of 1e-6 by Bonferroni's inequality. The seed is fixed.
    """
    generator = torch.Generator().manual_seed(7)
    draws, most_points = 20_000, 1_600
    limit = -NormalDist().inv_cdf(1e-6 / (2 * most_points))
    x, low, high = between_values(format, [0.0712, 0.3141, 0.5772, 0.9311])
    pick = torch.linspace(
        0, x.shape[0] - 1, min(40, x.shape[0])
    ).long()  # the ends included: +-smallest, just below max
    x, low, high = x[pick].flatten(), low[pick].flatten(), high[pick].flatten()
    for point in range(x.numel()):
        noise = torch.rand(draws, generator=generator)
        up = float((format.round(x[point].expand(draws), noise) == high[point]).double().mean())
        p = float(
            (x[point].double() - low[point].double()) / (high[point].double() - low[point].double())
        )
        assert abs(up - p) <= limit * (p * (1 - p) / draws) ** 0.5, (
            x[point],
            low[point],
            high[point],
        )


def test_biased_noise_is_seen():
    """Control: the counting test above notices noise that is never below 2**-8."""
    x, _, high = between_values(E4M3, [1 / 64])
    noise = ((torch.arange(512) + 2) / 514).expand(*x.shape, 512)
    up = (E4M3.round(x[..., None].expand(noise.shape), noise) == high[..., None]).sum(-1)
    assert (up != 8).all()


# --- packing ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "format", [format for format in formats.ALL if format.codes_per_byte == 2], ids=str
)
@pytest.mark.parametrize(
    "shape", [(1, 1), (3, 7), (2, 16), (0, 5), (4, 0), (5,), (2, 3, 9)], ids=str
)
def test_packing_two_codes_into_a_byte_is_reversible(format, shape):
    stored = format.unpack(
        torch.randint(0, 256, (*shape[:-1], shape[-1]), dtype=torch.uint8), shape[-1]
    )
    packed = format.pack(stored)
    assert packed.shape == (*shape[:-1], (shape[-1] + 1) // 2) and packed.dtype == torch.uint8
    assert_same(format.unpack(packed, shape[-1]), stored)


@pytest.mark.parametrize(
    "format", [format for format in formats.ALL if format.codes_per_byte == 2], ids=str
)
def test_every_byte_is_a_pair_of_codes(format):
    """All 256 bytes, first code in the low nibble; from a strided view too (exact)."""
    packed = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    pairs = format.unpack(packed, 32)
    assert_same(format.pack(pairs), packed)
    low = torch.arange(256) % 16
    assert_same(format.decode(pairs[:, 0::2]).flatten(), format.values()[low])
    assert_same(format.pack(pairs.T.contiguous().T), packed)


def test_an_odd_row_ends_in_a_zero_nibble():
    assert E2M1.pack(torch.tensor([[0xF, 0x3, 0x7]], dtype=torch.uint8)).tolist() == [[0x3F, 0x07]]
    assert INT4.pack(torch.tensor([[-1, 3, -7]], dtype=torch.int8)).tolist() == [[0x3F, 0x09]]


@pytest.mark.parametrize(
    "format", [format for format in formats.ALL if format.codes_per_byte == 1], ids=str
)
def test_codes_of_more_than_four_bits_are_only_viewed_as_bytes(format):
    stored = format.encode(torch.rand(3, 5))
    packed = format.pack(stored)
    assert packed.data_ptr() == stored.data_ptr()
    assert_same(format.unpack(packed, 5), stored)


# --- flush-to-zero, other releases, wrong rules ---------------------------------------------------------------------------


def digests() -> dict[str, str]:
    """SHA-256 of everything a format computes on inputs made without arithmetic."""
    found = {}
    for format in formats.ALL:
        x = torch.cat(
            (
                from_bits(
                    list(range(0, 0x00800000, 4093)) + list(range(0x80000000, 0x80800000, 4093))
                ),  # subnormals
                random_bit_patterns(100_000, seed=3),
                every_finite(torch.bfloat16),
            )
        )
        stored = format.encode(x)
        results = [
            stored.view(torch.uint8),
            plain(format.round(x)),
            plain(format.decode(stored)),
            plain(format.values()),
        ]
        for name, result in zip(("encode", "round", "decode", "values"), results, strict=True):
            found[f"{format} {name}"] = hashlib.sha256(result.numpy().tobytes()).hexdigest()
    return found


def digests_under_flush_to_zero(module: str) -> dict[str, str]:
    """`digests()` of a test module, in a process where subnormals are flushed before anything else is computed."""
    program = (
        "import json, torch\n"
        "assert torch.set_flush_denormal(True)\n"
        "assert (torch.tensor([2.0**-126]) / 2).item() == 0\n"
        f"from {module} import digests\n"
        "print(json.dumps(digests()))"
    )
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True
    )
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_flush_to_zero_changes_nothing():
    assert digests_under_flush_to_zero("tests.test_formats") == digests()


@pytest.mark.parametrize(
    ("dtype", "count"), [(torch.bfloat16, 30_512), (torch.float16, 14_720)], ids=["bf16", "fp16"]
)
def test_what_a_cast_without_saturation_would_lose(dtype, count):
    """Control, and the reason for our own clamp: exactly these many of 65,536 codes become NaN in ml_dtypes.

    All of them are above 464 or infinite, and all of them are +-448 here. PyTorch's cast did the same up to 2.11.
    """
    all_codes = torch.arange(65_536, dtype=torch.int32).to(torch.int16).view(dtype).float()
    x = all_codes[~all_codes.isnan()]
    theirs = torch.from_numpy(x.numpy().astype(ml_dtypes.float8_e4m3fn).astype(np.float32))
    differs = theirs != E4M3.round(x)
    assert int(differs.sum()) == count
    assert theirs[differs].isnan().all() and (x[differs].abs() > 464).all()
    assert_same(E4M3.round(x[differs]), torch.copysign(torch.tensor(448.0), x[differs]))


@pytest.mark.parametrize("format", SYMMETRIC, ids=str)
def test_rounding_half_away_from_zero_would_be_noticed(format):
    """Control: the boundary test fails for it, at every second midpoint, and nowhere else."""
    x = boundaries(format)
    x = x[x.abs() <= format.max]
    wrong = round_half_away(x, format) != nearest_by_search(x, format)
    assert wrong.sum() >= finite_values(format).size // 2 - 2
    with pytest.raises(AssertionError):
        assert_same(round_half_away(x, format), format.round(x))


def test_the_search_itself_notices_a_wrong_neighbour():
    """Control: one code too high is not the nearest."""
    x = torch.tensor([1.06])
    assert nearest_by_search(x, E4M3).item() == 1.0 and nearest_by_search(-x, E4M3).item() == -1.0
    assert (
        decoded(torch.tensor([NAN]), INT8).item() == 0
        and decoded(torch.tensor([NAN]), E4M3).isnan()
    )


# --- names and construction ------------------------------------------------------------------------------------------------


def test_formats_are_found_by_name():
    assert all(
        formats.get(format.name) is format and str(format) == format.name for format in formats.ALL
    )
    assert len(set(formats.NAMES)) == len(formats.ALL) and set(ML_DTYPES) <= set(formats.NAMES)
    with raises(ConfigError, "formats.unknown", "'e4m3fn'", "'e4m3'"):
        formats.get("e4m3fn")
    with raises(ConfigError, "formats.unknown", "'quaternion'", "e4m3, e5m2"):
        formats.get("quaternion")


@every_format
def test_formats_are_values(format):
    """Hashable, picklable, equal to their copy: a Cast is compared and cached by them."""
    copy = pickle.loads(pickle.dumps(format))
    assert copy == format and hash(copy) == hash(format)


@pytest.mark.parametrize(
    "levels", [(0.0, 1.0), (1.0, 0.0, 2.0, 3.0), (0.0, 0.0, 1.0, 2.0)], ids=str
)
def test_a_table_needs_distinct_ascending_levels(levels):
    with raises(ConfigError, "format.levels", len(levels), 4):
        TableFormat(name="odd", bits=2, max=1, storage=torch.uint8, levels=levels)


def test_the_base_class_defines_no_rounding():
    bare = formats.Format(name="bare", bits=8, max=1, storage=torch.uint8)
    for call in (
        lambda: bare.round(torch.ones(1)),
        lambda: bare.encode(torch.ones(1)),
        bare.values,
        lambda: bare.smallest,
    ):
        with pytest.raises(TypeError, match="does not define"):
            call()


# --- bit splitting -------------------------------------------------------------------------------------------------------


def test_e3m0_holds_the_seven_magnitudes_of_luq():
    """LUQ's FP4 [1, 3, 0]: zero and alpha * 2**i, i = 0 ... 6, so that alpha is max / 2**6 (exact)."""
    assert sorted({abs(value) for value in E3M0.values().tolist()}) == [
        0.0,
        *(16.0 * 2.0**-i for i in range(6, -1, -1)),
    ]


def test_every_code_is_two_int4_digits():
    """14 * high + low is the code, and both digits lie in -7 ... 7: nothing clips at the ends (exact)."""
    codes_ = INT4X2.encode(torch.arange(-98.0, 99.0))
    high = (codes_.float() / 14).round().to(torch.int8)
    low = codes_ - 14 * high
    assert len(codes_.unique()) == 197 and high.abs().max() == 7 and low.abs().max() == 7


def test_bit_splitting_is_stochastic_rounding_of_the_whole():
    """The paper's two steps (high to nearest, rest stochastically, arXiv 2306.11987 eq. 5) give the code itself (exact)."""
    t = torch.linspace(-98, 98, 12_545, dtype=torch.float64)[:, None].expand(-1, 64)
    noise = (torch.arange(64, dtype=torch.float64) / 64).expand_as(t)
    high = (t / 14).round()
    # floor(rest + u) with u = 1 - noise in (0, 1]: up where noise is below the fraction, as in Format.round.
    rest = t - 14 * high
    low = rest.floor() + (noise < rest - rest.floor())
    assert high.abs().max() == 7 and low.abs().max() == 7
    exact = (t * 64) == (
        t * 64
    ).round()  # the grid's points, where float32 and float64 agree about the fraction
    assert exact.all()
    assert_same(INT4X2.encode(t.float(), noise.float()).double(), 14 * high + low)


# --- codes that are no numbers ------------------------------------------------------------------------------------------------------


def test_codes_above_the_largest_are_no_numbers():
    """As IEEE's E3M4 has them: 0x70 to 0x7f and their negatives; the numbers are those of ml_dtypes (exact)."""
    values = E3M4.values()
    assert (
        values[:0x70].isfinite().all()
        and values[0x6F] == 15.5
        and values[0x80:0xF0].isfinite().all()
    )
    assert values[0x70:0x80].isnan().all() and values[0xF0:].isnan().all()
    theirs = torch.from_numpy(
        np.arange(0x70, dtype=np.uint8).view(ml_dtypes.float8_e3m4).astype(np.float32)
    )
    assert_same(values[:0x70], theirs)
    x = torch.tensor([0.0, -0.0, 15.5, 17.0, -math.inf, math.nan, 0.2, 2.0**-6, 1e-9])
    assert_same(E3M4.decode(E3M4.encode(x)), E3M4.round(x), any_nan=True)
    assert int(E3M4.encode(x).max()) <= 0xFF and E3M4.decode(E3M4.encode(x))[3] == 15.5


@pytest.mark.parametrize(
    ("changes", "code", "values"),
    [
        ({"reserved": 0, "has_nan": False}, "format.max", (15.5, 0, 31)),
        ({"max": 15.0}, "format.max", (15, 16, 15.5)),
        ({"bits": 7}, "format.bits", (7, 3, 4)),
        ({"reserved": 127}, "format.bits", (127,)),
        ({"reserved": 0, "max": 31}, "format.nan", ("e3m4",)),
    ],
)
def test_a_format_whose_codes_do_not_fit_is_refused(changes, code, values):
    with raises(ConfigError, code, *values):
        replace(E3M4, **changes)


def test_every_constant_is_in_the_registry():
    """A new format is one constant in one file."""
    constants = [value for value in vars(formats).values() if isinstance(value, Format)]
    assert list(formats.ALL) == constants
