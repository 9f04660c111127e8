"""What a stage of a pipeline sends: E4M3 codes in tiles of 1 x 32 with a byte of E8M0 each, in a tensor of the dtype that it was.

    x [..., K], K = 32 B + r     B tiles and a rest of r < 32 elements, which travel as they are

    bytes of a row    scale 0, code 0, scale 1, code 1, ..., scale B-1, code B-1, codes B ... 32 B - 1, zeros up to a whole element
    message           ceil(33 B / itemsize) + r elements of x's dtype: 0.516 of bfloat16, 0.258 of float32

torch sends only tensors whose shapes and dtypes a stage can work out before the first message, and the receiver has nothing else to go
by. So a message has the dtype of x, and five axes in the place of its last, four of them 1. Which one is not says what the width alone
does not: the first, that r = 0; axis 1 + b, that r > 0 and b is B modulo 4.

Scales lie in the low bytes of elements. So the message of finite numbers is finite read as bfloat16 or float32 as well, and what looks for
NaN in gradients (anomaly mode, NCCL's check) gives no false alarm. A tile with NaN or infinity is all NaN at the receiver; what
rounding up took beyond the largest number of the dtype is that number.

Tensors of other dtypes (integers, bool, float64), numbers without axes and DTensors travel as they are.
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


def is_packed(x: Any) -> bool:
    """Whether such a tensor is sent as codes."""
    return isinstance(x, Tensor) and not isinstance(x, DTensor) and x.dtype in _DTYPES and x.ndim > 0


def width(columns: int, dtype: torch.dtype) -> int:
    """Elements of the message of a row."""
    tiles, rest = divmod(columns, TILE)
    return _elements(tiles, dtype) + rest


def message_like(x: Tensor) -> Tensor:
    """A tensor as the message of x is, without its numbers: what `input_args` and `output_args` of a PipelineStage ask for.

    On x's device, which may be "meta"; it requires gradients if x does. x itself where it travels as it is.
    """
    if not is_packed(x):
        return x
    tiles, rest = divmod(x.shape[-1], TILE)
    axes = [1] * _AXES
    axes[1 + tiles % _PERIOD if rest else 0] = width(x.shape[-1], x.dtype)
    return x.new_empty((*x.shape[:-1], *axes), requires_grad=x.requires_grad)


@torch.no_grad()
def encode(x: Tensor) -> Tensor:
    """x [..., K] -> its message."""
    columns = x.shape[-1]
    tiles, rest = divmod(columns, TILE)
    rows = x.reshape(x.shape[:-1].numel(), columns)
    q = quantize(rows[:, : tiles * TILE], MESSAGE)
    codes, whole = E4M3.pack(q.data), _elements(tiles, x.dtype)
    message = message_like(x.detach())  # no view: schedules detach what a stage returns in place
    elements = message.view(len(rows), whole + rest)
    elements[:, whole:] = rows[:, tiles * TILE :]
    body = elements.view(torch.uint8)[:, : whole * x.dtype.itemsize]
    body[:, 0 : 2 * tiles : 2] = E8M0.encode(q.scale)
    body[:, 1 : 2 * tiles : 2] = codes[:, :tiles]
    body[:, 2 * tiles : (TILE + 1) * tiles] = codes[:, tiles:]
    body[:, (TILE + 1) * tiles :] = 0
    return message


@torch.no_grad()
def decode(message: Tensor) -> Tensor:
    """What `encode` was given, rounded. Raises ShapeError for a tensor that is no message."""
    columns = columns_of(message)
    tiles, rest = divmod(columns, TILE)
    leading, dtype = message.shape[:-_AXES], message.dtype
    whole = _elements(tiles, dtype)
    rows = message.reshape(leading.numel(), whole + rest)
    body = rows[:, :whole].flatten().view(torch.uint8).view(len(rows), whole * dtype.itemsize)
    codes = torch.cat((body[:, 1 : 2 * tiles : 2], body[:, 2 * tiles : (TILE + 1) * tiles]), dim=1)
    scale = E8M0.decode(body[:, 0 : 2 * tiles : 2].contiguous())
    q = QTensor(data=E4M3.unpack(codes, tiles * TILE), scale=scale, cast=MESSAGE, inner=tiles * TILE)
    limit = torch.finfo(dtype).max
    x = dequantize(q).clamp_(-limit, limit).to(dtype)
    if rest:
        x = torch.cat((x, rows[:, whole:]), dim=1)
    return x.reshape(*leading, columns)


def columns_of(message: Tensor) -> int:
    """K of the tensor that a message is of, from its shape and dtype. Raises ShapeError for a tensor that is no message."""
    axes, size = list(message.shape[-_AXES:]), message.dtype.itemsize
    places = [place for place, length in enumerate(axes) if length != 1]
    if len(axes) == _AXES and not places:
        return 1
    if len(axes) == _AXES and len(places) == 1:
        place, elements = places[0], axes[places[0]]
        tiles = (elements - bool(place)) * size // (TILE + 1)
        while place and tiles % _PERIOD != place - 1:
            tiles -= 1
        rest = elements - _elements(tiles, message.dtype)
        if tiles >= 0 and (0 < rest < TILE if place else rest == 0):
            return tiles * TILE + rest
    raise ShapeError(
        f"pipeline: a stage got {list(message.shape)} {message.dtype}, which is no message in 8 bits. "
        'Call distribute(stage, activations="fp8") for every stage, before the first step of the schedule.'
    )


def _elements(tiles: int, dtype: torch.dtype) -> int:
    return -(-tiles * (TILE + 1) // dtype.itemsize)


_WAY_ON = 'Send 16 bits: distribute(stage, activations="16bit").'


class Pack(torch.autograd.Function):
    """The end of a stage: x -> its message; back comes the message of its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return encode(x)

    @staticmethod
    @no_double_backward("a message between stages", _WAY_ON)
    def backward(ctx: Any, message: Tensor) -> Tensor:
        return decode(message)


class Unpack(torch.autograd.Function):
    """The beginning of a stage: a message -> x; what goes back is the message of its gradient. sent: told of it."""

    @staticmethod
    def forward(ctx: Any, message: Tensor, sent: Any) -> Tensor:
        ctx.sent = sent
        return decode(message)

    @staticmethod
    @no_double_backward("a message between stages", _WAY_ON)
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        message = encode(gradient)
        ctx.sent(message)
        return message, None
