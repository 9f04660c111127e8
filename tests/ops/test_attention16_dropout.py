"""Dropout of attention weights: both kernels against float64 with the same weights dropped out."""

from __future__ import annotations

import math
import random

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from narrowgauge.errors import ConfigError
from narrowgauge.nn.attention16 import attention16 as with_gradients
from narrowgauge.ops import attention16
from narrowgauge.ops.attention16 import Attention16Spec
from narrowgauge.ops.dropout import Dropout
from tests.ops.test_attention16 import KERNELS, NAMES, NOISE, call, masks, needs_kernel, noise
from tests.raising import raises


def run(given, dropout, backend):
    q, k, v, grad_y, mask, is_causal = given
    options = {"dropout": dropout, "backend": backend}
    y, lse = attention16.attention(q, k, v, mask, is_causal, given.scale, **options)
    grads = attention16.attention_backward(
        grad_y, q, k, v, mask, y, lse, is_causal, given.scale, **options
    )
    return y, *grads


def truth_of(given, dropout: Dropout) -> tuple[Tensor, ...]:
    """Plain operations of torch in float64."""
    q, k, v = (each.double().requires_grad_() for each in given[:3])
    group = q.shape[1] // k.shape[1]
    s = given.scale * q @ k.repeat_interleave(group, 1).mT
    if given.mask is not None and given.mask.dtype == torch.bool:
        s = s.masked_fill(~given.mask, -math.inf)
    elif given.mask is not None:
        s = s + given.mask
    if given.is_causal:
        s = s.masked_fill(~torch.ones(s.shape[-2:], dtype=torch.bool).tril(), -math.inf)
    p = s.softmax(-1)
    batch, heads, queries, keys = p.shape
    kept = dropout.kept((batch, heads, keys, queries), p.device).mT
    y = torch.where(kept, p / (1 - dropout.rate), 0.0) @ v.repeat_interleave(group, 1)
    return y, *torch.autograd.grad(y, (q, k, v), given.grad_y.double())


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("number", range(12))
def test_results_are_those_of_float64(backend, number):
    draw = random.Random(number)
    batch, key_heads, group = draw.choice((1, 2)), draw.choice((1, 2)), draw.choice((1, 1, 3))
    queries, is_causal = draw.choice((16, 63, 64, 130, 197)), draw.random() < 0.4
    keys = queries if is_causal or draw.random() < 0.5 else draw.randint(30, 200)
    kinds = masks(batch, key_heads * group, queries, keys, number)
    mask = None if is_causal else kinds[draw.choice(("none", "padded", "added"))]
    given = call(
        batch, key_heads * group, key_heads, queries, keys, draw.choice((32, 64, 80)), is_causal=is_causal,
        mask=mask, seed=number,
    )  # fmt: skip
    words = (draw.getrandbits(32), draw.getrandbits(32))
    dropout = Dropout(draw.choice((0.1, 0.5, 0.03)), words)
    truth = truth_of(given, dropout)
    for name, found, true in zip(NAMES, run(given, dropout, backend), truth, strict=True):
        assert noise(found, true) <= NOISE, (name, noise(found, true))


@needs_kernel
def test_threads_change_no_bit():
    given, dropout = call(2, 4, 2, 130, 130, seed=1), Dropout(0.2, (3, 4))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(run(given, dropout, "native-cpp"))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("backend", KERNELS)
def test_everything_dropped_out(backend):
    for found in run(call(seed=2), Dropout(1.0, (5, 6)), backend):
        assert not found.any()


@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_weights_stay_independently_at_their_rate(rate):
    """Of each batch, head, query and key: the share that stays, within 5 standard errors."""
    kept = Dropout(rate, (7, 8)).kept((2, 3, 200, 300), torch.device("cpu")).double()
    for axes in ((1, 2, 3), (0, 2, 3), (0, 1, 3), (0, 1, 2)):
        share = kept.mean(axes)
        error = math.sqrt(rate * (1 - rate) / (kept.numel() / share.numel()))
        assert (share - (1 - rate)).abs().max() <= 5 * error
    # Neighbours of one query, and of one key.
    for one, other in ((kept[..., 1:], kept[..., :-1]), (kept[:, :, 1:], kept[:, :, :-1])):
        covariance = ((one - 1 + rate) * (other - 1 + rate)).mean().abs()
        assert covariance <= 5 * rate * (1 - rate) / math.sqrt(one.numel())


def test_the_mean_over_draws_is_attention_without_dropout():
    """y within 5 standard errors, by the definition."""
    given = call(1, 1, 1, 8, 16, 16, seed=3)
    plain = attention16.attention(*given[:3], None, False, given.scale, backend="reference")[0]
    ys = torch.stack(
        [run(given, Dropout(0.3, (n, 99)), "reference")[0].double() for n in range(400)]
    )
    error = ys.std(0) / math.sqrt(len(ys))
    assert ((ys.mean(0) - plain.double()).abs() <= 5 * error + 2**-8 * plain.abs()).all()


def functions():
    cpu = attention16.Device("cpu")
    spec = Attention16Spec(cpu, (torch.bfloat16,) * 3, 64, 64)
    return attention16.KERNELS.choose(spec).kernel.run()


def loss(q, k, v):
    y = with_gradients(
        functions(), q, k, v, None, is_causal=True, scale=0.125, dropout=Dropout.drawn(0.2)
    )
    return y.float().square().sum()


def test_checkpointing_drops_out_the_same_weights():
    given, found = call(seed=4), []
    for repeats in (False, True):
        torch.manual_seed(9)
        leaves = [each.clone().requires_grad_() for each in given[:3]]
        value = checkpoint(loss, *leaves, use_reentrant=False) if repeats else loss(*leaves)
        value.backward()
        found.append([value.detach(), *(each.grad for each in leaves)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert not torch.equal(loss(*given[:3]), loss(*given[:3]))  # each call draws anew


def test_no_number_is_drawn_for_a_rate_of_zero():
    before = torch.get_rng_state()
    assert Dropout.drawn(0.0) is None
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("rate", [-0.1, 1.5, math.nan, math.inf])
def test_a_rate_outside_of_0_to_1_is_refused(rate):
    with raises(ConfigError, "dropout.rate"):
        Dropout.drawn(rate)
