"""What stages of a pipeline send to each other (exact but for the rounding of E4M3, whose bound is given)."""

from __future__ import annotations

import pytest
import torch

from narrowgauge.distributed.stage_messages import (
    DecodeMessage,
    EncodeMessage,
    columns_of,
    decode,
    encode,
    is_sent_as_codes,
    message_like,
    width,
)
from narrowgauge.errors import ShapeError
from narrowgauge.ops.quantize import dequantize, quantize
from narrowgauge.recipes import MXFP8
from tests.raising import raises

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
CAST = MXFP8.output.lhs  # E4M3, 1 x 32, E8M0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "leading",
    [(2, 1), *(pytest.param(each, marks=pytest.mark.slow) for each in ((), (3,), (1, 4, 1)))],
    ids=str,
)
def test_every_width_comes_back_from_the_shape_alone(dtype, leading):
    for columns in [*range(200), 4096, 4099]:
        x = torch.randn(*leading, columns, generator=torch.Generator().manual_seed(columns)).to(
            dtype
        )
        message = encode(x)
        assert (
            message.dtype == dtype
            and columns_of(message) == columns
            and message.shape[: len(leading)] == leading
        )
        like = message_like(x.to("meta").requires_grad_())
        assert (
            like.is_meta
            and like.requires_grad
            and like.shape == message.shape
            and like.stride() == message.stride()
        )
        assert message.numel() == width(columns, dtype) * x.shape[:-1].numel()
        found = decode(message)
        tiles = columns // 32 * 32
        rows = x.reshape(x.shape[:-1].numel(), columns)[:, :tiles]
        expected = (
            dequantize(quantize(rows, CAST), torch.float32).to(dtype).reshape(*leading, tiles)
        )
        assert found.shape == x.shape and found.dtype == dtype
        assert torch.equal(found[..., :tiles], expected) and torch.equal(
            found[..., tiles:], x[..., tiles:]
        )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_are_half_of_sixteen_bits(dtype):
    for columns in (128, 768, 4096):
        assert width(columns, dtype) * dtype.itemsize <= 0.52 * 2 * columns


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_is_not_finite_poisons_its_tile_and_nothing_saturates_to_infinity(dtype):
    x = torch.ones(4, 100).to(dtype)
    x[0, 3], x[1, 40], x[1, 99] = float("nan"), float("inf"), float("-inf")
    x[2], x[3] = torch.finfo(dtype).max, torch.finfo(dtype).tiny
    found = decode(encode(x))
    assert found[0, :32].isnan().all() and found[0, 32:].isfinite().all()
    assert (
        found[1, 32:64].isnan().all()
        and found[1, 99] == float("-inf")
        and found[1, :32].isfinite().all()
    )
    assert found[2:].isfinite().all() and (found[2] >= 0.9 * torch.finfo(dtype).max).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_message_of_finite_numbers_is_finite_too(dtype):
    """So that checks for NaN see none that is not there."""
    exponents = torch.arange(-126, 128, dtype=torch.float32).repeat_interleave(16)
    x = (
        (torch.randn(64, 254 * 16, generator=torch.Generator().manual_seed(0)) * 2.0**exponents)
        .clamp(-3e38, 3e38)
        .to(dtype)
    )
    assert encode(x).isfinite().all()


def test_gradients_travel_likewise():
    x = torch.randn(5, 70, dtype=torch.bfloat16, requires_grad=True)
    weights, told = torch.randn(5, 70).bfloat16(), []
    y = DecodeMessage.apply(EncodeMessage.apply(x), told.append)
    (y * weights).sum().backward()
    assert torch.equal(y, decode(encode(x))) and torch.equal(x.grad, decode(encode(weights)))
    assert [each.shape for each in told] == [encode(x).shape]
    with pytest.raises(RuntimeError, match='activations="16bit"'):
        torch.autograd.grad(EncodeMessage.apply(x).sum(), x, create_graph=True)


def test_zeros_and_empty_tensors():
    for shape in [(3, 64), (0, 64), (3, 0), (2, 0, 33)]:
        assert torch.equal(decode(encode(torch.zeros(shape))), torch.zeros(shape))
    # Torch sends it for no gradient.
    assert torch.equal(decode(torch.zeros_like(encode(torch.ones(2, 45)))), torch.zeros(2, 45))


def test_other_tensors_are_no_messages():
    others = [
        torch.zeros(3, dtype=each) for each in (torch.int64, torch.bool, torch.float64, torch.uint8)
    ]
    assert not any(is_sent_as_codes(each) for each in [*others, torch.tensor(1.0), 3, None])
    assert all(message_like(each) is each for each in others)
    for shape in [(32, 64), (2, 5, 1, 1, 1, 1, 2), (4, 18, 1, 1, 1, 1), (4, 1, 40, 1, 1, 1)]:
        with raises(ShapeError, "pipeline.message"):
            decode(torch.zeros(shape, dtype=torch.bfloat16))
