"""The comparisons themselves: what they must let pass, and above all what they must not (exact)."""

from __future__ import annotations

import math

import pytest
import torch

from tests.compare import assert_same, assert_sqnr, every_finite, sqnr_db, z_limit, z_score

NAN_PAYLOADS = torch.tensor([0x7FC0, 0x7FC1], dtype=torch.int16).view(torch.bfloat16)


@pytest.mark.parametrize(
    "dtype",
    [
        torch.float64,
        torch.float32,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.int8,
        torch.bool,
        torch.complex64,
    ],
)
@pytest.mark.parametrize("shape", [(), (0,), (3, 5)])
def test_a_tensor_is_the_same_as_its_copy(dtype, shape):
    x = torch.ones(shape).to(dtype)
    assert_same(x.clone(), x)


def test_a_view_is_compared_by_value_not_by_layout():
    x = torch.arange(6.0).reshape(2, 3)
    assert_same(x.T.contiguous().T, x)


@pytest.mark.parametrize(
    ("actual", "expected"),
    [
        (torch.tensor([-0.0]), torch.tensor([0.0])),
        (torch.ones(2), torch.ones(3)),
        (torch.ones(2), torch.ones(2, dtype=torch.float64)),
        (torch.ones(2), [1.0, 1.0]),
        (NAN_PAYLOADS[:1], NAN_PAYLOADS[1:]),
        ({"step": 1}, {"step": 2}),
        ({"step": 1}, {"step": True}),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        ([torch.zeros(1)], [torch.zeros(1), torch.zeros(1)]),
        (-0.0, 0.0),
        (1, 1.0),
    ],
    ids=str,
)
def test_a_difference_is_seen(actual, expected):
    with pytest.raises(AssertionError):
        assert_same(actual, expected)


def test_nan_payloads_are_the_same_on_request():
    assert_same(NAN_PAYLOADS[:1], NAN_PAYLOADS[1:], any_nan=True)
    with pytest.raises(AssertionError):
        assert_same(torch.zeros(1), torch.full((1,), math.nan), any_nan=True)


def test_a_failure_prints_count_coordinates_values_and_bits():
    expected = torch.zeros(4, 5, dtype=torch.bfloat16)
    actual = expected.clone()
    actual[1, 2] = 1.5
    actual[3] = -1
    with pytest.raises(AssertionError) as failure:
        assert_same({"w": actual}, {"w": expected})
    lines = str(failure.value).splitlines()
    assert lines[0] == "value['w']: 6 of 20 elements, torch.bfloat16 [4, 5] differ"
    assert lines[1] == "  [1, 2]: 1.5 (0x3fc0), expected 0.0 (0x0000)"
    assert lines[2] == "  [3, 0]: -1.0 (0xbf80), expected 0.0 (0x0000)"
    assert lines[-1] == "  and 1 more"


def test_sqnr_of_a_known_error():
    """An error of 1 % of the signal is 40 dB."""
    x = torch.ones(100)
    assert sqnr_db(x, x * 1.01) == pytest.approx(40, abs=1e-4)  # 1.01 in fp32 is off by 1e-8
    assert sqnr_db(x, x) == math.inf
    assert sqnr_db(torch.zeros(2), torch.ones(2)) == -math.inf
    assert sqnr_db(torch.zeros(0), torch.zeros(0)) == math.inf


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_never_passes(bad):
    x = torch.ones(2, 2)
    y = x.clone()
    y[1, 0] = bad
    with pytest.raises(AssertionError, match=r"\[1, 0\]: (nan|inf), reference 1.0"):
        assert_sqnr(y, x, floor_db=-1000)


def test_every_finite_counts():
    assert every_finite(torch.bfloat16).numel() == 65_280
    assert every_finite(torch.float16).numel() == 63_488
    assert every_finite(torch.float8_e4m3fn).numel() == 254
    assert every_finite(torch.bfloat16).max() == torch.finfo(torch.bfloat16).max


def test_z_score_of_a_fair_and_an_unfair_coin():
    """Statistical, false-alarm rate 1e-6 for the fair one."""
    fair, unfair = torch.rand(10_000) < 0.5, torch.rand(10_000) < 0.6
    limit = z_limit(1e-6)
    assert limit == pytest.approx(4.89, abs=0.01)
    assert abs(z_score(fair, 0.5, 0.5)) < limit
    assert z_score(unfair, 0.5, 0.5) > limit
