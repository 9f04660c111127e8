"""How tests compare: exactly, in decibels, or by z-score. A failure prints coordinates and values, not only a count.

exact        assert_same       every bit equal; -0.0 differs from 0.0
bounded      assert_sqnr       signal-to-quantization-noise ratio against a reference, with a floor derived by the caller
statistical  z_score, z_limit  for stochastic rounding and sampling: fixed seeds and a stated false-alarm rate
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

SHOWN = 5  # mismatches that a failure prints; more would hide the message

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_same(actual: Any, expected: Any, *, any_nan: bool = False, at: str = "value") -> None:
    """Fail unless both are equal bit for bit, in shape and dtype too.

    Tensors, plain values, and mappings and sequences of them such as a state dict; `at` is the path that a failure names.
    any_nan  a NaN equals every NaN, whatever its sign and payload. Without it those bits count as well.
    """
    __tracebackhide__ = True
    if isinstance(expected, Tensor):
        assert isinstance(actual, Tensor), f"{at}: expected a Tensor, got {type(actual).__name__}"
        _assert_same_tensor(actual, expected, any_nan, at)
    elif isinstance(expected, Mapping):
        assert isinstance(actual, Mapping), f"{at}: expected a mapping, got {type(actual).__name__}"
        assert list(actual) == list(expected), (
            f"{at}: keys {list(actual)}, expected {list(expected)}"
        )
        for key in expected:
            assert_same(actual[key], expected[key], any_nan=any_nan, at=f"{at}[{key!r}]")
    elif isinstance(expected, Sequence) and not isinstance(expected, (str, bytes)):
        assert type(actual) is type(expected), (
            f"{at}: got {type(actual).__name__}, expected {type(expected).__name__}"
        )
        assert len(actual) == len(expected), f"{at}: length {len(actual)}, expected {len(expected)}"
        for i, (left, right) in enumerate(zip(actual, expected, strict=True)):
            assert_same(left, right, any_nan=any_nan, at=f"{at}[{i}]")
    elif isinstance(expected, float):
        assert isinstance(actual, float), f"{at}: expected a float, got {type(actual).__name__}"
        same = actual.hex() == expected.hex()  # tells 0.0 from -0.0; a NaN has one spelling
        assert same, f"{at}: {actual!r}, expected {expected!r}"
    else:
        assert type(actual) is type(expected), (
            f"{at}: got {type(actual).__name__}, expected {type(expected).__name__}"
        )
        assert actual == expected, f"{at}: {actual!r}, expected {expected!r}"


def _assert_same_tensor(actual: Tensor, expected: Tensor, any_nan: bool, at: str) -> None:
    __tracebackhide__ = True
    assert actual.shape == expected.shape, (
        f"{at}: shape {list(actual.shape)}, expected {list(expected.shape)}"
    )
    assert actual.dtype == expected.dtype, f"{at}: {actual.dtype}, expected {expected.dtype}"
    actual, expected = actual.detach().cpu(), expected.detach().cpu()
    actual_bits, expected_bits = bits(actual), bits(expected)
    differs = actual_bits != expected_bits
    if any_nan and expected.dtype.is_floating_point:
        differs &= ~(actual.float().isnan() & expected.float().isnan())
    if differs.any():
        raise AssertionError(_report(actual, expected, actual_bits, expected_bits, differs, at))


def _report(
    actual: Tensor,
    expected: Tensor,
    actual_bits: Tensor,
    expected_bits: Tensor,
    differs: Tensor,
    at: str,
) -> str:
    count, digits = int(differs.sum()), 2 * expected.element_size()
    mask = (1 << 8 * expected.element_size()) - 1
    lines = [
        f"{at}: {count} of {differs.numel()} elements, {expected.dtype} {list(expected.shape)} differ"
    ]
    for index in differs.nonzero()[:SHOWN].tolist():
        i = tuple(index)
        values = f"{_value(actual[i])} (0x{int(actual_bits[i]) & mask:0{digits}x})"
        wanted = f"{_value(expected[i])} (0x{int(expected_bits[i]) & mask:0{digits}x})"
        lines.append(f"  {index}: {values}, expected {wanted}")
    if count > SHOWN:
        lines.append(f"  and {count - SHOWN} more")
    return "\n".join(lines)


def _value(element: Tensor) -> Any:
    """As Python prints it; 8-bit floats have no `item` of their own on every release, fp32 holds them exactly."""
    narrow_float = element.dtype.is_floating_point and element.element_size() == 1
    return element.float().item() if narrow_float else element.item()


def bits(x: Tensor) -> Tensor:
    """The same memory as integers of the same width and shape. Complex numbers gain a last axis of two."""
    if x.is_complex():
        x = torch.view_as_real(x)
    return x.contiguous().view(_BITS[x.element_size()])


def sqnr_db(reference: Tensor, value: Tensor) -> float:
    """Signal-to-quantization-noise ratio, 10 log10(sum r^2 / sum (r - v)^2), in fp64.

    inf when both are equal (also when empty), -inf when the reference is all zero and the value is not, NaN when either
    holds a value that is not finite.
    """
    assert reference.shape == value.shape, f"shapes {list(reference.shape)} and {list(value.shape)}"
    reference, value = reference.detach().cpu().double(), value.detach().cpu().double()
    if not (reference.isfinite().all() and value.isfinite().all()):
        return math.nan
    noise = float((reference - value).square().sum())
    signal = float(reference.square().sum())
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def assert_sqnr(actual: Tensor, reference: Tensor, floor_db: float) -> None:
    """Fail unless `actual` is finite and at least `floor_db` above its own noise. The caller derives the floor in a comment."""
    __tracebackhide__ = True
    db = sqnr_db(reference, actual)
    if db >= floor_db:  # False for NaN
        return
    error = (
        (actual.detach().cpu().double() - reference.detach().cpu().double())
        .abs()
        .nan_to_num(math.inf, math.inf)
    )
    lines = [f"SQNR {db:.2f} dB, floor {floor_db:.2f} dB, {list(reference.shape)}; largest errors:"]
    for flat in error.flatten().topk(min(SHOWN, error.numel())).indices.tolist():
        i = tuple(int(k) for k in torch.unravel_index(torch.tensor(flat), error.shape))
        lines.append(f"  {list(i)}: {float(actual[i])}, reference {float(reference[i])}")
    raise AssertionError("\n".join(lines))


def every_finite(dtype: torch.dtype) -> Tensor:
    """All finite values of an 8- or 16-bit float as float32, in code order, with both zeros: 65,280 in bf16, 63,488 in fp16."""
    codes = torch.arange(1 << 8 * dtype.itemsize, dtype=torch.int32)
    values = codes.to(_BITS[dtype.itemsize]).view(dtype).float()
    return values[values.isfinite()]


def z_score(samples: Tensor, expected_mean: float, expected_std: float) -> float:
    """Standard errors between the mean of independent samples and what it should be.

    For a count of successes pass the zeros and ones, p, and sqrt(p * (1 - p)).
    """
    assert expected_std > 0 and samples.numel() > 0, (
        f"std {expected_std}, {samples.numel()} samples"
    )
    mean = float(samples.detach().double().mean())
    return (mean - expected_mean) / (expected_std / math.sqrt(samples.numel()))


def z_limit(false_alarm_rate: float, comparisons: int = 1) -> float:
    """|z| that a correct implementation exceeds with this probability, in any of so many comparisons together."""
    return -NormalDist().inv_cdf(false_alarm_rate / (2 * comparisons))
