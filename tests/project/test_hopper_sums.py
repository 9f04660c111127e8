"""Sums of FP8 as Hopper adds them are those of their definition (exact), and what training uses where they are asked for."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from benchmarks.hopper_sums import GROUP, PROMOTED, hopper_sums, in_place_of_float32
from narrowgauge.ops.mm import KERNELS
from tests.compare import assert_same

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(shutil.which("g++") is None, reason="g++ builds the sums"),
]


def defined(lhs: Tensor, rhs: Tensor, fast: bool, bits: int) -> Tensor:
    """The module's two lines, in float64, which holds every number in them."""
    lhs, rhs = lhs.double(), rhs.double()
    total = torch.zeros(len(lhs), len(rhs), dtype=torch.float64)
    result = torch.zeros(len(lhs), len(rhs), dtype=torch.float32)
    for k in range(0, lhs.shape[1], GROUP):
        addends = torch.cat(
            [lhs[:, None, k : k + GROUP] * rhs[None, :, k : k + GROUP], total[..., None]], dim=-1
        )
        e = torch.frexp(addends.abs().amax(-1)).exponent - 1
        whole = torch.ldexp(addends, (bits - 1 - e)[..., None]).trunc().sum(-1)
        mantissa, exponent = torch.frexp(torch.ldexp(whole, e - bits + 1))
        total = torch.ldexp(torch.ldexp(mantissa, torch.tensor(bits)).trunc(), exponent - bits)
        if not fast and (k + GROUP) % PROMOTED == 0:
            result += total.float()
            total = torch.zeros_like(total)
    return result + total.float()


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize(("m", "n", "k"), [(5, 70, 300), (33, 64, 128), (3, 1, 1), (8, 40, 1000)])
@pytest.mark.parametrize("bits", [14, 11])
def test_sums_are_those_of_the_definition(dtype, m, n, k, bits):
    lhs = (torch.randn(m, k) * torch.randn(m, 1).mul(2).exp()).to(dtype).float()
    rhs = torch.randn(n, k).to(torch.float8_e4m3fn).float()
    for fast in (False, True):
        assert_same(hopper_sums(lhs, rhs, fast=fast, bits=bits), defined(lhs, rhs, fast, bits))


def test_small_addends_are_lost_beside_a_large_sum():
    """2**13 and then ones: 14 bits hold them, 13 bits none of them; split, those of the first 128 products are lost alone."""
    lhs, rhs = torch.ones(1, 512), torch.ones(1, 512)
    lhs[0, 0], rhs[0, 0] = 128.0, 64.0
    assert float(hopper_sums(lhs, rhs, fast=True, bits=14)) == 2**13 + 511
    assert float(hopper_sums(lhs, rhs, fast=True, bits=13)) == 2**13
    assert float(hopper_sums(lhs, rhs, fast=False, bits=13)) == 2**13 + 384


def test_nan_and_infinity_spoil_what_they_touch():
    lhs, rhs = torch.ones(3, 40), torch.ones(2, 40)
    lhs[1, 7], rhs[0, 9] = float("nan"), float("inf")
    out = hopper_sums(lhs, rhs, fast=True)
    assert out[1].isnan().all() and out[0, 0].isinf() and out[2, 1] == 40


def test_layers_use_them_by_their_flags_and_no_longer_afterwards():
    """In three products where the recipe says fast, in the first alone where it does not; both differ from float32."""
    before = list(KERNELS.kernels)
    x = torch.randn(640, 320)
    weight, grad = torch.randn(256, 320), torch.randn(640, 256)

    def results(recipe: str) -> list[Tensor]:
        layer, given = nn.Linear(320, 256, bias=False), x.clone().requires_grad_()
        layer.weight.data.copy_(weight)
        ng.convert(layer, recipe)
        out = layer(given)
        out.backward(grad)
        assert given.grad is not None and layer.weight.grad is not None
        return [out.detach(), given.grad, layer.weight.grad]

    plain = results("fp8-current")
    with in_place_of_float32():
        split, fast = results("fp8-current"), results("fp8-current-fast")
    assert KERNELS.kernels == before
    for one, other in zip(plain, results("fp8-current-fast"), strict=True):
        assert_same(one, other)
    assert [torch.equal(one, other) for one, other in zip(split, fast, strict=True)] == [
        True,
        False,
        False,
    ]
    assert not any(torch.equal(one, other) for one, other in zip(plain, split, strict=True))
