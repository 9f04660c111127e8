"""Comparisons for tests; a stand-in with the names of the real file."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def assert_same(actual: Tensor, expected: Tensor) -> None:
    """Fail unless both are equal bit for bit, in shape and dtype too."""
    __tracebackhide__ = True
    assert actual.shape == expected.shape, f"shape {list(actual.shape)}, expected {list(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{actual.dtype}, expected {expected.dtype}"
    bits = _BITS[expected.element_size()]
    differs = actual.cpu().contiguous().view(bits) != expected.cpu().contiguous().view(bits)
    first = [(i, actual[tuple(i)], expected[tuple(i)]) for i in differs.nonzero()[:5].tolist()]
    assert not differs.any(), f"{int(differs.sum())} of {differs.numel()} differ: {first}"


def sqnr_db(reference: Tensor, value: Tensor) -> float:
    """10 log10(sum r^2 / sum (r - v)^2) in fp64; inf when equal, NaN when anything is not finite."""
    reference, value = reference.cpu().double(), value.cpu().double()
    if not (reference.isfinite().all() and value.isfinite().all()):
        return math.nan
    noise, signal = float((reference - value).square().sum()), float(reference.square().sum())
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def assert_sqnr(actual: Tensor, reference: Tensor, floor_db: float) -> None:
    """Fail unless the error of `actual` lies at least floor_db below `reference`."""
    db = sqnr_db(reference, actual)
    assert db >= floor_db, f"SQNR {db:.2f} dB, floor {floor_db:.2f} dB"


def every_finite(dtype: torch.dtype) -> Tensor:
    """All finite values of an 8- or 16-bit float as float32, in code order, with both zeros."""
    codes = torch.arange(1 << 8 * dtype.itemsize, dtype=torch.int32).to(_BITS[dtype.itemsize])
    values = codes.view(dtype).float()
    return values[values.isfinite()]
