"""Norm and clipping of gradients by the C++ kernel: torch's products (exact), sums of squares in float64 (bounded), what it refuses."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from narrowgauge.ops import cpp
from narrowgauge.optim.clipping import clip_gradients
from narrowgauge.optim.cpp import norm
from narrowgauge.optim.cpp.norm import BLOCK, GradientBlocks
from tests.compare import assert_same

pytestmark = pytest.mark.skipif(bool(norm.LIBRARY.missing), reason=norm.LIBRARY.missing or "built")
SHAPES = [(3, BLOCK - 1), (1,), (0, 4), (BLOCK,), (40, 257)]


def gradients(dtype: torch.dtype) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]
    made[0][1:] = 0  # blocks of zeros, which are left alone
    return made


def launch_on(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of any size run on so many threads."""
    monkeypatch.setattr(cpp, "ELEMENTS_PER_THREAD", 1)
    monkeypatch.setattr(cpp, "parts", lambda elements: threads)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_square_and_product(dtype, threads, monkeypatch):
    """Relative 2^-40: sums of 14,000 float64 squares, each within 2^-53."""
    launch_on(threads, monkeypatch)
    own, theirs = gradients(dtype), gradients(dtype)
    blocks = GradientBlocks.of(own)
    truth = sum(each.double().square().sum() for each in theirs)
    assert abs(float(blocks.square()) - float(truth)) <= 2**-40 * float(truth)
    blocks.multiply(0.3)
    factor = torch.tensor(0.3)
    torch._foreach_mul_(theirs, factor)
    for mine, other in zip(own, theirs, strict=True):
        assert_same(mine, other)


def test_sums_do_not_depend_on_threads(monkeypatch):
    found = []
    for threads in (1, 2, 3):
        launch_on(threads, monkeypatch)
        found.append(GradientBlocks.of(gradients(torch.float32)).square())
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("special", [math.nan, math.inf, 1e-40, 1.8e19])
def test_one_element_is_seen_wherever_it_stands(special):
    """In the last place of a ragged tensor; what is subnormal or beyond float32's squares too."""
    given = [torch.zeros(2 * BLOCK + 5), torch.zeros(3)]
    given[0][-1] = special
    square = float(GradientBlocks.of(given).square())
    wide = float(given[0][-1].double())
    assert square == wide * wide or (math.isnan(square) and math.isnan(special))


@pytest.mark.parametrize("largest", [None, 1.0, 1e9])
def test_a_clipped_gradient_is_torchs_product_with_the_factor(largest):
    """Exact; the norm within one rounding to float32."""
    own, theirs = (
        [nn.Parameter(torch.zeros(each.shape)) for each in gradients(torch.float32)]
        for _ in range(2)
    )
    for given in (own, theirs):
        for parameter, gradient in zip(given, gradients(torch.float32), strict=True):
            parameter.grad = gradient
    truth = torch.linalg.vector_norm(torch.cat([each.grad.double().flatten() for each in own]))
    found = clip_gradients(own, largest, wide=True)
    assert found.dtype == torch.float32 and abs(float(found) - float(truth)) <= 2**-24 * float(
        truth
    )
    if largest is not None:
        torch.nn.utils.clip_grads_with_norm_(theirs, largest, found)
    for mine, other in zip(own, theirs, strict=True):
        assert_same(mine.grad, other.grad)


def test_what_the_kernel_does_not_take():
    assert GradientBlocks.of([]) is None and GradientBlocks.of([torch.zeros(0, 3)]) is None
    assert GradientBlocks.of([torch.zeros(4, dtype=torch.float64)]) is None
    assert GradientBlocks.of([torch.zeros(4, 4).T[:2]]) is None
    assert GradientBlocks.of([torch.zeros(4, device="meta")]) is None
