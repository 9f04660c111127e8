"""The division of `narrowgauge.ops.triton.scales.divided`, step by step with a real fma, against the correctly rounded quotient (exact)."""

from __future__ import annotations

import ctypes
import ctypes.util
import math

import numpy as np
import pytest

COUNT = 12_000


@pytest.fixture(scope="module")
def fma():
    """float32 fused multiplication and addition of the C library, element by element."""
    library = ctypes.CDLL(ctypes.util.find_library("m"))
    library.fmaf.argtypes, library.fmaf.restype = (ctypes.c_float,) * 3, ctypes.c_float
    assert library.fmaf(1 + 2**-23, 1 + 2**-23, -(1 + 2**-22)) == 2**-46  # rounds once

    def apply(a, b, c):
        found = [library.fmaf(*each) for each in zip(a.tolist(), b.tolist(), c.tolist(), strict=True)]
        return np.array(found, np.float32)

    return apply


def divided(x: np.ndarray, scale: np.ndarray, fma) -> np.ndarray:
    """As the kernel does it; float32 throughout."""
    bits = scale.view(np.int32)
    mantissa = ((bits & 0x007FFFFF) | 0x3F800000).view(np.float32)
    per_power = ((254 << 23) - (bits & 0x7F800000)).astype(np.int32).view(np.float32)
    reciprocal = np.float32(1) / mantissa
    shifted = x * per_power
    first = shifted * reciprocal
    second = fma(fma(first, -mantissa, shifted), reciprocal, first)
    third = fma(fma(second, -mantissa, shifted), reciprocal, second)
    return np.where(np.abs(first) < math.inf, np.copysign(third, x), first)


def numbers(generator: np.random.Generator, low: int, high: int) -> np.ndarray:
    """Mantissas at random, and next to 1, next to 2 and next to each other's: where quotients are hard to round."""
    mantissa = generator.integers(0, 2**23, COUNT)
    edge = generator.choice([0, 1, 2, 3, 2**23 - 1, 2**23 - 2, 2**22, 2**22 + 1], COUNT)
    mantissa = np.where(generator.random(COUNT) < 0.4, edge, mantissa)
    exponent = generator.integers(low + 127, high + 128, COUNT)
    sign = generator.integers(0, 2, COUNT) << 31
    return (sign | (exponent << 23) | mantissa).astype(np.uint32).view(np.float32)


@pytest.mark.parametrize("seed", range(3))
def test_quotients_are_correctly_rounded(fma, seed):
    """Scales from e4m3's smallest to 2^120, quotients from 2^-100 to 2^126.

    All formats round those below to zero and saturate at those above.
    """
    generator = np.random.default_rng(seed)
    scale = np.abs(numbers(generator, -116, 119))
    x = numbers(generator, -126, 126)
    with np.errstate(over="ignore", under="ignore"):
        exact = x / scale
        found = divided(x, scale, fma)
    counts = (np.abs(exact) >= 2.0**-100) & (np.abs(exact) < 2.0**126)
    assert counts.sum() > COUNT / 3 and np.isinf(exact).any()
    np.testing.assert_array_equal(found[counts].view(np.int32), exact[counts].view(np.int32))
    small, large = np.abs(exact) < 2.0**-100, np.abs(exact) >= 2.0**126
    assert (np.abs(found[small]) < 2.0**-99).all()  # zero in every format
    assert (np.abs(found[large]) >= 2.0**125).all()  # saturates in every format
    np.testing.assert_array_equal(np.signbit(found), np.signbit(exact))


def test_zeros_keep_their_sign(fma):
    """The remainder of -0 is +0, and so was the quotient once."""
    x, scale = np.array([0.0, -0.0, -1e-45, -1e-30], np.float32), np.array([3, 3, 3e30, 1e30], np.float32)
    np.testing.assert_array_equal(divided(x, scale, fma).view(np.int32), (x / scale).view(np.int32))


def test_a_product_with_the_reciprocal_is_not_enough():
    """Control: without the remainders more than a tenth of the quotients are off."""
    generator = np.random.default_rng(0)
    scale, x = np.abs(numbers(generator, -3, 3)), numbers(generator, -3, 3)
    assert (x * (np.float32(1) / scale) != x / scale).mean() > 0.1


def test_infinity_and_nan_pass(fma):
    x = np.array([math.inf, -math.inf, math.nan, 3e38, 0.0, -0.0], np.float32)
    scale = np.full(6, 1.7e-30, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        np.testing.assert_array_equal(divided(x, scale, fma), x / scale)
