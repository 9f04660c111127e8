"""The C++ kernel of rotary embeddings beside the definition (exact)."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from narrowgauge.ops import rotary
from narrowgauge.ops.registry import Device
from narrowgauge.ops.rotary import cpp
from tests.compare import assert_same
from tests.raising import coded, require
from tests.selection import needs_compiler

FLOAT, NARROW = torch.float32, torch.bfloat16
BOTH = (FLOAT, NARROW)
LAYOUTS = ("by token", "by head", "slices")


def sample(head: int, dtypes: tuple[torch.dtype, ...], layout: str, shared: bool) -> list[Tensor]:
    """q of three heads, k of two, and their angles, which all examples share or not."""
    generator = torch.Generator().manual_seed(head)
    batch, tokens, more = 2, 5, 7 * (layout == "slices")

    def values(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).mul(3)

    both = []
    for heads, dtype in zip((3, 2), dtypes[:2], strict=True):
        shape = (batch, heads, tokens) if layout == "by head" else (batch, tokens, heads)
        x = values(*shape, head + more).to(dtype)[..., :head]
        both.append(x if layout == "by head" else x.transpose(1, 2))
    return both + [values(1 if shared else batch, tokens, head).to(dtypes[2]) for _ in range(2)]


def compare(given: list[Tensor], dtypes: tuple[torch.dtype, torch.dtype], inverse: bool) -> None:
    kernel = rotary.KERNELS.choose(rotary.RotarySpec.of(*given), "native-cpp").kernel
    found = kernel.run(*given, dtypes, inverse)
    expected = rotary.reference(*given, dtypes, inverse)
    for got, x, like in zip(found, expected, given[:2], strict=True):
        assert_same(got.contiguous(), x.contiguous(), any_nan=True)
        if inverse:
            assert got.transpose(1, 2).is_contiguous()
        elif like.transpose(1, 2).is_contiguous():
            assert got.stride() == like.stride()


@needs_compiler
@pytest.mark.parametrize("head", [2, 6, 64, 80, 130])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_values_and_gradients_are_those_of_the_definition(head, layout):
    for of_q, of_k, of_angles, shared in itertools.product(BOTH, BOTH, BOTH, (True, False)):
        given = sample(head, (of_q, of_k, of_angles), layout, shared)
        promoted = tuple(torch.promote_types(each, of_angles) for each in (of_q, of_k))
        compare(given, promoted, False)
        compare(given, (NARROW, NARROW), False)  # as under autocast
        for results in itertools.product(BOTH, BOTH):
            compare(given, results, True)


@needs_compiler
def test_nan_infinity_zeros_and_subnormals_too():
    for dtype, inverse in itertools.product(BOTH, (False, True)):
        given = sample(64, (dtype, dtype, FLOAT), "by token", True)
        q, k, cos, sin = given
        q[0, 0, 0, :3], q[0, 1], q[1, 2] = torch.tensor([float("nan"), float("inf"), -0.0]), 0, -0.0
        k *= 2.0**-130
        cos[0, 1], sin[0, 1] = 1, 0
        compare(given, (dtype, dtype), inverse)


@needs_compiler
@pytest.mark.parametrize("threads", [2, 3, 16])
def test_threads_change_nothing(threads, monkeypatch):
    monkeypatch.setattr("narrowgauge.ops.cpp.ELEMENTS_PER_THREAD", 10)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    for layout in LAYOUTS:
        compare(sample(64, (NARROW, NARROW, FLOAT), layout, False), (FLOAT, FLOAT), False)


@needs_compiler
def test_memory_beside_a_slice_stays():
    whole = torch.full((2, 5, 3, 32), 7.0)
    q = whole[..., :16].transpose(1, 2)
    cos, sin = torch.randn(2, 1, 5, 16)
    found = cpp.run(q, q, cos, sin, (FLOAT, FLOAT), False)
    assert found[0].shape == q.shape and bool((whole == 7).all())


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (rotary.RotarySpec(Device("cpu"), (NARROW,) * 4, 63), coded("shape", 63)),
        (rotary.RotarySpec(Device("cpu"), (NARROW,) * 4, 64, is_empty=True), coded("shape")),
        (rotary.RotarySpec(Device("cpu"), (torch.float16,) * 4, 64), coded("dtype", torch.float16)),
        (rotary.RotarySpec(Device("cuda", (9, 0)), (NARROW,) * 4, 64), coded("device", "cuda")),
    ],
)
def test_refusals_say_why(spec, expected):
    require(rotary.KERNELS.kernels[1].refuse(spec), expected.code, *expected.values)


def test_without_a_compiler_the_definition_rotates(monkeypatch):
    monkeypatch.setitem(vars(cpp.LIBRARY), "missing", "switched off")
    choice = rotary.KERNELS.choose(rotary.RotarySpec(Device("cpu"), (NARROW,) * 4, 64))
    assert choice.kernel.name == "reference" and "switched off" in choice.reasons
