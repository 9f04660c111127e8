"""Clipping by the norm of all gradients: torch's bits where float32 holds the squares (exact), float64 where not (bounded)."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from narrowgauge.optim.clipping import clip_gradients, gradient_norm
from tests.compare import assert_same


def parameters(scale: float, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    torch.manual_seed(0)
    made = [
        nn.Parameter(torch.zeros(shape, dtype=dtype)) for shape in ((7, 5), (3,), (2, 2), (0, 4))
    ]
    for each in made[:2] + made[3:]:
        each.grad = (torch.randn(each.shape, dtype=torch.float64) * scale).to(dtype)
    return made


@pytest.mark.parametrize("largest", [None, 1.0, 1e3])
@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 1e15, math.nan])
def test_the_bits_are_those_of_torch(scale, largest):
    ours, theirs = parameters(scale), parameters(scale)
    expected = torch.nn.utils.clip_grad_norm_(theirs, math.inf if largest is None else largest)
    assert_same(clip_gradients(ours, largest), expected)
    for a, b in zip(ours, theirs, strict=True):
        assert (a.grad is None) == (b.grad is None)
        if a.grad is not None:
            assert_same(a.grad, b.grad)


@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float32, 1e25), (torch.bfloat16, 1e30), (torch.float16, 2e4)]
)
def test_squares_beyond_the_type_do_not_make_the_norm_infinite(dtype, scale):
    """One rounding of the norm to float32; of the clipped gradients one more of the factor, and one to their type."""
    made = parameters(scale, dtype)
    before = [each.grad.double() for each in made if each.grad is not None]
    truth = torch.linalg.vector_norm(torch.cat([each.flatten() for each in before]))
    norm = clip_gradients(made, 1.0)
    assert norm.dtype == torch.float32 and norm.isfinite()
    torch.testing.assert_close(norm.double(), truth, rtol=2.0**-24, atol=0)
    after = [each.grad.double() for each in made if each.grad is not None]
    for a, b in zip(after, before, strict=True):
        torch.testing.assert_close(
            a, b / truth, rtol=torch.finfo(dtype).eps + 2.0**-22, atol=torch.finfo(dtype).tiny
        )


def test_a_norm_is_infinite_only_if_a_gradient_is_or_it_is_beyond_float32():
    assert gradient_norm([torch.tensor([1.0, math.inf])]) == math.inf
    assert gradient_norm([torch.full((4,), 3e38)]) == math.inf
    assert gradient_norm([torch.tensor([1e38, 1e38])]) == pytest.approx(math.sqrt(2) * 1e38)
    assert gradient_norm([]) == 0 and clip_gradients([nn.Parameter(torch.zeros(3))], 1.0) == 0
