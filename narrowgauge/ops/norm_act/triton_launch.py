"""Launches of the kernels that compute norms and activations with their casts. The contract: `ops.norm_act`; the tensors are checked.

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

from narrowgauge.ops.norm_act import triton_act_backward_cast, triton_act_cast, triton_norm_cast
from narrowgauge.ops.norm_act.spec import CastRequest, CastResult, Kind, Name, Requests
from narrowgauge.ops.norm_act.triton_store import BY_BLOCK, BY_ROW, DELAYED, NOTHING, Casting, Result
from narrowgauge.ops.quantize import triton_launch as quantizing
from narrowgauge.ops.quantize import triton_transpose
from narrowgauge.ops.quantize.triton_launch import Output
from narrowgauge.ops.triton.arguments import Matrix
from narrowgauge.ops.triton.cast_constants import CastConstants
from narrowgauge.ops.triton.launch import launch
from narrowgauge.scaling import WHOLE

ACTIVATIONS: dict[Name, int] = {
    "swiglu": triton_act_cast.SWIGLU.value,
    "gelu": triton_act_cast.GELU.value,
    "gelu-tanh": triton_act_cast.GELU_TANH.value,
}
PARTS = 512  # maxima of programs, and programs of what may have to be cast a second time
NORM_PARTS = 528
TALL, WIDE = (32, 128), (4, 1024)  # a piece, with y.T and without
WARPS = 8


@dataclass
class _Target:
    """One result: y, the cast that is wanted of it, and what a kernel writes.

    scaling  how the scale is found, see `triton_store`; NOTHING with a request: by the largest magnitude of y, in a second launch
    """

    y: Tensor
    request: CastRequest | None
    C: CastConstants | None
    plain: Output | None = None
    transposed: Output | None = None
    maxima: Tensor | None = None
    scaling: int = NOTHING.value

    def __post_init__(self) -> None:
        if self.request is None:
            return
        cast, shape = self.request.cast, (self.y.shape[0], self.y.shape[1])
        if cast.tile == (WHOLE, WHOLE):
            self.maxima = torch.zeros(PARTS, dtype=torch.int32, device=self.y.device)
            if self.request.live is None:
                return
        self.scaling = {(WHOLE, WHOLE): DELAYED, (1, WHOLE): BY_ROW}.get(cast.tile, BY_BLOCK).value
        self.plain = Output(shape, cast, self.y.device)
        self.transposed = Output((shape[1], shape[0]), cast, self.y.device) if self.request.transposed else None

    @property
    def result(self) -> Result:
        """As the kernels take it."""
        live = None if self.request is None else self.request.live
        codes, scale = (None, None) if self.plain is None else (self.plain.codes, self.plain.scale)
        return Result(self.y, codes, self.transposed and self.transposed.codes, scale, self.maxima, live)

    def casting(self, piece: tuple[int, int]) -> Casting:
        block = self.request.cast.tile[1] if self.request is not None and self.scaling == BY_BLOCK.value else 1
        return Casting(self.C, self.scaling, block, *piece, PARTS)

    def finished(self) -> CastResult:
        """With what follows the kernel: the state of a window, or the cast by the maximum that was found."""
        request, C, y = self.request, self.C, self.y
        if request is None or C is None:
            return CastResult(y)
        if self.maxima is None:
            assert self.plain is not None
            return CastResult(y, self.plain.finished())
        if request.live is not None:
            return self._settled(request, C, request.live)
        maxima = self.maxima.view(torch.float32)
        return CastResult(y, *quantizing.cast_pair(y, request.cast, cols=request.transposed, amax=maxima))

    def _settled(self, request: CastRequest, C: CastConstants, live: Tensor) -> CastResult:
        assert self.plain is not None and self.maxima is not None
        state = quantizing.state_of(live, self.maxima, self.plain.scale)
        launch(
            triton_transpose.settle_both, PARTS, Matrix.of(self.y), self.plain.codes,
            self.transposed and self.transposed.codes, state, None, RECORDS=request.records, C=C, PARTS=PARTS, PROGRAMS=PARTS,
            ROWS=TALL[0], COLUMNS=TALL[1], warps=WARPS,
        )  # fmt: skip
        if self.transposed is None:
            return CastResult(self.y, self.plain.finished(), None, state.amax)
        self.transposed.scale = self.plain.scale
        return CastResult(self.y, self.plain.finished(), self.transposed.finished(), state.amax)


def norm_cast(
    kind: Kind, tensors: Sequence[Tensor], request: CastRequest | None, C: CastConstants | None
) -> tuple[CastResult, tuple[Tensor, ...]]:
    """y with its cast, and (r [rows]) of rms-norm, (mean [rows], r [rows]) of layer-norm."""
    x, weight, *bias = (each.contiguous() for each in tensors)
    dtype = torch.promote_types(x.dtype, weight.dtype) if kind.name == "rms-norm" else x.dtype
    target = _Target(torch.empty_like(x, dtype=dtype), request, C)
    statistics = tuple(torch.empty(len(x), dtype=torch.float32, device=x.device) for _ in tensors[1:])
    piece = WIDE if target.transposed is None else TALL
    launch(
        triton_norm_cast.norm_cast, -(-len(x) // piece[0]), x, weight, bias[0] if bias else None, kind.eps, *_two(statistics),
        target.result, *x.shape, H=target.casting(piece), warps=WARPS,
    )  # fmt: skip
    return target.finished(), statistics


def act_cast(kind: Kind, tensors: Sequence[Tensor], request: CastRequest | None, C: CastConstants | None) -> CastResult:
    """y with its cast."""
    found = [each.contiguous() for each in tensors]
    x = found[0]
    dtype = torch.promote_types(x.dtype, found[1].dtype) if kind.name == "swiglu" else x.dtype
    target = _Target(torch.empty_like(x, dtype=dtype), request, C)
    piece = WIDE if target.transposed is None else TALL
    across = 1 if target.scaling == BY_ROW.value else -(-x.shape[1] // piece[1])
    launch(
        triton_act_cast.act_cast, -(-len(x) // piece[0]) * across, x, found[1] if len(found) > 1 else None,
        target.result, *x.shape, KIND=ACTIVATIONS[kind.name], H=target.casting(piece), warps=WARPS,
    )  # fmt: skip
    return target.finished()


def act_backward_cast(
    kind: Kind,
    tensors: Sequence[Tensor],
    gy: Tensor,
    requests: Requests,
    constants: Sequence[CastConstants | None],
) -> list[CastResult]:
    """The gradients of g and u, or of x, with their casts."""
    found = [each.contiguous() for each in tensors]
    wanted = zip(found, requests, constants, strict=True)
    targets = [_Target(torch.empty_like(x), request, C) for x, request, C in wanted]
    piece = TALL if any(each.transposed is not None for each in targets) else WIDE
    results, castings = [each.result for each in targets], [each.casting(piece) for each in targets]
    rows, columns = gy.shape
    launch(
        triton_act_backward_cast.act_backward_cast, -(-rows // piece[0]) * -(-columns // piece[1]), *_padded(found),
        gy.contiguous(), *_padded(results), rows, columns, KIND=ACTIVATIONS[kind.name], H=castings[0], SECOND=castings[-1],
        warps=WARPS,
    )  # fmt: skip
    return [target.finished() for target in targets]


def norm_backward(
    kind: Kind, tensors: Sequence[Tensor], statistics: tuple[Tensor, ...], gy: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """The gradient of x, and those of w and b."""
    x, weight, *_ = (each.contiguous() for each in tensors)
    rows, columns = x.shape
    parts = min(NORM_PARTS, rows)
    dx = torch.empty_like(x)
    sums = [torch.empty(parts, columns, dtype=torch.float32, device=x.device) for _ in tensors[1:]]
    width = max(1 << (columns - 1).bit_length(), 128)
    warps = 4 if width < 2048 else 8 if width < 8192 else 16
    launch(
        triton_norm_cast.norm_backward, parts, x, weight, gy.contiguous(), *_two(statistics), dx, *_padded(sums), rows, columns,
        PARTS=parts, WIDTH=width, warps=warps,
    )  # fmt: skip
    return dx, [each.sum(0).to(w.dtype) for each, w in zip(sums, tensors[1:], strict=True)]


def _two(statistics: tuple[Tensor, ...]) -> tuple[Tensor | None, Tensor]:
    """(mean or None, r)."""
    return (None, *statistics)[-2], statistics[-1]


def _padded(one_or_two: Sequence[Any]) -> tuple[Any, Any]:
    return one_or_two[0], one_or_two[1] if len(one_or_two) > 1 else None
