"""Launches of the kernels that compute norms and activations with their casts. The op's contract: `ops.norm_act`.

Sizes of the pieces, none of them measured yet on a GPU:

    with y.T    32 x 128 in 8 warps: the runs of y.T are 32 bytes, one sector, and a norm's rows stay in the second-level cache
    else        4 x 1024 in 8 warps; an activation without a scale per row one piece per program
    gradients of norms            a row in registers: 4 warps, 8 from 2,048, 16 from 8,192 columns; 4 programs per multiprocessor
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowgauge.ops.norm_act import triton_kernel, triton_norms
from narrowgauge.ops.norm_act.triton_orders import Kind, Made, Name, Order
from narrowgauge.ops.quantize import triton_launch
from narrowgauge.ops.quantize.triton_launch import Output
from narrowgauge.ops.triton.cast_constants import Settings
from narrowgauge.ops.triton.launch import launch
from narrowgauge.qtensor import QTensor
from narrowgauge.scaling import WHOLE

FORWARD: dict[Name, int] = {
    "rms-norm": triton_kernel.RMS_NORM.value,
    "layer-norm": triton_kernel.LAYER_NORM.value,
    "swiglu": triton_kernel.SWIGLU.value,
    "gelu": triton_kernel.GELU.value,
    "gelu-tanh": triton_kernel.GELU_TANH.value,
}
GRADIENTS: dict[Name, int] = {
    "swiglu": triton_kernel.SWIGLU_GRADIENTS.value,
    "gelu": triton_kernel.GELU_GRADIENT.value,
    "gelu-tanh": triton_kernel.GELU_TANH_GRADIENT.value,
}
PARTS = 512  # maxima of programs, and programs of what may have to be cast a second time
NORM_PARTS = 528
TURNED_ROWS, TURNED_COLUMNS, TURNED_WARPS = 32, 128, 8
ROWS, COLUMNS, WARPS = 4, 1024, 8


@dataclass
class _Target:
    """One result: y, the cast that is wanted of it, and what a kernel writes.

    casts  how the scale is found, see `produced`; 0 with an order: by the largest magnitude of y, in a second launch
    """

    y: Tensor
    order: Order | None
    C: Settings | None
    plain: Output | None = None
    turned: Output | None = None
    maxima: Tensor | None = None

    def __post_init__(self) -> None:
        order, shape = self.order, (self.y.shape[0], self.y.shape[1])
        if order is None:
            return
        if order.cast.tile == (WHOLE, WHOLE):
            self.maxima = torch.zeros(PARTS, dtype=torch.int32, device=self.y.device)
            if order.live is None:
                return
        self.plain = Output(shape, order.cast, self.y.device)
        self.turned = Output((shape[1], shape[0]), order.cast, self.y.device) if order.turned else None

    @property
    def casts(self) -> int:
        if self.order is None or self.plain is None:
            return 0
        tile = self.order.cast.tile
        return 1 if tile == (WHOLE, WHOLE) else 2 if tile == (1, WHOLE) else 3

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        """As `produce` takes them."""
        codes, scale = (None, None) if self.plain is None else (self.plain.codes, self.plain.scale)
        turned = None if self.turned is None else self.turned.codes
        live = None if self.order is None else self.order.live
        return (self.y, codes, turned, scale, self.maxima, live)

    def finished(self) -> Made:
        """With what follows the kernel: the state of a window, or the cast by the maximum that was found."""
        order, C = self.order, self.C
        if order is None or C is None:
            return Made(self.y)
        if self.maxima is None:
            assert self.plain is not None
            return Made(self.y, self.plain.finished())
        if order.live is None:
            return self._by_maximum(order, C, self.maxima.view(torch.float32))
        assert self.plain is not None
        used = torch.empty(1, 1, dtype=torch.float32, device=self.y.device)
        launch(
            triton_kernel.settle, PARTS, self.y, self.plain.codes, None if self.turned is None else self.turned.codes, self.maxima,
            order.live, used, self.plain.scale, *self.y.shape, RECORDS=order.records, WANTS_TURNED=self.turned is not None, C=C,
            PARTS=PARTS, PROGRAMS=PARTS, ROWS=TURNED_ROWS, COLUMNS=TURNED_COLUMNS, warps=TURNED_WARPS,
        )  # fmt: skip
        if self.turned is not None:
            self.turned.scale = self.plain.scale
        return Made(self.y, self.plain.finished(), self._turned(), used)

    def _turned(self) -> QTensor | None:
        return None if self.turned is None else self.turned.finished()

    def _by_maximum(self, order: Order, C: Settings, maxima: Tensor) -> Made:
        plain: QTensor
        turned: QTensor | None = None
        if order.turned:
            plain, turned = triton_launch.both(self.y, order.cast, C, maxima, None, None)
        else:
            plain = triton_launch.one(self.y, order.cast, C, maxima)
        return Made(self.y, plain, turned)


def forward(
    kind: Kind, tensors: Sequence[Tensor], order: Order | None, C: Settings | None
) -> tuple[Made, tuple[Tensor, ...]]:
    """See `ops.norm_act`; the tensors are checked."""
    found = [each.contiguous() for each in tensors]
    x = found[0]
    y = torch.empty_like(x, dtype=_dtype(kind, found))
    statistics: tuple[Tensor, ...] = ()
    if kind.is_norm:
        count = 1 if kind.name == "rms-norm" else 2
        statistics = tuple(torch.empty(len(x), dtype=torch.float32, device=x.device) for _ in range(count))
    target = _Target(y, order, C)
    _produce(FORWARD[kind.name], found, kind, statistics, target, None)
    return target.finished(), statistics


def gradients(
    kind: Kind,
    tensors: Sequence[Tensor],
    statistics: tuple[Tensor, ...],
    gy: Tensor,
    orders: Sequence[Order | None],
    constants: Sequence[Settings | None],
) -> tuple[list[Made], list[Tensor]]:
    """See `ops.norm_act`; the tensors are checked."""
    found = [each.contiguous() for each in tensors]
    if kind.is_norm:
        return _norm_gradients(kind, found, statistics, gy.contiguous())
    count = 2 if kind.name == "swiglu" else 1
    targets = [
        _Target(torch.empty_like(x), order, C) for x, order, C in zip(found, orders, constants, strict=True)
    ]  # fmt: skip
    inputs = [found[0], found[1] if count == 2 else None, gy.contiguous()]
    _produce(GRADIENTS[kind.name], inputs, kind, (), targets[0], targets[1] if count == 2 else None)
    return [target.finished() for target in targets], []


def _produce(
    kind: int,
    tensors: Sequence[Tensor | None],
    what: Kind,
    statistics: tuple[Tensor, ...],
    first: _Target,
    second: _Target | None,
) -> None:
    a, b, c = (*tensors, None, None)[:3]
    rows, columns = first.y.shape
    targets = [first] if second is None else [first, second]
    casts = [each.casts for each in targets]
    turned = any(each.turned is not None for each in targets)
    block = max((each.order.cast.tile[1] for each in targets if each.order is not None and each.casts == 3), default=1)
    height, width, warps = ROWS, COLUMNS, WARPS
    if turned:
        height, width, warps = TURNED_ROWS, TURNED_COLUMNS, TURNED_WARPS
    whole_rows = what.is_norm or 2 in casts
    span = -(-columns // width) * width if whole_rows else width
    mean, rate = (None, None, *statistics)[-2:]
    more: tuple[Any, ...] = second.tensors if second is not None else (None,) * 6
    launch(
        triton_kernel.produce, -(-rows // height) * -(-columns // span), a, b, c, what.eps, mean, rate, *first.tensors, *more,
        rows, columns, span, KIND=kind, CASTS=casts[0], C=first.C, CASTS2=casts[-1] if second is not None else 0,
        C2=None if second is None else second.C, BLOCK=block, WANTS_TURNED=turned, WANTS_MAXIMA=first.maxima is not None,
        WANTS_MAXIMA2=second is not None and second.maxima is not None, PARTS=PARTS, ROWS=height, COLUMNS=width, warps=warps,
    )  # fmt: skip


def _norm_gradients(
    kind: Kind, tensors: Sequence[Tensor], statistics: tuple[Tensor, ...], gy: Tensor
) -> tuple[list[Made], list[Tensor]]:
    x, weight = tensors[:2]
    rows, columns = x.shape
    centers = kind.name == "layer-norm"
    parts = min(NORM_PARTS, rows)
    dx = torch.empty_like(x)
    sums = [torch.empty(parts, columns, dtype=torch.float32, device=x.device) for _ in tensors[1:]]
    width = max(1 << (columns - 1).bit_length(), 128)
    warps = 4 if width < 2048 else 8 if width < 8192 else 16
    launch(
        triton_norms.norm_gradients, parts, x, weight, gy, *(None, *statistics)[-2:], dx, sums[0], sums[1] if centers else None,
        rows, columns,
        CENTERS=centers, PARTS=parts, WIDTH=width, warps=warps,
    )  # fmt: skip
    return [Made(dx)], [each.sum(0).to(w.dtype) for each, w in zip(sums, tensors[1:], strict=True)]


def _dtype(kind: Kind, tensors: Sequence[Tensor]) -> torch.dtype:
    """y's: of rms-norm and swiglu as torch promotes a product, of the others x's."""
    x = tensors[0]
    return torch.promote_types(x.dtype, tensors[1].dtype) if kind.name in ("rms-norm", "swiglu") else x.dtype
