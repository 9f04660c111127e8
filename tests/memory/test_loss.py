"""Chunked linear-cross-entropy (bounded against the plain path; exact where nothing is rounded anew)."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from narrowgauge.errors import ConfigError, DataError, ShapeError
from narrowgauge.memory import chunked_cross_entropy
from narrowgauge.memory.loss_options import LossOptions
from narrowgauge.ops.registry import Device
from tests.compare import assert_same, assert_sqnr
from tests.raising import coded, raises

SAME = (
    1e-6  # relative in the norm, float32: sums of a few hundred terms in another order, 2**-24 each
)


def made(tokens=50, hidden=24, vocabulary=40, dtype=torch.float32, bias=False, ignored=0.0):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(tokens, hidden, generator=generator).to(dtype).requires_grad_()
    weight = (torch.randn(vocabulary, hidden, generator=generator) * 0.3).to(dtype).requires_grad_()
    b = torch.randn(vocabulary, generator=generator).to(dtype).requires_grad_() if bias else None
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    targets[torch.rand(tokens, generator=generator) < ignored] = -100
    return x, weight, b, targets


def plain(x, weight, bias, targets, softcap=None, z_loss=0.0):
    logits = F.linear(x, weight, bias)
    logits = logits.double() if logits.dtype == torch.float64 else logits.float()
    if softcap:
        logits = torch.tanh(logits / softcap) * softcap
    loss = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    valid = targets != -100
    return loss + z_loss * (logits.logsumexp(-1).square() * valid).sum(), valid.sum()


def gradients(loss, tensors):
    return [
        each
        for each in torch.autograd.grad(
            loss / 7, [t for t in tensors if t is not None and t.requires_grad]
        )
    ]


def distance(found, expected):
    return float(
        (found.double() - expected.double()).norm() / expected.double().norm().clamp_min(1e-30)
    )


@pytest.mark.parametrize("chunk", [1, 7, 50, 64, None])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": True},
        {"ignored": 0.4},
        {"softcap": 2.0},
        {"z_loss": 0.1},
        {"bias": True, "ignored": 0.4, "softcap": 2.0, "z_loss": 0.1},
    ],
    ids=str,
)
def test_it_equals_the_plain_path(options, chunk):
    extra = {key: options[key] for key in ("softcap", "z_loss") if key in options}
    tensors = made(**{key: value for key, value in options.items() if key not in extra})
    loss, count = chunked_cross_entropy(
        tensors[0], tensors[1], tensors[3], bias=tensors[2], chunk=chunk, **extra
    )
    expected, expected_count = plain(*tensors, **extra)
    assert_same(count, expected_count)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=SAME)
    for found, reference in zip(
        gradients(loss, tensors[:3]), gradients(expected, tensors[:3]), strict=True
    ):
        assert distance(found, reference) <= SAME


def test_gradients_are_those_of_finite_differences():
    """Along random directions, central differences in float64: error h^2, about 1e-10, and rounding 1e-16 / h."""
    *tensors, targets = made(5, 4, 6, torch.float64, bias=True, ignored=0.3)

    def value(x, weight, bias):
        return chunked_cross_entropy(
            x, weight, targets, bias=bias, softcap=1.5, z_loss=0.2, chunk=2
        )[0]

    found = torch.autograd.grad(value(*tensors), tensors)
    for place, gradient in enumerate(found):
        direction = torch.randn_like(gradient)
        ends = []
        for h in (1e-5, -1e-5):
            moved = [
                t.detach() + h * direction if i == place else t.detach()
                for i, t in enumerate(tensors)
            ]
            ends.append(float(value(*moved)))
        assert (ends[0] - ends[1]) / 2e-5 == pytest.approx(
            float((gradient * direction).sum()), rel=1e-7
        )


@given(
    tokens=st.integers(0, 20),
    vocabulary=st.integers(1, 30),
    chunk=st.integers(1, 25),
    ignored=st.floats(0, 1),
)
def test_any_sizes(tokens, vocabulary, chunk, ignored):
    x, weight, _, targets = made(tokens, 3, vocabulary, torch.float64, ignored=ignored)
    loss, count = chunked_cross_entropy(x, weight, targets, chunk=chunk)
    expected, expected_count = plain(x, weight, None, targets)
    assert int(count) == int(expected_count)
    torch.testing.assert_close(loss, expected)
    for found, reference in zip(
        gradients(loss, (x, weight)), gradients(expected, (x, weight)), strict=True
    ):
        torch.testing.assert_close(found, reference)


def test_logits_are_rounded_as_an_unfused_head_returns_them():
    """Exact: to bfloat16, also where the products are computed in float32."""
    options = LossOptions(
        rows=8, vocab_slice=0, compute_dtype=torch.bfloat16, gemm_dtype=torch.float32, softcap=0.0,
        z_loss=0.0, needs_gradients=False, has_ignored=False,
    )  # fmt: skip
    lhs, rhs = (options.operand(torch.randn(size, 16)) for size in (8, 12))
    logits = options.logits(lhs, rhs, None)
    assert logits.dtype == torch.float32
    assert_same(logits, (lhs @ rhs.T).bfloat16().float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_sixteen_bits_round_where_the_plain_path_rounds(dtype, autocast):
    x, weight, bias, targets = made(dtype=torch.float32 if autocast else dtype, bias=True)
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        loss, _ = chunked_cross_entropy(x, weight, targets, bias=bias, chunk=16)
        expected, _ = plain(x, weight, bias, targets)
    assert loss.dtype == torch.float32
    # Logits are rounded alike but for ties after another order of summation: the loss moves by less than a rounding of one.
    assert float(loss.detach()) == pytest.approx(
        float(expected.detach()), rel=2**-9 if dtype == torch.bfloat16 else 2**-12
    )
    # The gradient of the logits is rounded to 8 bits of significand on both sides, then products differ by one more rounding.
    floor_db = 40.0 if dtype == torch.bfloat16 else 55.0
    for found, reference in zip(
        gradients(loss, (x, weight, bias)), gradients(expected, (x, weight, bias)), strict=True
    ):
        assert found.dtype == reference.dtype
        assert_sqnr(found, reference, floor_db)


def test_frozen_parts_get_no_gradient_and_keep_nothing():
    x, weight, _, targets = made()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        chunked_cross_entropy(x, weight.detach(), targets)
    assert kept == [x.shape]
    kept.clear()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape) or t, lambda t: t):
        loss, _ = chunked_cross_entropy(x.detach(), weight, targets)
    assert kept == [weight.shape]
    loss.backward()
    assert weight.grad is not None
    with torch.no_grad():
        assert not chunked_cross_entropy(x, weight, targets)[0].requires_grad


def test_the_whole_logits_never_exist():
    x, weight, _, targets = made(tokens=256, vocabulary=512)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor):
                largest = max(largest, out.numel())
            return out

    with Watch():
        loss, _ = chunked_cross_entropy(x, weight, targets, chunk=16)
        loss.backward()
    assert largest == weight.numel()  # grad_weight; the logits would be 256 * 512


def test_tied_weights_get_both_gradients():
    _, weight, _, targets = made(tokens=40)
    ids = torch.arange(40)
    loss, _ = chunked_cross_entropy(F.embedding(ids, weight), weight, targets, chunk=8)
    expected, _ = plain(F.embedding(ids, weight), weight, None, targets)
    assert distance(gradients(loss, [weight])[0], gradients(expected, [weight])[0]) <= SAME


def test_no_valid_target_is_zero():
    x, weight, _, targets = made()
    loss, count = chunked_cross_entropy(x, weight, torch.full_like(targets, -100))
    loss.backward()
    assert float(loss.detach()) == int(count) == 0
    assert_same(x.grad, torch.zeros_like(x))
    assert_same(weight.grad, torch.zeros_like(weight))


def test_a_kept_graph_gives_the_same_gradients_again():
    """Exact: passes before leave no trace in what was saved, whatever gradient of the loss they brought."""
    x, weight, bias, targets = made(bias=True)
    loss, _ = chunked_cross_entropy(x, weight, targets, bias=bias, chunk=8)
    for factor in (0.0, 3.0):
        torch.autograd.grad(loss, [x, weight, bias], torch.tensor(factor), retain_graph=True)
    loss.backward(retain_graph=True)
    (loss * 0.5).backward()
    again, _ = chunked_cross_entropy(x, weight, targets, bias=bias, chunk=8)
    for tensor, once in zip(
        (x, weight, bias), torch.autograd.grad(again, [x, weight, bias]), strict=True
    ):
        assert_same(tensor.grad, once * 1.5)


def test_a_freed_graph_needs_no_second_gradient_of_the_head():
    x, weight, _, targets = made()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        loss, _ = chunked_cross_entropy(x.detach(), weight, targets)
    (loss * 0.5).backward()
    assert_same(kept[0], weight.grad)  # multiplied in place


def test_bad_input_is_refused_in_words():
    x, weight, _, targets = made()
    for wrong in (40, -3):
        bad = targets.clone()
        bad[3] = wrong
        with raises(DataError, "chunked-loss.class", wrong):
            chunked_cross_entropy(x, weight, bad)
    with raises(ShapeError, "chunked-loss.shapes", "[50, 24]", "[24, 40]"):
        chunked_cross_entropy(x, weight.T, targets)
    with raises(ShapeError, "chunked-loss.targets", "[49]", "[50]"):
        chunked_cross_entropy(x, weight, targets[1:])
    with raises(ShapeError, "chunked-loss.bias", "[3]", "[40]"):
        chunked_cross_entropy(x, weight, targets, bias=torch.zeros(3))
    whole = x.detach().to(torch.int64)
    with raises(ShapeError, "chunked-loss.dtype", "hidden", "[50, 24]"):
        chunked_cross_entropy(whole, weight, targets)
    with raises(ShapeError, "chunked-loss.dtype", "weight", "[40, 24]"):
        chunked_cross_entropy(x, weight.detach().to(torch.int32), targets)
    with raises(ShapeError, "chunked-loss.dtype", "bias", "[40]"):
        chunked_cross_entropy(x, weight, targets, bias=torch.arange(40))
    with raises(ConfigError, "chunked-loss.positive"):
        chunked_cross_entropy(x, weight, targets, softcap=-1.0)


@pytest.mark.slow
@pytest.mark.filterwarnings(
    "ignore:.*should not be instantiated"
)  # Dynamo's own use of autograd.Function
def test_it_compiles_without_a_break():
    """Traced in one graph, forward and backward; no code is generated."""
    x, weight, bias, targets = made(bias=True, ignored=0.3)
    compiled = torch.compile(
        lambda: chunked_cross_entropy(x, weight, targets, bias=bias, chunk=25),
        fullgraph=True,
        backend="aot_eager",
    )
    (loss, count), (expected, expected_count) = compiled(), plain(x, weight, bias, targets)
    assert int(count) == int(expected_count)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=SAME)
    for found, reference in zip(
        gradients(loss, (x, weight, bias)), gradients(expected, (x, weight, bias)), strict=True
    ):
        assert distance(found, reference) <= SAME


def test_autocast_does_not_choose_the_type_of_the_products(device_is):
    """On a CPU without bfloat16 instructions all products are in float32; autocast made them bfloat16, many times slower."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Products(TorchDispatchMode):
        dtypes: ClassVar[set[torch.dtype]] = set()

        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            if "mm" in function.__name__:
                self.dtypes |= {each.dtype for each in arguments if isinstance(each, torch.Tensor)}
            return function(*arguments, **(options or {}))

    device_is(Device("cpu", bf16_gemm=False))
    x, weight, _, targets = made(dtype=torch.float32, bias=False)
    with torch.autocast("cpu", dtype=torch.bfloat16), Products():
        chunked_cross_entropy(x.requires_grad_(), weight.requires_grad_(), targets)[0].backward()
    assert Products.dtypes == {torch.float32}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"softcap": float("inf")}, coded("chunked-loss.positive", "softcap = inf")),
        ({"chunk": 2.5}, coded("chunked-loss.positive", "chunk = 2.5")),
        ({"z_loss": float("nan")}, coded("chunked-loss.z-loss", "z_loss = nan")),
        ({"z_loss": -1.0}, coded("chunked-loss.z-loss", "z_loss = -1.0")),
    ],
)
def test_options_that_would_make_the_loss_nan_are_refused(options, words):
    with raises(ConfigError, words):
        chunked_cross_entropy(
            torch.ones(2, 3), torch.ones(4, 3), torch.zeros(2, dtype=torch.int64), **options
        )


# --- over slices of the vocabulary ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 7, 40, None])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": True, "ignored": 0.4, "softcap": 2.0, "z_loss": 0.1},
        {"ignored": 1.0},
        {"tokens": 0},
    ],
    ids=str,
)
@pytest.mark.parametrize("checked", [False, True])
def test_slices_equal_the_plain_path(options, chunk, checked):
    extra = {key: options[key] for key in ("softcap", "z_loss") if key in options}
    tensors = made(**{key: value for key, value in options.items() if key not in extra})
    loss, count = chunked_cross_entropy(
        tensors[0],
        tensors[1],
        tensors[3],
        bias=tensors[2],
        chunk=chunk,
        slices=True,
        checked=checked,
        **extra,
    )
    expected, expected_count = plain(*tensors, **extra)
    assert_same(count, expected_count)
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), rel=SAME)
    for found, reference in zip(
        gradients(loss, tensors[:3]), gradients(expected, tensors[:3]), strict=True
    ):
        assert distance(found, reference) <= SAME


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [False, True])
def test_slices_round_where_the_plain_path_rounds(dtype, autocast):
    """As near to it as its own gradients in another order of sums: a rounding of the logits decides at most."""
    x, weight, _, targets = made(64, 48, 512, torch.float32 if autocast else dtype)
    found = []
    for slices in (False, True):
        with torch.autocast("cpu", dtype=dtype, enabled=autocast):
            loss, _ = chunked_cross_entropy(x, weight, targets, chunk=64, slices=slices)
        found.append(gradients(loss, (x, weight)))
    for sliced, chunked in zip(found[1], found[0], strict=True):
        assert_sqnr(sliced, chunked, 40)


def test_slices_keep_a_number_per_token():
    """Beside hidden and weight, which exist: lse. And one of them frozen gets no gradient."""
    x, weight, _, targets = made(64, 16, 4096)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        loss, _ = chunked_cross_entropy(x, weight, targets, slices=True)
    own = [
        each
        for each in kept
        if each.data_ptr() not in (x.data_ptr(), weight.data_ptr()) and each.is_floating_point()
    ]
    assert [tuple(each.shape) for each in own] == [(64,)]
    loss.backward()
    assert x.grad is not None and weight.grad is not None
    x.requires_grad_(False)
    chunked_cross_entropy(x, weight, targets, slices=True)[0].backward()
    assert (
        x.grad is not None
        and distance(
            weight.grad, 2 * gradients(plain(x, weight, None, targets)[0] * 7, (weight,))[0]
        )
        < SAME
    )


def test_slices_by_finite_differences():
    *tensors, targets = made(5, 4, 6, torch.float64, bias=True, ignored=0.3)

    def value(x, weight, bias):
        return chunked_cross_entropy(
            x, weight, targets, bias=bias, softcap=1.5, z_loss=0.2, chunk=2, slices=True
        )[0]

    assert torch.autograd.gradcheck(value, tensors)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
def test_slices_compile():
    x, weight, _, targets = made(12, 8, 30)

    def step(x, weight):
        return chunked_cross_entropy(x, weight, targets, chunk=10, slices=True)[0]

    found = torch.compile(step, fullgraph=True, backend="aot_eager")(x, weight)
    for a, b in zip(
        gradients(found, (x, weight)), gradients(step(x, weight), (x, weight)), strict=True
    ):
        assert distance(a, b) <= SAME
