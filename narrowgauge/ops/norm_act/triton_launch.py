"""Launch the kernels of norms and activations with their casts.

`ops.norm_act` has the contract and checks the tensors.

Sizes of the pieces, none measured on a GPU. Three programs of 8 warps fit into the registers of a
multiprocessor of 9.0; docs/gpu.md has the counts. A piece of gradients has 8 elements per thread.

    with y.T    32 x 64: runs of y.T and of its codes are 32 bytes, one sector. A program of an
                activation processes four adjacent pieces, so that scales, maxima and addresses are
                computed once for them; a norm's rows stay in the L2 cache
    otherwise   4 x 1024, for two gradients twice 4 x 512; an activation without a scale per row:
                one run of 1024 per program
    gradients of norms, from y.T  32 x 64 in 4 warps: runs of 32 bytes; one program per piece of
                                  rows
    gradients of norms            a row in registers: 4 warps, 8 above 1,024, 16 above 2,048
                                  columns; 4 programs per multiprocessor
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from narrowgauge.addresses import dry_run_on
from narrowgauge.ops.norm_act.spec import (
    CastRequest,
    CastResult,
    Given,
    Kind,
    Requests,
    Statistics,
    StoredAsCodes,
)
from narrowgauge.ops.quantize import triton_launch as quantizing
from narrowgauge.ops.quantize.triton_launch import Output, triton_transpose
from narrowgauge.ops.registry import device_facts
from narrowgauge.ops.triton.cast_constants import CastConstants, constants_of
from narrowgauge.ops.triton.launch import Kernels, Matrix, launch
from narrowgauge.scaling import WHOLE

if TYPE_CHECKING:
    from narrowgauge.recipe import Cast

triton_kernel = Kernels("narrowgauge.ops.norm_act.triton_kernel")
triton_turned = Kernels("narrowgauge.ops.norm_act.triton_turned")

PARTS = 512  # slots for maxima that programs share, and programs that may cast a second time
NORM_PARTS = 528
TALL, WIDE = (32, 64), (4, 1024)  # a piece with y.T, and without
HALF = 4, 512  # a piece for two gradients
RUN = {TALL: 256, WIDE: 1024, HALF: 1024}  # columns that a program of an activation processes
SETTLED = 32, 128  # a piece of a tensor that is cast again, see `settle_both`
TURNED = 32, 64  # a piece of a norm whose codes of y.T are read: 32 adjacent codes
WARPS = 8
# Largest number per thread on 9.x: three programs of WARPS share the 65,536 of a multiprocessor;
# 8.9 spills at this limit.
REGISTERS = 80


@dataclass(frozen=True)
class Casting:
    """Compile-time constant of a kernel: the cast of a result, and the size of the pieces.

    C        constants of the cast
    scaling  "delayed": the scale of earlier steps, followed by `settle_both`; "row": a pass over
             each row precedes the cast; "block": scales of blocks of y only (blocks of y.T
             spilled); "": the kernel computes at most the largest magnitude
    block    columns of a block
    rows     rows of a piece
    columns  columns of a piece
    parts    slots for maxima
    run      columns that a program processes, piece by piece; 0: its whole rows
    """

    C: CastConstants | None
    scaling: str
    block: int  # columns
    rows: int
    columns: int
    parts: int  # places for maxima
    run: int  # columns that a program takes, piece by piece; 0: all of its rows


class KernelOutputs(NamedTuple):
    """Outputs of a kernel.

    y           [rows, columns]
    codes       codes of y
    transposed  codes of y.T
    scales      scales of y
    maxima      int32 [parts], zero on entry
    live        [3] amax state of delayed scaling
    units       None: scales are float32, see `Orientation`
    """

    y: Any
    codes: Any
    transposed: Any
    scales: Any
    maxima: Any
    live: Any
    units: Any = None


class _Target:
    """One result: y, its requested cast, and the buffers that a kernel writes.

    scaling  as in `Casting`; "" with a request: a second launch casts by the largest magnitude of y
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
        self.C = _constants(cast, y)
        if cast.tile == (WHOLE, WHOLE):
            self.maxima = torch.zeros(PARTS, dtype=torch.int32, device=y.device)
            if request.amax_state is None:
                return
        self.scaling = {(WHOLE, WHOLE): "delayed", (1, WHOLE): "row"}.get(cast.tile, "block")
        self.plain = Output((rows, columns), cast, y.device)
        self.transposed = Output((columns, rows), cast, y.device) if request.transposed else None

    @property
    def result(self) -> KernelOutputs:
        """The buffers as the kernels take them."""
        live = None if self.request is None else self.request.amax_state
        codes, scale = (None, None) if self.plain is None else (self.plain.codes, self.plain.scale)
        return KernelOutputs(
            self.y, codes, self.transposed and self.transposed.codes, scale, self.maxima, live
        )

    def casting(self, piece: tuple[int, int], run: int) -> Casting:
        block = (
            self.request.cast.tile[1] if self.request is not None and self.scaling == "block" else 1
        )
        return Casting(self.C, self.scaling, block, *piece, PARTS, run)

    def finished(self) -> CastResult:
        """Return the result after the launches that follow the kernel.

        They update the amax state under delayed scaling, or cast by the maximum that the kernel
        found.
        """
        y, request, C, plain, transposed, amax = (
            self.y,
            self.request,
            self.C,
            self.plain,
            self.transposed,
            None,
        )
        if request is None or C is None:
            return CastResult(y)
        if plain is None:
            assert self.maxima is not None
            maxima = self.maxima.view(torch.float32)
            return CastResult(
                y, *quantizing.cast_pair(y, request.cast, cols=request.transposed, amax=maxima)
            )
        if self.maxima is not None and request.amax_state is not None:
            state = quantizing.state_of(request.amax_state, self.maxima, plain.scale)
            launch(
                triton_transpose.settle_both, PARTS, Matrix.of(y), plain.codes, transposed and transposed.codes, state, None,
                RECORDS=request.records, C=C, PARTS=PARTS, ROWS=SETTLED[0], COLUMNS=SETTLED[1], warps=WARPS,
            )  # fmt: skip
            amax = state.amax
            if transposed is not None:
                transposed.scale = plain.scale
        return CastResult(
            y, plain.finished(), None if transposed is None else transposed.finished(), amax
        )


@dataclass(frozen=True)
class InputForm:
    """Compile-time constant of a kernel: the form of its inputs.

    dtype  dtype of the inputs
    wide   True if n of rms-norm is not rounded to dtype
    C      constants of the cast, if the inputs are codes
    block  columns of a block, if the inputs are codes
    """

    dtype: Any
    wide: bool
    C: CastConstants | None
    block: int


@dataclass(frozen=True)
class Turned:
    """Compile-time constant of the kernel that reads codes of y.T.

    C              constants of the cast
    plus           number that is added to w
    centered       True for layer-norm, which subtracts the mean
    rows, columns  size of a piece
    """

    C: CastConstants | None
    plus: float
    centered: bool
    rows: int
    columns: int


def _read(
    kind: Kind, tensors: Sequence[Given]
) -> tuple[tuple[Tensor, ...], tuple[Tensor | None, ...], InputForm]:
    """Return (numbers or codes, scales, `InputForm`) of the inputs."""
    first = tensors[0]
    parts = [
        (each.codes.data, each.codes.scale) if isinstance(each, StoredAsCodes) else (each, None)
        for each in tensors
    ]
    inputs = tuple(
        data.contiguous() if scale is None else data.contiguous().view(torch.uint8)
        for data, scale in parts
    )
    scales = tuple(None if scale is None else scale.contiguous() for _, scale in parts)
    constants, block = None, 1
    if isinstance(first, StoredAsCodes):
        constants, block = _constants(first.codes.cast, inputs[0]), first.codes.cast.tile[1]
    return inputs, scales, InputForm(_triton_type(first.dtype), kind.wide, constants, block)


def _triton_type(dtype: torch.dtype) -> Any:
    """Return Triton's type for a dtype; in a dry run, which compiles nothing, dtype itself."""
    if dry_run_on() is not None:
        return dtype
    import triton.language as tl

    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[
        dtype
    ]


def _constants(cast: Cast, x: Tensor) -> CastConstants:
    return constants_of(cast, _capability(x))


def _capability(x: Tensor) -> tuple[int, int]:
    return device_facts(x.device.type, x.device.index).capability


def forward(
    kind: Kind, tensors: Sequence[Given], request: CastRequest | None
) -> tuple[CastResult, Statistics]:
    """See `ops.norm_act`."""
    inputs, scales, reading = _read(kind, tensors)
    x = inputs[0]
    dtype = kind.result_dtype([each.dtype for each in tensors])
    target = _Target(torch.empty_like(x, dtype=dtype), request)
    wanted = kind.name == "layer-norm", kind.is_norm
    mean, rate = (
        torch.empty(len(x), dtype=torch.float32, device=x.device) if each else None
        for each in wanted
    )
    piece = WIDE if target.transposed is None else TALL
    run = 0 if kind.is_norm or target.scaling == "row" else RUN[piece]
    across = -(-x.shape[1] // run) if run else 1
    launch(
        triton_kernel.forward, -(-len(x) // piece[0]) * across, inputs, scales, (mean, rate), target.result,
        kind.eps if kind.is_norm else None, *x.shape, FUNCTION=kind.name, GATED=kind.is_gated, K=reading,
        H=target.casting(piece, run), warps=WARPS,
    )  # fmt: skip
    return target.finished(), (mean, rate)


def backward(
    kind: Kind, tensors: Sequence[Given], statistics: Statistics, gy: Tensor, requests: Requests
) -> tuple[list[CastResult], list[Tensor]]:
    """See `ops.norm_act`."""
    gy = gy.contiguous()
    if kind.is_norm:
        gradients = (
            _norm_backward_turned if isinstance(tensors[0], StoredAsCodes) else _norm_backward
        )
        return gradients(kind, tensors, statistics, gy)
    inputs, scales, reading = _read(kind, tensors)
    made = [torch.empty_like(x, dtype=each.dtype) for x, each in zip(inputs, tensors, strict=True)]
    targets = [_Target(x, request) for x, request in zip(made, requests, strict=True)]
    piece = (
        TALL
        if any(each.transposed is not None for each in targets)
        else HALF
        if kind.is_gated
        else WIDE
    )
    castings = [each.casting(piece, RUN[piece]) for each in targets]
    rows, columns = gy.shape
    launch(
        triton_kernel.act_backward, -(-rows // piece[0]) * -(-columns // RUN[piece]), inputs, scales, gy,
        tuple(each.result for each in targets), rows, columns, FUNCTION=kind.name, GATED=kind.is_gated, K=reading,
        FIRST=castings[0], SECOND=castings[-1], warps=WARPS,
        maxnreg=REGISTERS if _capability(gy)[0] == 9 else None,
    )  # fmt: skip
    return [target.finished() for target in targets], []


def _plus(kind: Kind) -> float:
    """Return the number that is added to a norm's weight."""
    return 1.0 if kind.name == "gemma-norm" else 0.0


def _norm_backward(
    kind: Kind, tensors: Sequence[Given], statistics: Statistics, gy: Tensor
) -> tuple[list[CastResult], list[Tensor]]:
    inputs, _, _ = _read(kind, tensors)
    x = inputs[0]
    rows, columns = x.shape
    parts = min(NORM_PARTS, rows)
    dx = torch.empty_like(x)
    sums = tuple(
        torch.empty(parts, columns, dtype=torch.float32, device=x.device) for _ in inputs[1:]
    )
    width = max(1 << (columns - 1).bit_length(), 128)
    warps = 4 if width < 2048 else 8 if width < 4096 else 16
    launch(
        triton_kernel.norm_backward, parts, inputs, statistics, gy, dx, sums, rows, columns, PLUS=_plus(kind),
        PARTS=parts, WIDTH=width, warps=warps,
    )  # fmt: skip
    return [CastResult(dx)], [
        each.sum(0).to(w.dtype) for each, w in zip(sums, inputs[1:], strict=True)
    ]


def _norm_backward_turned(
    kind: Kind, tensors: Sequence[Given], statistics: Statistics, gy: Tensor
) -> tuple[list[CastResult], list[Tensor]]:
    (codes, *parameters), (scale, *_), reading = _read(kind, tensors)
    rows, columns = gy.shape
    parts = -(-rows // TURNED[0])
    dx = torch.empty_like(gy, dtype=tensors[0].dtype)
    sums = tuple(
        torch.empty(parts, columns, dtype=torch.float32, device=gy.device) for _ in parameters
    )
    launch(
        triton_turned.norm_backward_turned, parts, codes, scale, tuple(parameters), statistics[1], gy, dx, sums, rows, columns,
        T=Turned(reading.C, _plus(kind), kind.name == "layer-norm", *TURNED), warps=4,
    )  # fmt: skip
    return [CastResult(dx)], [
        each.sum(0).to(w.dtype) for each, w in zip(sums, parameters, strict=True)
    ]
