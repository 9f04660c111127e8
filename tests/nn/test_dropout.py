"""Dropout by the number of the element: the kernel is its definition (exact), what it leaves out (statistical), repeated (exact)."""

from __future__ import annotations

import copy
import math

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from narrowgauge.nn import dropout as counted
from narrowgauge.nn.dropout import CountedDropout, reference, use_counted_dropout
from narrowgauge.ops.dropout import Dropout
from tests.compare import assert_same

pytestmark = pytest.mark.skipif(
    bool(counted.LIBRARY.missing), reason=counted.LIBRARY.missing or "built"
)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 1.0, 2.0**-20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_kernel_is_its_definition(dtype, p):
    """Forward and backward, ragged, empty and on several threads; NaN, infinities, subnormals and a huge outlier among them."""
    for shape in [(3, 5, 7), (1,), (0, 4), (130, 1031)]:
        torch.manual_seed(0)
        x = torch.randn(shape).to(dtype)
        flat = x.view(-1)
        special = [math.nan, math.inf, -math.inf, 1e-40, -0.0, 3e38]
        flat[: len(special)] = torch.tensor(special[: flat.numel()]).to(dtype)
        x.requires_grad_()
        torch.manual_seed(1)
        y = counted.dropout(x, p)
        torch.manual_seed(1)
        words = tuple(torch.randint(0, 2**32, (2,), dtype=torch.int64).tolist())
        assert_same(y.detach(), reference(x.detach(), Dropout(p, words)))
        gy = torch.randn(shape).to(dtype)
        y.backward(gy)
        assert_same(x.grad, reference(gy, Dropout(p, words)))


def test_the_size_of_a_block_is_stated_once(monkeypatch):
    """Another size gives the same numbers: the C++ takes it as an argument (exact)."""
    monkeypatch.setattr(counted, "BLOCK", 1 << 20)
    x = torch.randn(7, 1031)
    torch.manual_seed(1)
    y = counted.dropout(x, 0.3)
    torch.manual_seed(1)
    words = tuple(torch.randint(0, 2**32, (2,), dtype=torch.int64).tolist())
    assert_same(y, reference(x, Dropout(0.3, words)))


def test_it_reads_what_is_not_contiguous():
    x = torch.randn(40, 30).T
    torch.manual_seed(1)
    y = counted.dropout(x, 0.3)
    torch.manual_seed(1)
    assert_same(y, counted.dropout(x.contiguous(), 0.3))


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_the_share_that_is_left_out_and_its_neighbours(p):
    """|z| < 5 of the count and of pairs of neighbours: 6e-7 each, two counts."""
    torch.manual_seed(0)
    n = 2**20
    gone = (counted.dropout(torch.ones(n), p) == 0).double()
    pairs = (gone[1:] * gone[:-1]).sum()
    assert abs(float(gone.sum()) - n * p) < 5 * math.sqrt(n * p * (1 - p))
    variance = n * (p**2 * (1 - p**2) + 2 * p**3 * (1 - p))
    assert abs(float(pairs) - (n - 1) * p**2) < 5 * math.sqrt(variance)
    assert not torch.equal(
        counted.dropout(torch.ones(64), p), counted.dropout(torch.ones(64), p)
    ), "the next draws others"


def test_checkpointing_repeats_it_and_nothing_is_kept():
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(16, 16), nn.Dropout(0.4), nn.Tanh())
    assert use_counted_dropout(layer) == 1 and type(layer[1]) is CountedDropout
    x, found = torch.randn(8, 16, requires_grad=True), []
    for again in (False, True):
        own = copy.deepcopy(layer)
        torch.manual_seed(3)
        kept: list[torch.Size] = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t, kept=kept: kept.append(t.shape) or t, lambda t: t
        ):
            y = checkpoint(own, x, use_reentrant=False) if again else own(x)
        y.sum().backward()
        found.append(own[0].weight.grad)
        if not again:
            assert len(kept) == 3, "x and weight of the Linear, y of tanh"
    assert_same(*found)


def test_it_is_torchs_where_it_is_not_written(monkeypatch):
    """And in evaluation nothing is drawn."""
    layer = CountedDropout(0.5)
    x = torch.randn(16, dtype=torch.float64)
    torch.manual_seed(0)
    y = layer(x)
    torch.manual_seed(0)
    assert_same(y, nn.functional.dropout(x, 0.5))
    state = torch.get_rng_state()
    assert_same(layer.eval()(x), x) and torch.equal(state, torch.get_rng_state())
