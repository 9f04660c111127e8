"""Attention in 16 bits: both kernels against float64 and against torch's kernel (bounded).

Masks, strides, threads and non-finite numbers are exact.
"""

from __future__ import annotations

import math
import random
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from narrowgauge.errors import BackendError
from narrowgauge.ops import attention16
from narrowgauge.ops.attention16 import Attention16Spec, cpp
from narrowgauge.ops.registry import Device

CPU = Device("cpu")
BF16 = (torch.bfloat16,) * 3
REFUSED = attention16.refuse(Attention16Spec(CPU, BF16, 64, 64))
needs_kernel = pytest.mark.skipif(
    REFUSED is not None, reason=f"native-cpp: {'' if REFUSED is None else REFUSED.text}"
)
KERNELS = [pytest.param("native-cpp", marks=needs_kernel), "reference"]
NAMES = ("y", "grad_q", "grad_k", "grad_v")


class Call(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    grad_y: Tensor
    mask: Tensor | None
    is_causal: bool

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.q.shape[-1])


def call(
    batch=1, heads=2, key_heads=2, queries=70, keys=70, width=64, value_width=None, *,
    is_causal=False, mask=None, seed=0,
) -> Call:  # fmt: skip
    """Operands as a model has them: [batch, tokens, heads, width] in memory."""
    generator = torch.Generator().manual_seed(seed)

    def drawn(heads: int, tokens: int, width: int) -> Tensor:
        x = torch.randn(batch, tokens, heads * width, generator=generator).bfloat16()
        return x.view(batch, tokens, heads, width).transpose(1, 2)

    value_width = value_width or width
    return Call(
        drawn(heads, queries, width), drawn(key_heads, keys, width), drawn(key_heads, keys, value_width),
        drawn(heads, queries, value_width), mask, is_causal,
    )  # fmt: skip


def run(given: Call, backend: str) -> tuple[Tensor, ...]:
    q, k, v, grad_y, mask, is_causal = given
    y, lse = attention16.attention(q, k, v, mask, is_causal, given.scale, backend=backend)
    grads = attention16.attention_backward(
        grad_y, q, k, v, mask, y, lse, is_causal, given.scale, backend=backend
    )
    assert all(each.dtype == torch.bfloat16 for each in (y, *grads)) and lse.dtype == torch.float32
    # The reshape for the next Linear copies nothing.
    assert all(each.transpose(1, 2).is_contiguous() for each in (y, *grads))
    return y, *grads


def by_torch(given: Call, dtype: torch.dtype) -> tuple[Tensor, ...]:
    q, k, v = (each.detach().to(dtype).requires_grad_() for each in given[:3])
    mask = given.mask
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(dtype)
    if mask is not None and given.is_causal:
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
        mask = mask & seen if mask.dtype == torch.bool else mask.masked_fill(~seen, -math.inf)
    causal = given.is_causal and mask is None
    y = F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=causal, enable_gqa=q.shape[1] != k.shape[1]
    )
    return y, *torch.autograd.grad(y, (q, k, v), given.grad_y.to(dtype))


def noise(found: Tensor, truth: Tensor) -> float:
    """Root mean square of the differences, as a share of that of the truth."""
    size = truth.square().mean().sqrt().clamp_min(1e-4)  # a gradient may be 0
    return ((found.double() - truth).square().mean().sqrt() / size).item()


# A rounding to bfloat16 is off by at most 2 ** -9. Four of them, of P, y, dS and of the result, add up
# to twice that as independent errors do. torch's kernel is at 0.002 to 0.005.
NOISE = 0.004


def assert_close(given: Call, backend: str) -> None:
    truth = by_torch(given, torch.float64)
    for name, found, true in zip(NAMES, run(given, backend), truth, strict=True):
        assert noise(found, true) <= NOISE, (name, noise(found, true), given.q.shape)


def masks(batch: int, heads: int, queries: int, keys: int, seed: int) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, keys + 1, (batch, 1, 1, 1), generator=generator)
    padded = torch.arange(keys) < lengths
    distance = torch.arange(queries)[:, None] - torch.arange(keys)
    return {
        "none": None,
        "padded": padded,
        "expanded": padded.expand(batch, 1, queries, keys),
        "window": ((distance >= 0) & (distance < 70))[None, None],
        "random": torch.rand(batch, heads, queries, keys, generator=generator) < 0.5,
        "added": torch.randn(1, heads, queries, keys, generator=generator).bfloat16(),
        "added float32": torch.randn(batch, 1, queries, keys, generator=generator),
        "least": torch.where(padded, 0.0, torch.finfo(torch.bfloat16).min).bfloat16(),
    }


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("number", range(24))
def test_results_are_those_of_float64(backend, number):
    """A search of shapes, groups, lengths and masks (bounded)."""
    draw = random.Random(number)
    batch, key_heads, group = draw.choice((1, 2)), draw.choice((1, 2, 3)), draw.choice((1, 1, 2, 4))
    queries, keys = draw.choice((1, 3, 16, 63, 64, 65, 130, 197)), draw.randint(1, 200)
    is_causal = draw.random() < 0.4
    keys = queries if draw.random() < 0.5 else keys
    kinds = masks(batch, key_heads * group, queries, keys, number)
    mask = kinds[draw.choice(list(kinds))]
    if mask is not None and mask.dtype == torch.bool:
        mask = mask.clone() if mask.shape[2] > 1 and draw.random() < 0.5 else mask
    width = draw.choice((32, 64, 80, 96, 128))
    value_width = draw.choice((width, width, 16, 256))
    assert_close(
        call(
            batch, key_heads * group, key_heads, queries, keys, width, value_width, is_causal=is_causal,
            mask=mask, seed=number,
        ),
        backend,
    )  # fmt: skip


@needs_kernel
@pytest.mark.parametrize("is_causal, mask", [(True, "none"), (False, "none"), (False, "padded"), (False, "added")])  # fmt: skip
def test_errors_are_no_larger_than_those_of_torch(is_causal, mask):
    """Of torch's flash attention, within 5 %, which is three standard errors of such a noise."""
    given = call(
        2, 4, 4, 256, 256, is_causal=is_causal, mask=masks(2, 4, 256, 256, 1)[mask], seed=5
    )
    if mask == "padded":
        given = given._replace(mask=given.mask.expand(2, 1, 256, 256))
    truth = by_torch(given, torch.float64)
    others = by_torch(given, torch.bfloat16)
    for name, found, other, true in zip(
        NAMES, run(given, "native-cpp"), others, truth, strict=True
    ):
        assert noise(found, true) <= 1.05 * noise(other, true), name


@needs_kernel
def test_the_kernel_is_its_definition():
    """They differ by the order of sums and the last bits of exp (bounded).

    One block of keys, so that both round P / exp(maximum) of the same maximum. A share of 5 % of
    numbers that go to a neighbour, 2 ** -8 away, is 0.0009.
    """
    for name, mask in masks(2, 4, 150, 60, 2).items():
        given = call(2, 4, 2, 150, 60, 80, is_causal=name == "none", mask=mask, seed=9)
        for found, other in zip(run(given, "native-cpp"), run(given, "reference"), strict=True):
            assert noise(found, other.double()) <= 0.0009, name


def strided(x: Tensor, kind: str) -> Tensor:
    if kind == "contiguous":
        return x.contiguous()
    if kind == "last axis":
        return x.mT.contiguous().mT
    if kind == "slice":  # of one tensor that holds q, k and v
        wide = torch.full((*x.shape[:-1], 3 * x.shape[-1]), math.nan, dtype=x.dtype)
        wide[..., x.shape[-1] : 2 * x.shape[-1]] = x
        return wide[..., x.shape[-1] : 2 * x.shape[-1]]
    # Keys of a cache that is longer than what it holds.
    cache = torch.full((*x.shape[:2], x.shape[2] + 9, x.shape[3]), math.nan, dtype=x.dtype)
    cache[:, :, : x.shape[2]] = x
    return cache[:, :, : x.shape[2]]


@needs_kernel
@pytest.mark.parametrize("kind", ["contiguous", "last axis", "slice", "cache"])
def test_strides_change_no_bit(kind):
    given = call(2, 4, 2, 67, 131, seed=3)
    moved = given._replace(**{name: strided(getattr(given, name), kind) for name in ("q", "k", "v", "grad_y")})  # fmt: skip
    for one, other in zip(run(given, "native-cpp"), run(moved, "native-cpp"), strict=True):
        assert torch.equal(one, other)


@needs_kernel
def test_a_gradient_that_is_expanded():
    """As y.sum() gives it."""
    given = call(seed=4)
    given = given._replace(
        grad_y=torch.ones(1, 1, 1, 1, dtype=torch.bfloat16).expand(given.q.shape)
    )
    assert_close(given._replace(grad_y=given.grad_y), "native-cpp")


@needs_kernel
def test_threads_change_no_bit():
    given = call(2, 6, 2, 200, 200, is_causal=True, seed=6)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            found.append(run(given, "native-cpp"))
    finally:
        torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@needs_kernel
def test_a_mask_of_every_form_has_the_same_bits():
    """One for all heads, copied for each head, as bool and as 0 and -inf."""
    plain = masks(2, 4, 130, 130, 7)["expanded"]
    given = call(2, 4, 4, 130, 130, seed=7)
    forms = [plain, plain.contiguous(), plain.expand(2, 4, 130, 130), plain.mT.contiguous().mT]
    found = [run(given._replace(mask=each), "native-cpp") for each in forms]
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    added = torch.zeros(plain.shape).masked_fill(~plain, -math.inf)
    for a, b in zip(found[0], run(given._replace(mask=added), "native-cpp"), strict=True):
        assert noise(b, a.double()) <= 0.0009


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("kind", ["bool", "added"])
def test_a_query_that_attends_to_nothing(backend, kind):
    """Zeros, lse -inf and no gradient, as torch has them; its block is skipped or not."""
    mask = torch.ones(1, 1, 150, 150, dtype=torch.bool)
    mask[..., 3, :] = mask[..., 64:128, :] = mask[..., 70:140] = False
    mask = mask if kind == "bool" else torch.zeros(mask.shape).masked_fill(~mask, -math.inf)
    given = call(queries=150, keys=150, mask=mask, seed=8)
    y, grad_q, grad_k, grad_v = run(given, backend)
    _, lse = attention16.attention(*given[:3], mask, False, given.scale, backend=backend)
    for rows in ([3], list(range(64, 128))):
        assert not y[:, :, rows].any() and not grad_q[:, :, rows].any()
        assert (lse[:, :, rows] == -math.inf).all()
    assert not grad_k[:, :, 70:140].any() and not grad_v[:, :, 70:140].any()
    assert_close(given, backend)


@pytest.mark.parametrize("backend", KERNELS)
def test_lse_is_the_logarithm_of_the_sum(backend):
    given = call(2, 4, 2, 70, 90, seed=10)
    _, lse = attention16.attention(*given[:3], None, False, given.scale, backend=backend)
    q, k = given.q.double(), given.k.double().repeat_interleave(2, 1)
    truth = (given.scale * q @ k.mT).logsumexp(-1)
    assert (lse - truth).abs().max() < 1e-5


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("operand", ["q", "k", "v"])
def test_non_finite_numbers_reach_what_they_reach_in_torch(backend, value, operand):
    """The numbers of y and of the gradients that are finite are the same ones (exact).

    As in torch's plain products and softmax: its flash attention turns some infinities into zeros.
    """
    given = call(1, 1, 1, 100, 100, seed=11)
    for row, column in ((5, 7), (90, 0)):
        getattr(given, operand)[0, 0, row, column] = value
    with sdpa_kernel(SDPBackend.MATH):
        others = by_torch(given, torch.bfloat16)
    for name, found, other in zip(NAMES, run(given, backend), others, strict=True):
        assert torch.equal(found.isfinite(), other.isfinite()), name


@needs_kernel
def test_masked_keys_that_are_not_finite_are_not_seen():
    """In blocks that are skipped whole, and as keys of others."""
    mask = torch.ones(1, 1, 100, 200, dtype=torch.bool)
    mask[..., 50:] = False
    given = call(queries=100, keys=200, mask=mask, seed=12)
    truth = run(given, "native-cpp")
    given.k[:, :, 50:] = math.nan
    given.v[:, :, 64:] = math.nan
    found = run(given, "native-cpp")
    assert torch.equal(found[0], truth[0])


@needs_kernel
@pytest.mark.parametrize("size", [1e-3, 30.0])
def test_scores_of_any_size(size):
    """Nearly uniform weights, and one key that has all of it."""
    given = call(queries=130, keys=130, is_causal=True, seed=13)
    truth = by_torch(given._replace(q=given.q * size), torch.float64)[0]
    y = run(given._replace(q=given.q * size), "native-cpp")[0]
    assert noise(y, truth) <= NOISE


@needs_kernel
def test_exp2_is_within_its_bound():
    """Relative error at most 2.5e-7 for normal results; exact at 0, -inf and NaN."""
    x = torch.cat([torch.linspace(-126, 0, 1 << 16), -torch.logspace(-12, 0, 1 << 12)])
    found, truth = cpp.exp2(x).double(), x.double().exp2()
    assert ((found - truth) / truth).abs().max() <= 2.5e-7
    edges = torch.tensor([0.0, -0.0, -math.inf, math.nan, -150.0, -200.0, -1e30, -149.0] * 2)
    assert torch.equal(cpp.exp2(edges).nan_to_num(7.0), edges.exp2().nan_to_num(7.0))


@pytest.mark.parametrize(
    "change, code",
    [
        ({"dtypes": (torch.float32,) * 3}, "dtype"),
        ({"dtypes": (torch.bfloat16, torch.bfloat16, torch.float16)}, "dtype"),
        ({"width": 72}, "shape"),
        ({"value_width": 272}, "shape"),
        ({"mask": "learned"}, "operands"),
        ({"is_empty": True}, "shape"),
        ({"device": Device("cuda", (9, 0))}, "device"),
        ({"device": Device("cpu", wrapper="FakeTensor")}, "wrapper"),
    ],
)
def test_what_the_kernel_refuses(change, code):
    spec = Attention16Spec(
        **({"device": CPU, "dtypes": BF16, "width": 64, "value_width": 64} | change)
    )
    [(name, refusal)] = attention16.KERNELS.choose(spec).refusals
    assert name == "native-cpp" and refusal.code == code


def test_a_processor_without_the_instructions_is_refused(monkeypatch):
    if cpp.LIBRARY.missing:
        pytest.skip(cpp.LIBRARY.missing)
    monkeypatch.setattr(cpp, "has_instructions", lambda: False)
    given = call()
    with pytest.raises(BackendError, match="no AVX512-BF16"):
        run(given, "native-cpp")
    held_back = Attention16Spec(Device("cpu", bf16_gemm=False), BF16, 64, 64)
    monkeypatch.undo()
    refusal = attention16.refuse(held_back)
    assert refusal is not None and refusal.code == "capability"
    assert_close(given, "reference")
