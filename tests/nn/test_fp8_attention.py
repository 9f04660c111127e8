"""FP8 attention: its noise beside float64, its masks and its gradients (bounded, and exact).

The expected noise. Rounding to E4M3 adds 2**-6 / 12 of a binade's squared base to a squared number,
6.0e-4 of it if mantissas are spread evenly in the logarithm: 32 dB. The casts of P and V add 6.0e-4
each. Those of Q and K add 6.0e-4 of the sum of squared products Q K / sqrt(width) each, to a score
and so to the logarithm of P. For normal numbers that sum is 1 on average. But y counts keys by P
squared, which prefers large products: there it is 1 / (1 - 2 / width) + 12 / width, 1.44 for a width
of 32. Together 6.0e-4 * (2 + 2 * 1.44) = 2.9e-3, 25.3 dB.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from narrowgauge.errors import ShapeError
from narrowgauge.formats import E4M3
from narrowgauge.nn.fp8_attention import fp8_attention
from narrowgauge.ops.attention import BLOCK, LARGEST, block_cast
from tests.compare import assert_same
from tests.raising import raises

EXPECTED_DB, TOLERANCE_DB = 25.3, 1.0
HEADS, WIDTH = 4, 32


def operands(
    tokens: int, key_heads: int = HEADS, dtype: torch.dtype = torch.float32, keys: int = 0
):
    generator = torch.Generator().manual_seed(tokens + key_heads)
    return [
        torch.randn(2, heads, length, WIDTH, generator=generator).to(dtype)
        for heads, length in (
            (HEADS, tokens),
            (key_heads, keys or tokens),
            (key_heads, keys or tokens),
        )
    ]


def distances(tokens: int) -> Tensor:
    return torch.arange(tokens)[:, None] - torch.arange(tokens)


def packed(tokens: int) -> Tensor:
    """[1, 1, T, T]: causal within documents of unequal lengths."""
    document = (torch.arange(tokens)[:, None] >= torch.tensor([tokens // 5, tokens // 2])).sum(1)
    return ((document[:, None] == document) & (distances(tokens) >= 0))[None, None]


def masks(tokens: int) -> dict[str, dict]:
    distance = distances(tokens)
    added = torch.randn(2, HEADS, tokens, tokens, generator=torch.Generator().manual_seed(0))
    return {
        "none": {},
        "causal": {"is_causal": True},
        "window": {"mask": ((distance >= 0) & (distance < 40))[None, None]},
        "packed": {"mask": packed(tokens)},
        "added": {"mask": added / 4},
    }


def exact(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, mask: Tensor | None = None):
    """float64, each head of keys repeated."""
    k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], 1).double() for each in (k, v))
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.double()
    return F.scaled_dot_product_attention(q.double(), k, v, mask, is_causal=is_causal)


def whole(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False, mask: Tensor | None = None):
    """The definition said once more, in float64, with all scores at once and no running maximum."""
    group = q.shape[1] // k.shape[1]
    q, k, v = (
        values.double() * scales.repeat_interleave(BLOCK, 2)[:, :, : values.shape[2], None]
        for values, scales in map(block_cast, (q, k, v))
    )
    k, v = (each.repeat_interleave(group, 1) for each in (k, v))
    scores = q @ k.mT / math.sqrt(q.shape[-1])
    if is_causal:
        mask = distances(q.shape[2]) >= 0
    if mask is not None:
        is_bool = mask.dtype == torch.bool
        scores = scores.masked_fill(~mask, -math.inf) if is_bool else scores + mask.double()
    p = torch.exp(scores - scores.amax(-1, keepdim=True))
    return E4M3.round(p * LARGEST).double() / LARGEST @ v / p.sum(-1, keepdim=True)


def sqnr_db(found: Tensor, expected: Tensor) -> float:
    noise = (found.double() - expected).square().sum()
    return float(10 * torch.log10(expected.square().sum() / noise))


@pytest.mark.parametrize("key_heads", [HEADS, 2, 1])
@pytest.mark.parametrize("name", masks(8))
@pytest.mark.parametrize("tokens", [BLOCK, 2 * BLOCK + 37])
def test_noise_is_that_of_the_definition(name, tokens, key_heads):
    """Beside float64 within 1 dB of the same casts in float64; for plain scores of the formula too."""
    given, settings = operands(tokens, key_heads), masks(tokens)[name]
    reference = exact(*given, **settings)
    found = sqnr_db(fp8_attention(*given, **settings), reference)
    assert abs(found - sqnr_db(whole(*given, **settings), reference)) < TOLERANCE_DB
    if name == "none":
        assert abs(found - EXPECTED_DB) < TOLERANCE_DB


@pytest.mark.parametrize("name", masks(8))
def test_one_block_is_the_whole_matrix(name):
    """Without a second block no maximum moves: float32's rounding alone is left (bounded)."""
    given, settings = operands(BLOCK), masks(BLOCK)[name]
    # A last bit of a score may move a P to the next number of E4M3, 1/16 of it, in few places.
    assert sqnr_db(fp8_attention(*given, **settings), whole(*given, **settings)) > 50


@pytest.mark.parametrize("name", ["none", "causal", "packed"])
def test_gradients_are_those_of_attention_in_16_bits(name):
    """Equal bits, since torch's kernel computes them (exact)."""
    settings = masks(72)[name]
    ours = [each.requires_grad_() for each in operands(72, dtype=torch.bfloat16)]
    others = [each.detach().clone().requires_grad_() for each in ours]
    gradient = torch.randn(2, HEADS, 72, WIDTH).bfloat16()
    fp8_attention(*ours, **settings).backward(gradient)
    mask = settings.get("mask")
    y = F.scaled_dot_product_attention(
        *others, mask, is_causal=settings.get("is_causal", False), scale=1 / math.sqrt(WIDTH)
    )
    y.backward(gradient)
    for own, other in zip(ours, others, strict=True):
        assert_same(own.grad, other.grad)


def test_only_the_wanted_gradients_are_computed():
    q, k, v = operands(16, 2)
    v.requires_grad_()
    fp8_attention(q, k, v, is_causal=True).sum().backward()
    assert q.grad is None and k.grad is None and v.grad.shape == v.shape


def test_a_gradient_of_shared_heads_sums_over_the_group():
    ours = [each.requires_grad_() for each in operands(40, 2)]
    wide = [each.detach().double().requires_grad_() for each in ours]
    fp8_attention(*ours, mask=packed(40)).sum().backward()
    exact(*wide, mask=packed(40)).sum().backward()
    for own, other in zip(ours, wide, strict=True):
        torch.testing.assert_close(own.grad.double(), other.grad, rtol=1e-4, atol=1e-5)


def test_a_causal_mask_and_the_flag_agree():
    given = operands(BLOCK + 50)
    mask = (distances(BLOCK + 50) >= 0)[None, None]
    assert_same(fp8_attention(*given, is_causal=True), fp8_attention(*given, mask))


def test_an_outlier_costs_its_own_block_alone():
    """Other heads and blocks of keys keep their scale (exact)."""
    q, k, v = operands(2 * BLOCK)
    before = [block_cast(each) for each in (k, v)]
    k[0, 1, 5, 3] = v[0, 1, 5, 3] = 1e4
    for (values, scales), each in zip(before, (k, v), strict=True):
        found, found_scales = block_cast(each)
        changed = torch.zeros(found.shape[:3], dtype=torch.bool)
        changed[0, 1, :BLOCK] = True
        assert_same(found[~changed], values[~changed])
        of_blocks = changed[:, :, ::BLOCK]
        assert_same(found_scales[~of_blocks], scales[~of_blocks])
        assert (found_scales[of_blocks] > scales[of_blocks]).all()
    assert fp8_attention(q, k, v).isfinite().all()


def test_a_query_that_attends_to_nothing_gets_zeros():
    mask = torch.ones(1, 1, 12, 12, dtype=torch.bool)
    mask[..., 3, :] = False
    given = [each.requires_grad_() for each in operands(12)]
    y = fp8_attention(*given, mask)
    assert (y[:, :, 3] == 0).all() and y[:, :, 2].any()
    y.sum().backward()
    assert all(each.grad.isfinite().all() for each in given)


def test_special_operands():
    """Zeros stay zeros, a NaN stays visible, subnormal numbers and no tokens at all are computed."""
    q, k, v = operands(20)
    assert (fp8_attention(q, k, torch.zeros_like(v)) == 0).all()
    assert fp8_attention(torch.zeros_like(q), k * 1e-40, v * 1e-40).isfinite().all()
    poisoned = v.clone()
    poisoned[1, 2, 4, 7] = torch.nan
    y = fp8_attention(q, k, poisoned)
    assert y[1, 2].isnan().all() and y[0].isfinite().all()
    assert fp8_attention(q[:, :, :0], k, v).shape == (2, HEADS, 0, WIDTH)
    assert (fp8_attention(q, k[:, :, :0], v[:, :, :0]) == 0).all()


def test_one_query_after_a_cache_and_a_narrower_value():
    q, k, v = operands(1, 2, keys=BLOCK + 9)
    y = fp8_attention(q, k, v[..., :24], scale=0.1)
    assert y.shape == (2, HEADS, 1, 24)
    expected = F.scaled_dot_product_attention(q, k, v[..., :24], scale=0.1, enable_gqa=True)
    assert sqnr_db(y, expected.double()) > EXPECTED_DB - 3  # few numbers: 48 a head


def test_autocast_gives_its_dtype():
    q, k, v = operands(16)
    with torch.autocast("cpu", torch.bfloat16):
        y = fp8_attention(q, k, v)
    assert y.dtype == torch.bfloat16
    assert_same(y, fp8_attention(q.bfloat16(), k.bfloat16(), v.bfloat16()))


def test_operands_and_masks_that_do_not_fit_are_refused():
    q, k, v = operands(8)
    for given in ((q[0], k, v), (q[..., :0], k[..., :0], v)):
        with raises(ShapeError, "fp8-attention.axes"):
            fp8_attention(*given)
    for given in ((q[..., :16], k, v), (q[:1], k, v)):
        with raises(ShapeError, "fp8-attention.heads"):
            fp8_attention(*given)
    allowed = torch.ones(2, HEADS, 8, 8)
    for mask in (
        allowed[0, 0] > 0,
        allowed[0] > 0,
        allowed.int(),
        allowed[:, :3],
        allowed[..., :7],
    ):
        with raises(ShapeError, "fp8-attention.mask", list(mask.shape)):
            fp8_attention(q, k, v, mask)
    longer = torch.cat([allowed > 0, allowed < 0], dim=-1)
    assert_same(fp8_attention(q, k, v, longer), fp8_attention(q, k, v))


def test_refusals():
    q, k, v = operands(8, 3)
    with raises(ShapeError, "fp8-attention.heads"):
        fp8_attention(q, k, v)
    q, k, v = operands(8)
    with raises(ShapeError, "fp8-attention.learned-mask"):
        fp8_attention(q, k, v, torch.zeros(1, 1, 8, 8, requires_grad=True))
