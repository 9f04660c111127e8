"""8-bit message between pipeline stages: E4M3 codes in 1 x 32 tiles with E8M0 scales.

    x [..., K], K = 32 B + r: B tiles, and r < 32 remaining elements that are sent unquantized

    bytes of a row  scale 0, code 0, scale 1, code 1, ..., scale B-1, code B-1,
                    codes B ... 32 B - 1, zeros up to a whole element
    message         ceil(33 B / itemsize) + r elements of x's dtype

A message has 0.516 of the bytes of bfloat16, 0.258 of float32.

torch sends only tensors whose shape and dtype a stage can compute before the first message. The
receiver has no other information, so shape and dtype must determine K. A message therefore has the
dtype of x, and five axes in place of the last one, four with length 1. The position of the long
axis encodes what the width alone cannot. Axis 0 means r = 0; axis 1 + b means r > 0 and B % 4 = b.

A tile with NaN or infinity is all NaN at the receiver. Values rounded above the dtype's maximum are
clamped to it. Integer, bool and float64 tensors, 0-d tensors and DTensors are sent unchanged.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from narrowgauge.errors import ShapeError
from narrowgauge.formats import E4M3, E8M0
from narrowgauge.nn.autograd_rules import no_double_backward
from narrowgauge.ops.quantize import dequantize, quantize
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast
from narrowgauge.scaling import E8M0_CEIL

TILE = 32
MESSAGE = Cast(format=E4M3, tile=(1, TILE), scale=E8M0_CEIL)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_AXES = 5
_PERIOD = _AXES - 1


def is_sent_as_codes(x: Any) -> bool:
    """Return True for tensors that are sent as codes."""
    return (
        isinstance(x, Tensor) and not isinstance(x, DTensor) and x.dtype in _DTYPES and x.ndim > 0
    )


def width(columns: int, dtype: torch.dtype) -> int:
    """Return the number of elements in the message of one row."""
    tiles, rest = divmod(columns, TILE)
    return _elements(tiles, dtype) + rest


def message_like(x: Tensor) -> Tensor:
    """Return an uninitialized tensor with the shape and dtype of x's message.

    Use it for `input_args` and `output_args` of a PipelineStage. It is on x's device, which may be
    "meta", and requires gradients if x does. Returns x itself if x is sent unchanged.
    """
    if not is_sent_as_codes(x):
        return x
    tiles, rest = divmod(x.shape[-1], TILE)
    axes = [1] * _AXES
    axes[1 + tiles % _PERIOD if rest else 0] = width(x.shape[-1], x.dtype)
    return x.new_empty((*x.shape[:-1], *axes), requires_grad=x.requires_grad)


@torch.no_grad()
def encode(x: Tensor) -> Tensor:
    """Quantize x [..., K] to its message."""
    columns = x.shape[-1]
    tiles, rest = divmod(columns, TILE)
    rows = x.reshape(x.shape[:-1].numel(), columns)
    q = quantize(rows[:, : tiles * TILE], MESSAGE)
    codes, code_elements = E4M3.pack(q.data), _elements(tiles, x.dtype)
    # A fresh tensor and not a view: schedules call detach_() on a stage's outputs.
    message = message_like(x.detach())
    elements = message.view(len(rows), code_elements + rest)
    elements[:, code_elements:] = rows[:, tiles * TILE :]
    body = elements.view(torch.uint8)[:, : code_elements * x.dtype.itemsize]
    # The top byte of each element is a code, never a scale. Read as bfloat16 or float32, a message
    # of finite values is then finite too: NaN checks (anomaly mode, NCCL) raise no false alarm.
    body[:, 0 : 2 * tiles : 2] = E8M0.encode(q.scale)
    body[:, 1 : 2 * tiles : 2] = codes[:, :tiles]
    body[:, 2 * tiles : (TILE + 1) * tiles] = codes[:, tiles:]
    body[:, (TILE + 1) * tiles :] = 0
    return message


@torch.no_grad()
def decode(message: Tensor) -> Tensor:
    """Dequantize a message of `encode`. Raises ShapeError for any other tensor."""
    columns = columns_of(message)
    tiles, rest = divmod(columns, TILE)
    leading, dtype = message.shape[:-_AXES], message.dtype
    code_elements = _elements(tiles, dtype)
    rows = message.reshape(leading.numel(), code_elements + rest)
    body = (
        rows[:, :code_elements]
        .flatten()
        .view(torch.uint8)
        .view(len(rows), code_elements * dtype.itemsize)
    )
    codes = torch.cat((body[:, 1 : 2 * tiles : 2], body[:, 2 * tiles : (TILE + 1) * tiles]), dim=1)
    scale = E8M0.decode(body[:, 0 : 2 * tiles : 2].contiguous())
    q = QTensor(
        data=E4M3.unpack(codes, tiles * TILE), scale=scale, cast=MESSAGE, inner=tiles * TILE
    )
    limit = torch.finfo(dtype).max
    # Rounding up may pass the largest value of the dtype.
    x = dequantize(q).clamp_(-limit, limit).to(dtype)
    if rest:
        x = torch.cat((x, rows[:, code_elements:]), dim=1)
    return x.reshape(*leading, columns)


def columns_of(message: Tensor) -> int:
    """Return K of the encoded tensor, from the message's shape and dtype.

    Raises ShapeError for a tensor that is not a message.
    """
    axes, size = list(message.shape[-_AXES:]), message.dtype.itemsize
    long_axes = [axis for axis, length in enumerate(axes) if length != 1]
    if len(axes) == _AXES and not long_axes:
        return 1
    if len(axes) == _AXES and len(long_axes) == 1:
        axis, elements = long_axes[0], axes[long_axes[0]]
        tiles = (elements - bool(axis)) * size // (TILE + 1)
        # Several (B, r) pairs give the same width: B modulo 4 selects the right one.
        while axis and tiles % _PERIOD != axis - 1:
            tiles -= 1
        rest = elements - _elements(tiles, message.dtype)
        if tiles >= 0 and (0 < rest < TILE if axis else rest == 0):
            return tiles * TILE + rest
    raise ShapeError(
        f"pipeline: a stage got {list(message.shape)} {message.dtype}, which is no message in 8 bits. "
        'Call distribute(stage, activations="fp8") for every stage, before the first step of the schedule.',
        code="pipeline.message",
    )


def _elements(tiles: int, dtype: torch.dtype) -> int:
    return -(-tiles * (TILE + 1) // dtype.itemsize)


_NEXT_STEP = 'Send 16 bits: distribute(stage, activations="16bit").'


class EncodeMessage(torch.autograd.Function):
    """Encode a stage's output; backward decodes the message of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return encode(x)

    @staticmethod
    @no_double_backward("a message between stages", _NEXT_STEP)
    def backward(ctx: Any, message: Tensor) -> Tensor:
        return decode(message)


class DecodeMessage(torch.autograd.Function):
    """Decode a stage's input; backward encodes its gradient and calls on_send(message)."""

    @staticmethod
    def forward(ctx: Any, message: Tensor, on_send: Any) -> Tensor:
        ctx.on_send = on_send
        return decode(message)

    @staticmethod
    @no_double_backward("a message between stages", _NEXT_STEP)
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        message = encode(gradient)
        ctx.on_send(message)
        return message, None
