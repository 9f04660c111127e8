"""Cross-entropy in C++ beside torch's float32 result on the same logits (bounded), and equal on every number of threads (exact)."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from narrowgauge.ops import cross_entropy
from narrowgauge.ops.cross_entropy import BACKWARD, FORWARD, CrossEntropySpec, cpp
from narrowgauge.ops.registry import Device
from tests.compare import assert_same
from tests.raising import coded, require
from tests.selection import needs_compiler

FLOAT, NARROW = torch.float32, torch.bfloat16
SHAPES = [(1, 1), (1, 3), (5, 64), (9, 131), (3, 5003)]
each_dtype = pytest.mark.parametrize("dtype", [FLOAT, NARROW], ids=str)


def sample(shape: tuple[int, int], dtype: torch.dtype, apart: bool = False) -> list[Tensor]:
    """Logits, labels of which some are negative, and gradients of the losses."""
    generator = torch.Generator().manual_seed(sum(shape))
    rows, classes = shape
    logits = torch.randn(rows, classes + 5 * apart, generator=generator).mul(4).to(dtype)
    labels = torch.randint(classes, (rows,), generator=generator)
    labels[2::4] = -1
    return [logits[:, :classes], labels, torch.randn(rows, generator=generator)]


def computed(logits: Tensor, labels: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    spec = CrossEntropySpec.of(logits, labels)
    forward, backward = (each.choose(spec, "native-cpp").kernel.run for each in (FORWARD, BACKWARD))
    losses, sums = forward(logits, labels)
    return losses, sums, backward(logits, labels, sums, gradients)


def of_torch(logits: Tensor, labels: Tensor, gradients: Tensor) -> tuple[Tensor, Tensor]:
    """In float64."""
    wide = logits.double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(wide, labels, ignore_index=-1, reduction="none")
    [found] = torch.autograd.grad(losses, wide, gradients.double())
    return losses.detach(), found


@needs_compiler
@each_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("apart", [False, True])
def test_losses_and_gradients_are_those_of_torch(dtype, shape, apart):
    """Losses within 1e-6 of their size, or of 1; gradients within float32's error, then one rounding."""
    logits, labels, gradients = sample(shape, dtype, apart)
    losses, sums, found = computed(logits, labels, gradients)
    expected, gradient = of_torch(logits, labels, gradients)
    assert ((losses.double() - expected).abs() <= 1e-6 * expected.clamp(min=1)).all()
    unit = torch.finfo(dtype).eps
    bound = unit * gradient.abs() + 3e-6 * gradients[:, None].abs()
    assert found.dtype == dtype and ((found.double() - gradient).abs() <= bound).all()
    assert (found[labels < 0] == 0).all() and (losses[labels < 0] == 0).all()
    defined = cross_entropy.forward(logits, labels)
    for a, b in zip((losses, sums), defined, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(
        found, cross_entropy.backward(logits, labels, sums, gradients), rtol=2 * unit, atol=4e-6
    )


@needs_compiler
@each_dtype
def test_masked_classes_large_logits_and_nan(dtype):
    logits, labels, gradients = sample((8, 70), dtype)
    labels[:] = 4
    logits[0, 5:] = float("-inf")  # as generation masks classes
    logits[1] += 1000
    logits[2, 69], logits[3, 0], logits[4, 1] = float("nan"), float("inf"), -3e38
    logits[5] = float("-inf")
    losses, _, found = computed(logits, labels, gradients)
    expected, gradient = of_torch(logits, labels, gradients)
    assert torch.equal(losses.isnan(), expected.isnan())
    good = ~expected.isnan()
    assert ((losses - expected).abs() <= 1e-6 * expected.clamp(min=1))[good].all()
    assert found[~good].isnan().any(1).all()
    assert (found[0, 5:] == 0).all()
    # At 1,000 a unit of float32 is 6e-5, of which sums has half.
    bound = torch.finfo(dtype).eps * gradient.abs() + 1e-4 * gradients[:, None].abs()
    assert ((found.double() - gradient).abs() <= bound)[good].all()


@needs_compiler
def test_threads_change_nothing(monkeypatch):
    monkeypatch.setattr("narrowgauge.ops.cpp.ELEMENTS_PER_THREAD", 100)
    found = []
    for threads in (1, 2, 7):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        found.append(list(computed(*sample((37, 301), NARROW))))
    for other in found[1:]:
        assert_same(other, found[0])


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (CrossEntropySpec(Device("cpu"), torch.float16), coded("dtype", torch.float16)),
        (CrossEntropySpec(Device("cpu"), NARROW, is_empty=True), coded("shape")),
        (CrossEntropySpec(Device("cuda", (9, 0)), NARROW), coded("device", "cuda")),
    ],
)
def test_refusals_say_why(spec, expected):
    for registry in (FORWARD, BACKWARD):
        require(registry.kernels[0].refuse(spec), expected.code, *expected.values)
        assert registry.choose(spec).kernel.name == "reference"


def test_without_a_compiler_the_definition_computes(monkeypatch):
    monkeypatch.setitem(vars(cpp.LIBRARY), "missing", "switched off")
    assert FORWARD.choose(CrossEntropySpec(Device("cpu"), NARROW)).kernel.name == "reference"
