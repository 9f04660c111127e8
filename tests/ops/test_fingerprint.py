"""Fingerprints of tensors: the C++ sums are their definition (exact), each write is detected (search), copies serve without a compiler."""

from __future__ import annotations

import random

import pytest
import torch

from narrowgauge.ops import fingerprint
from narrowgauge.ops.fingerprint import Exact, Readback, Sampled

GOLDEN, MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1
needs_compiler = pytest.mark.skipif(
    bool(fingerprint.LIBRARY.missing), reason=fingerprint.LIBRARY.missing
)


def definition(data: bytes) -> tuple[int, int]:
    place = total = 0
    for i in range(0, len(data), 8):
        word = int.from_bytes(data[i : i + 8], "little")
        mixed = word ^ ((i // 8 + 1) * GOLDEN & MASK)
        place += (mixed & 0xFFFFFFFF) * (mixed >> 32)
        total += word
    return place & MASK, total & MASK


@needs_compiler
@pytest.mark.parametrize(
    "nbytes",
    [0, 1, 7, 8, 31, 32, 33, 100, 127, 128, 129, 255, 256, 261, 8 * fingerprint.BLOCK, 8 * fingerprint.BLOCK + 9,
     5 * 8 * fingerprint.BLOCK + 77],
)  # fmt: skip
def test_the_sums_are_their_definition(nbytes):
    """Whole and ragged ranges of four streams of vectors of 32 bytes."""
    x = torch.randint(256, (nbytes,), dtype=torch.uint8)
    assert fingerprint.sums(x) == definition(bytes(x.tolist()))


@needs_compiler
def test_threads_change_no_sum(monkeypatch):
    x = torch.randint(256, (100_003,), dtype=torch.uint8)
    alone = fingerprint.sums(x)
    monkeypatch.setattr(fingerprint, "BYTES_PER_SHARE", 1 << 14)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert fingerprint.sums(x) == alone


@pytest.fixture(params=["sums", "copy"])
def either(request, monkeypatch):
    """With a C++ compiler, if there is one, and without."""
    if request.param == "copy":
        monkeypatch.setattr(fingerprint, "LIBRARY", type("Missing", (), {"missing": "no compiler"}))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_every_write_is_detected_and_restoring_the_bytes_as_well(either, dtype):
    numbers = random.Random(3)
    for case in range(60):
        shape = numbers.choice([(1, 1), (3, 5), (33, 17), (64, 64)])
        torch.manual_seed(case)
        whole = torch.randn(shape[0] + 1, shape[1] + 3).to(dtype)
        x = numbers.choice([whole, whole.T, whole[1:, 2:], whole[1:]])
        found, before = Exact(x), x.clone()
        assert found.is_same()
        rows = sorted({numbers.randrange(len(x)) for _ in range(2)})
        write = numbers.choice(["element", "signs", "swap", "all", "minus zero", "nan"])
        if write == "element":
            x.data[rows[0], numbers.randrange(x.shape[1])] += 1
        elif write == "signs":
            x.data[rows] *= -1
        elif write == "swap":
            x.data.copy_(x.flip(0))
        elif write == "all":
            x.data.mul_(1.5)
        else:
            x.data[0, 0] = 0.0
            found, before = Exact(x), x.clone()
            x.data[0, 0] = -0.0 if write == "minus zero" else float("nan")
        is_written = not torch.equal(
            x.contiguous().view(torch.uint8), before.contiguous().view(torch.uint8)
        )
        assert found.is_same() != is_written, (write, shape)
        x.data.copy_(before)
        assert found.is_same()


def test_nan_is_the_same_as_before(either):
    x = torch.full((4, 4), float("nan"))
    assert Exact(x).is_same()


def test_storage_that_was_freed_is_not_read():
    x = torch.randn(64, 64)
    found = Exact(x)
    x.untyped_storage().resize_(0)
    assert not found.is_same()


def test_storage_that_shrank_below_a_view_is_not_read(either, monkeypatch):
    """A view behind an offset would end beyond it."""
    x = torch.randn(8 + 64 * 64)[8:].view(64, 64)
    found = Exact(x)
    x.untyped_storage().resize_(x.nbytes)
    for reads in (fingerprint, torch):
        monkeypatch.setattr(
            reads,
            "sums" if reads is fingerprint else "equal",
            lambda *_: pytest.fail("it was read"),
        )
    assert not found.is_same()


def test_a_sample_detects_what_was_written_to_the_whole_and_never_waits():
    x = torch.randn(512, 256)
    found = Sampled(x)
    assert found.is_same() and not Readback(found.changed).value
    x.data.add_(1e-3)
    assert found.is_same(), "the host learns it later"
    x.data.copy_(torch.randn(512, 256))
    answer = Readback(found.changed)
    assert found.is_same()
    answer = Readback(found.changed)
    assert answer.is_here and answer.value


def test_a_sample_visits_all_columns():
    for shape in ((4096, 1024), (512, 256), (300, 40)):
        found = Sampled(torch.arange(shape[0] * shape[1], dtype=torch.int32).view(shape))
        assert (
            len(set((found.seen % shape[1]).tolist()))
            >= min(shape[1], fingerprint.SAMPLE) * 9 // 10
        )


def test_a_zero_tensor_without_memory_has_no_fingerprint():
    assert fingerprint.fingerprint(torch._efficientzerotensor((64, 64))) is None
