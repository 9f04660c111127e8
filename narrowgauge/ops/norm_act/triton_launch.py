"""Launches of the kernels that compute norms and activations with their casts. The contract: `ops.norm_act`; the tensors are checked.

Sizes of the pieces, none of them measured yet on a GPU:

    with y.T    32 x 128 in 8 warps: the runs of y.T are 32 bytes, one sector, and a norm's rows stay in the second-level cache
    else        4 x 1024 in 8 warps; an activation without a scale per row one piece per program
    gradients of norms            a row in registers: 4 warps, 8 from 2,048, 16 from 8,192 columns; 4 programs per multiprocessor
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowgauge.ops.norm_act import triton_kernel
from narrowgauge.ops.norm_act.spec import CastRequest, CastResult, Kind, Requests, Statistics
from narrowgauge.ops.quantize import triton_launch as quantizing
from narrowgauge.ops.quantize import triton_transpose
from narrowgauge.ops.quantize.triton_launch import Output
from narrowgauge.ops.registry import device_facts
from narrowgauge.ops.triton.cast_constants import CastConstants, constants_of
from narrowgauge.ops.triton.launch import Matrix, launch
from narrowgauge.scaling import WHOLE

PARTS = 512  # maxima of programs, and programs of what may have to be cast a second time
NORM_PARTS = 528
TALL, WIDE = (32, 128), (4, 1024)  # a piece, with y.T and without
WARPS = 8


@dataclass(frozen=True)
class Casting:
    """One constant of a kernel: how a result is cast, and in pieces of what size.

    Its scale is "delayed", one of earlier steps, and `settle_both` follows; of each "row", by a pass over it ahead of the one that casts;
    or of each "block" of y alone, since blocks of y.T too were tried and spilled. "": only its largest magnitude is found, if that.
    """

    C: CastConstants | None
    scaling: str
    block: int  # columns
    rows: int
    columns: int
    parts: int  # places for maxima


class Result(NamedTuple):
    """What is written: y [rows, columns], codes of y and of y.T, scales, maxima [parts] int32, zero before; and a window's live [3]."""

    y: Any
    codes: Any
    transposed: Any
    scales: Any
    maxima: Any
    live: Any


class _Target:
    """One result: y, the cast that is wanted of it, and what a kernel writes.

    scaling  as in `Casting`; "" with a request: by the largest magnitude of y, in a second launch
    """

    def __init__(self, y: Tensor, request: CastRequest | None) -> None:
        self.y, self.request, self.scaling = y, request, ""
        self.C: CastConstants | None = None
        self.plain: Output | None = None
        self.transposed: Output | None = None
        self.maxima: Tensor | None = None
        if request is None:
            return
        cast, (rows, columns) = request.cast, y.shape
        self.C = constants_of(cast, device_facts(y.device.type, y.device.index).capability)
        if cast.tile == (WHOLE, WHOLE):
            self.maxima = torch.zeros(PARTS, dtype=torch.int32, device=y.device)
            if request.live is None:
                return
        self.scaling = {(WHOLE, WHOLE): "delayed", (1, WHOLE): "row"}.get(cast.tile, "block")
        self.plain = Output((rows, columns), cast, y.device)
        self.transposed = Output((columns, rows), cast, y.device) if request.transposed else None

    @property
    def result(self) -> Result:
        """As the kernels take it."""
        live = None if self.request is None else self.request.live
        codes, scale = (None, None) if self.plain is None else (self.plain.codes, self.plain.scale)
        return Result(self.y, codes, self.transposed and self.transposed.codes, scale, self.maxima, live)

    def casting(self, piece: tuple[int, int]) -> Casting:
        block = self.request.cast.tile[1] if self.request is not None and self.scaling == "block" else 1
        return Casting(self.C, self.scaling, block, *piece, PARTS)

    def finished(self) -> CastResult:
        """With what follows the kernel: the state of a window, or the cast by the maximum that was found."""
        y, request, C, plain, transposed, amax = self.y, self.request, self.C, self.plain, self.transposed, None
        if request is None or C is None:
            return CastResult(y)
        if plain is None:
            assert self.maxima is not None
            maxima = self.maxima.view(torch.float32)
            return CastResult(y, *quantizing.cast_pair(y, request.cast, cols=request.transposed, amax=maxima))
        if self.maxima is not None and request.live is not None:
            state = quantizing.state_of(request.live, self.maxima, plain.scale)
            launch(
                triton_transpose.settle_both, PARTS, Matrix.of(y), plain.codes, transposed and transposed.codes, state, None,
                RECORDS=request.records, C=C, PARTS=PARTS, PROGRAMS=PARTS, ROWS=TALL[0], COLUMNS=TALL[1], warps=WARPS,
            )  # fmt: skip
            amax = state.amax
            if transposed is not None:
                transposed.scale = plain.scale
        return CastResult(y, plain.finished(), None if transposed is None else transposed.finished(), amax)


def forward(kind: Kind, tensors: Sequence[Tensor], request: CastRequest | None) -> tuple[CastResult, Statistics]:
    """See `ops.norm_act`."""
    inputs = [each.contiguous() for each in tensors]
    x = inputs[0]
    promotes = kind.name in ("rms-norm", "swiglu") and not kind.wide
    dtype = torch.promote_types(x.dtype, inputs[1].dtype) if promotes else x.dtype
    target = _Target(torch.empty_like(x, dtype=dtype), request)
    wanted = kind.name == "layer-norm", kind.is_norm
    mean, rate = (torch.empty(len(x), dtype=torch.float32, device=x.device) if each else None for each in wanted)
    piece = WIDE if target.transposed is None else TALL
    whole_rows = kind.is_norm or target.scaling == "row"
    across = 1 if whole_rows else -(-x.shape[1] // piece[1])
    launch(
        triton_kernel.forward, -(-len(x) // piece[0]) * across, tuple(inputs), (mean, rate), target.result,
        kind.eps if kind.is_norm else None, *x.shape, FUNCTION=kind.name, WIDE=kind.wide, H=target.casting(piece), warps=WARPS,
    )  # fmt: skip
    return target.finished(), (mean, rate)


def backward(
    kind: Kind, tensors: Sequence[Tensor], statistics: Statistics, gy: Tensor, requests: Requests
) -> tuple[list[CastResult], list[Tensor]]:
    """See `ops.norm_act`."""
    inputs, gy = tuple(each.contiguous() for each in tensors), gy.contiguous()
    if kind.is_norm:
        return _norm_backward(inputs, statistics, gy)
    targets = [_Target(torch.empty_like(x), request) for x, request in zip(inputs, requests, strict=True)]
    piece = TALL if any(each.transposed is not None for each in targets) else WIDE
    castings = [each.casting(piece) for each in targets]
    rows, columns = gy.shape
    launch(
        triton_kernel.act_backward, -(-rows // piece[0]) * -(-columns // piece[1]), inputs, gy,
        tuple(each.result for each in targets), rows, columns, FUNCTION=kind.name, FIRST=castings[0],
        SECOND=castings[-1], warps=WARPS,
    )  # fmt: skip
    return [target.finished() for target in targets], []


def _norm_backward(
    inputs: tuple[Tensor, ...], statistics: Statistics, gy: Tensor
) -> tuple[list[CastResult], list[Tensor]]:
    x = inputs[0]
    rows, columns = x.shape
    parts = min(NORM_PARTS, rows)
    dx = torch.empty_like(x)
    sums = tuple(torch.empty(parts, columns, dtype=torch.float32, device=x.device) for _ in inputs[1:])
    width = max(1 << (columns - 1).bit_length(), 128)
    warps = 4 if width < 2048 else 8 if width < 8192 else 16
    launch(
        triton_kernel.norm_backward, parts, inputs, statistics, gy, dx, sums, rows, columns, PARTS=parts, WIDTH=width,
        warps=warps,
    )  # fmt: skip
    return [CastResult(dx)], [each.sum(0).to(w.dtype) for each, w in zip(sums, inputs[1:], strict=True)]
