"""The gradient of a bias under autocast on a CPU: sums of bfloat16 rows in float32 (bounded, and exact over threads)."""

from __future__ import annotations

import pytest
import torch

from narrowgauge.nn.autograd_rules import column_sums
from narrowgauge.ops.norm_act import cpp
from tests.compare import assert_same

needs_compiler = pytest.mark.skipif(
    bool(cpp.LIBRARY.missing), reason=cpp.LIBRARY.missing or "has one"
)
SHAPES = [(1, 1), (3, 17), (33, 64), (100, 257), (2050, 31)]


def gradients(rows, columns):
    """Rows, a slice of columns, a transpose, and one row that stands for all, with denormals and zeros."""
    x = torch.randn(rows, columns) * 2.0 ** torch.randint(-9, 9, (rows, columns))
    x[torch.rand(rows, columns) < 0.1] = 0.0
    x[torch.rand(rows, columns) < 0.1] = 1e-40
    x = x.to(torch.bfloat16)
    yield x
    yield torch.nn.functional.pad(x, (0, 3))[:, :columns]
    yield x.T.contiguous().T
    yield x[:1].expand(rows, columns)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_bias_gets_the_sum_over_tokens(shape):
    """n additions of float32 are off by at most n 2**-24 times the sum of magnitudes, in any order."""
    for gy in gradients(*shape):
        exact, size = gy.double().sum(0), gy.double().abs().sum(0)
        found = column_sums(gy, torch.float32)
        assert found.dtype == torch.float32
        assert ((found.double() - exact).abs() <= len(gy) * 2.0**-24 * size).all()


@needs_compiler
def test_the_kernel_takes_the_gradients_of_autocast_alone(monkeypatch):
    took, run = [], cpp.summed_rows
    monkeypatch.setattr(cpp, "summed_rows", lambda gy: took.append(gy.dtype) or run(gy))
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for of_bias in (torch.float32, torch.bfloat16):
            assert column_sums(torch.ones(3, 5).to(dtype), of_bias).dtype == of_bias
    assert column_sums(torch.ones(0, 5, dtype=torch.bfloat16), torch.float32).tolist() == [0.0] * 5
    assert took == [torch.bfloat16]


@needs_compiler
def test_what_is_not_finite_stays_in_its_column():
    gy = torch.ones(70, 40, dtype=torch.bfloat16)
    gy[3, 5], gy[60, 7], gy[61, 7] = float("nan"), float("inf"), float("-inf")
    found = column_sums(gy, torch.float32)
    assert found[5].isnan() and found[7].isnan() and (found.nan_to_num(nan=70.0) == 70.0).all()


@needs_compiler
def test_sums_do_not_depend_on_the_number_of_threads():
    gy = torch.randn(700, 513).to(torch.bfloat16)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            found.append(cpp.summed_rows(gy))
    finally:
        torch.set_num_threads(before)
    assert_same(found[1], found[0])
    assert_same(found[2], found[0])
