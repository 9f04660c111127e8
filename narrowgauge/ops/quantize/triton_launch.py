"""Launches of the Triton kernels that quantize: the reference's bits, in one or two launches.

    tile             launches                             reads of x; x.T comes with it where it is wanted
    tensor           one, whose programs all run at once  2, the second from the cache where x fits
    tensor, delayed  one                                  1
    row              one                                  1, of a row longer than 8,192 elements 2, the second from the cache
    row, with x.T    one, as of a tensor                  2, as of a tensor
    blocks           one                                  1
    blocks, 2 level  maxima, cast                         2, as of a tensor

Two launches, maxima and cast, where one would take more than the 64 registers that it may have: stochastic rounding, sides that are no
multiple of 16, rows with x.T in formats of less than 8 bits.

Sizes of the pieces, none of them measured yet on a GPU:

    runs       4,096 elements of dense memory in 4 warps: 16-bit input arrives in loads of 16 bytes, four per thread
    rows       a whole row of up to 8,192 elements in 8 warps: 32 registers of values per thread
    squares    64 x 64 in 8 warps: the runs of x.T are 64 bytes; twice as wide, Triton 3.6 takes 228 registers, one program per processor
    blocks     a block of 128 in both directions and nothing more: 128 x 128 in 16 warps, 32 elements per thread
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from narrowgauge.addresses import dry_run_on
from narrowgauge.ops.quantize.spec import empty_scales
from narrowgauge.ops.random import Key
from narrowgauge.ops.registry import device_facts
from narrowgauge.ops.triton import cast_constants
from narrowgauge.ops.triton.cast_constants import CastConstants
from narrowgauge.ops.triton.launch import AmaxState, Kernels, Matrix, Orientation, launch, zeros_left_zero
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast
from narrowgauge.scaling import WHOLE, scale_shape

triton_block = Kernels("narrowgauge.ops.quantize.triton_block")
triton_transpose = Kernels("narrowgauge.ops.quantize.triton_transpose")

RUN, RUN_WARPS = 4096, 4
SQUARE, SQUARE_WARPS = 64, 8
LONGEST_ROW, ROW_PIECE, ROW_WARPS = 8192, 4096, 8
LARGE_BLOCK, LARGE_BLOCK_WARPS = 128, 16  # of tiles with a side above 64; others as in squares
# Programs that look for a maximum; 512 of 4 warps hold 64 KB in flight per multiprocessor of an H200.
PARTS = 1, 32, 512
SETTLING = 512  # programs that in most steps find nothing to cast
# What `amax_and_cast` is launched by. Cooperative: the driver starts all of its programs at once, or refuses. 1,024 threads of at most 64
# registers fit on every multiprocessor from compute capability 8.0 on.
AT_ONCE: dict[str, Any] = {"launch_cooperative_grid": True, "maxnreg": 64}
THREADS = 1024
FEW = 32  # programs
SHARED_PARTS = 64  # places that programs share for the maximum: few enough to read, enough not to queue

Dtype = torch.dtype | None
Amax = Tensor | None
Noise = tuple[Key | None, Key | None]  # of x and of x.T
Both = tuple[QTensor, QTensor | None, Tensor | None]  # of x, of x.T, the amax of a window


def run(x: Tensor, cast: Cast, amax: Amax, noise: Key | None, expand: Dtype) -> QTensor:
    """See `ops.quantize`."""
    if amax is not None:
        amax = amax.to(torch.float32).expand(scale_shape((x.shape[0], x.shape[1]), cast.tile)).contiguous()
    return cast_pair(x, cast, amax=amax, noise=(noise, None), expand=expand)[0]


def both(x: Tensor, cast: Cast, cols: bool, amax: Amax) -> tuple[QTensor, QTensor | None]:
    """x and, with cols, x.T; amax [1, 1]: of the tensor, where it is known. See `ops.quantize.compiled`."""
    return cast_pair(x, cast, cols=cols, amax=amax)


def empty(x: Tensor, cast: Cast) -> QTensor:
    """What a cast of x will be, without its numbers: shapes, types, and the order in memory."""
    return Output(tuple(x.shape), cast, x.device).finished()


def pair(x: Tensor, cast: Cast, amax_state: Tensor | None, records: bool, cols: bool, noise: Noise) -> Both:
    """See `ops.quantize.quantize_pair`."""
    if amax_state is None:
        return (*cast_pair(x, cast, cols=True, noise=noise), None)
    return cast_delayed(x, cast, amax_state, records, cols)


def precast(x: Tensor, precast: Any, amax_state: Tensor | None, records: bool) -> Both:
    """See `ops.quantize.quantize_precast`. The codes are written anew where another amax is in use than the one expected.

    precast  a PrecastWeight, whose module leads to this one
    """
    cast, codes = precast.cast, precast.codes
    if amax_state is None or codes is None:
        return (*cast_pair(x, cast, cols=True, amax=precast.maxima.view(torch.float32)), None)
    state = state_of(amax_state, precast.maxima, torch.empty(1, 1, dtype=torch.float32, device=x.device))
    matrix, programs, sizes = _pieces(x.detach(), constants(x, cast), dense=False)
    launch(
        triton_transpose.settle_both, min(programs, SETTLING), matrix, *(each.view(torch.uint8) for each in codes), state, precast.expected,
        RECORDS=records, PARTS=precast.maxima.numel(), **sizes,
    )  # fmt: skip
    rows = QTensor(data=codes[0], scale=state.scale, cast=cast, inner=x.shape[1])
    return rows, QTensor(data=codes[1], scale=state.scale, cast=cast, inner=x.shape[0]), state.amax


def constants(x: Tensor, cast: Cast, expand: Dtype = None) -> CastConstants:
    """What kernels that cast x are compiled with."""
    capability = device_facts(x.device.type, x.device.index).capability
    return cast_constants.constants_of(cast, capability, expand is not None)


class Output:
    """Codes, or values of dtype `expand`, and scales of one orientation, [outer, inner], to be filled by a kernel."""

    def __init__(
        self, shape: tuple[int, ...], cast: Cast, device: torch.device, expand: Dtype = None, noise: Key | None = None
    ) -> None:
        format = cast.format
        per_byte = 1 if expand is not None else format.codes_per_byte
        dtype = expand or (torch.uint8 if per_byte > 1 else format.storage)
        self.cast, self.inner = cast, shape[1]
        self.key = None if noise is None else noise.on_device(device)
        self.data = torch.empty(shape[0], -(-shape[1] // per_byte), dtype=dtype, device=device)
        self.scale = empty_scales((shape[0], shape[1]), cast, device)
        self.codes = self.data if expand is not None else self.data.view(torch.uint8)
        self.shared = self.scale.new_empty(()) if cast.scale.two_level else None

    def finished(self) -> QTensor:
        shared = self.shared
        if shared is None and self.cast.has_global_scale:
            shared = self.scale.new_full((), self.cast.headroom)
        return QTensor(data=self.data, scale=self.scale, cast=self.cast, inner=self.inner, global_scale=shared)


def cast_pair(
    x: Tensor, cast: Cast, *, cols: bool = False, amax: Amax = None, noise: Noise = (None, None), expand: Dtype = None
) -> tuple[QTensor, QTensor | None]:
    """x [outer, inner], not empty, and, with cols, x.T by the same cast.

    amax  float32, contiguous: of a tensor a power of two of places whose largest it is, of rows one each (without cols); not of blocks
    """
    rows = Output(tuple(x.shape), cast, x.device, expand, noise[0])
    columns = Output(tuple(x.T.shape), cast, x.device, expand, noise[1]) if cols else None
    memory, is_transposed = _in_memory_order(x.detach())
    by_tile = {(WHOLE, WHOLE): _cast_by_one, (1, WHOLE): _cast_by_lines}.get(cast.tile, _cast_blocks)
    by_tile(memory, constants(x, cast, expand), (columns, rows) if is_transposed else (rows, columns), amax)
    return rows.finished(), None if columns is None else columns.finished()


def cast_delayed(x: Tensor, cast: Cast, amax_state: Tensor, records: bool, cols: bool) -> Both:
    """x and, with cols, x.T by the scale of earlier steps, with the amax that was used [1, 1].

    Without cols the rows of x are even if codes are packed.
    """
    rows = Output(tuple(x.shape), cast, x.device)
    columns = Output(tuple(x.T.shape), cast, x.device) if cols else None
    memory, is_transposed = _in_memory_order(x.detach() if cols else x.detach().contiguous())
    codes = [None if output is None else output.codes for output in (rows, columns)]
    matrix, programs, sizes = _pieces(memory, constants(x, cast), dense=not cols)
    state = state_of(amax_state, zeros_left_zero(SHARED_PARTS + 1, x.device), rows.scale)
    given = (matrix, *(codes[::-1] if is_transposed else codes), state)
    launch(triton_transpose.both_delayed, programs, *given, RECORDS=records, PARTS=SHARED_PARTS, **sizes)
    if columns is not None:
        columns.scale = rows.scale
    return rows.finished(), None if columns is None else columns.finished(), state.amax


def state_of(live: Tensor, maxima: Tensor, scale: Tensor) -> AmaxState:
    """A window's live state for a kernel, with a place for the amax in use, [1, 1]."""
    return AmaxState(live, maxima, torch.empty(1, 1, dtype=torch.float32, device=live.device), scale)


def _in_memory_order(x: Tensor) -> tuple[Tensor, bool]:
    """(x, False) if its rows lie in memory one element after the other; (x.T, True) if its columns do; else a copy of x."""
    if x.stride(1) == 1 or x.shape[1] == 1:
        return x, False
    if x.stride(0) == 1 or x.shape[0] == 1:
        return x.T, True
    return x.contiguous(), False


def _pieces(x: Tensor, C: CastConstants, dense: bool) -> tuple[Matrix, int, dict[str, Any]]:
    """(x for a kernel, programs, sizes of a piece): squares; if only its own order counts (dense) and x has no gaps, runs of one row."""
    if dense and x.is_contiguous() and not (C.packed and x.shape[1] % 2):
        sizes = {"C": C, "ROWS": 1, "COLUMNS": RUN, "warps": RUN_WARPS}
        return Matrix.of(x.view(1, -1)), -(-x.numel() // RUN), sizes
    sizes = {"C": C, "ROWS": SQUARE, "COLUMNS": SQUARE, "warps": SQUARE_WARPS}
    return Matrix.of(x), -(-x.shape[0] // SQUARE) * -(-x.shape[1] // SQUARE), sizes


def _parts(x: Tensor) -> int:
    pieces = -(-x.numel() // RUN)
    return next((parts for parts in PARTS if parts >= pieces), PARTS[-1])


def _tensor_maxima(x: Tensor) -> Tensor:
    """[PARTS] int32 of a tensor in any dense order."""
    parts = _parts(x)
    maxima = torch.empty(parts, dtype=torch.int32, device=x.device)
    given = (x.contiguous(), maxima, None, None, x.numel())
    launch(triton_transpose.amax, parts, *given, PARTS=parts, RUN=RUN, warps=RUN_WARPS)
    return maxima


def amax(x: Tensor) -> Tensor:
    """The largest magnitude of x, not empty, [1, 1] float32: `tile_amax` of the whole tensor, in one launch."""
    parts, x = _parts(x), _in_memory_order(x.detach())[0]
    maxima, whole = (torch.empty(size, dtype=torch.int32, device=x.device) for size in ((parts,), (1, 1)))
    given = (x.contiguous(), maxima, whole, zeros_left_zero(1, x.device), x.numel())
    launch(triton_transpose.amax, parts, *given, PARTS=parts, RUN=RUN, warps=RUN_WARPS)
    return whole.view(torch.float32)


def with_amax(x: Tensor, cast: Cast) -> tuple[QTensor | None, Tensor]:
    """x, not empty, by one scale, and its amax [1, 1] float32, in one launch; None and the amax where it rounds stochastically."""
    if cast.rounding == "stochastic":
        return None, amax(x)
    rows, whole = Output(tuple(x.shape), cast, x.device), torch.empty(1, 1, dtype=torch.int32, device=x.device)
    memory, is_transposed = _in_memory_order(x.detach())
    _cast_by_one(memory, constants(x, cast), (None, rows) if is_transposed else (rows, None), None, whole)
    return rows.finished(), whole.view(torch.float32)


Wanted = tuple[
    "Output | None", "Output | None"
]  # in the order of x, whose rows lie in memory, and transposed; None: it is not


def _orientation(output: Output | None, maxima: Tensor | None = None) -> Orientation:
    return Orientation() if output is None else Orientation(output.codes, output.scale, maxima, output.key)


def _cast_by_one(x: Tensor, C: CastConstants, wanted: Wanted, amax: Amax, whole: Tensor | None = None) -> None:
    """One scale for the tensor. whole: int32 [1, 1], to be given the bits of the largest magnitude; then it rounds to nearest."""
    scale = next(output.scale for output in wanted if output is not None)
    first = _orientation(wanted[0])._replace(scales=scale)
    second = _orientation(wanted[1])._replace(scales=None)  # its scale is that of the first
    matrix, pieces, sizes = _pieces(x, C, dense=wanted[1] is None)
    if amax is None and _is_at_once(matrix, C):
        programs, parts = _at_once(pieces, sizes["warps"], x.device)
        given = (matrix, first, second, whole, zeros_left_zero(parts + 1, x.device, written=parts))
        launch(triton_transpose.amax_and_cast, programs, *given, PARTS=parts, **sizes, **AT_ONCE)
    else:
        maxima = _tensor_maxima(x) if amax is None else amax.view(torch.int32)
        first = first._replace(maxima=maxima)
        launch(triton_transpose.cast_both, pieces, matrix, first, second, None, PARTS=maxima.numel(), **sizes)
    if wanted[1] is not None:
        wanted[1].scale = scale


def _is_at_once(x: Matrix, C: CastConstants) -> bool:
    """Whether its registers suffice for `amax_and_cast`: rounding to nearest, in rows and columns that are multiples of 16."""
    return not (C.stochastic or x.rows % 16 * (x.rows > 1) or x.columns % 16 or x.stride % 16)


def _at_once(pieces: int, warps: int, device: torch.device) -> tuple[int, int]:
    """(programs that share so many pieces and all run at once, places for a maximum of each: of few sizes, each is compiled apart)."""
    most = _running(warps, device.index) if device.type == "cuda" and dry_run_on() is None else 1
    programs = min(pieces, most)
    return programs, FEW if programs <= FEW else 1 << (most - 1).bit_length()


@cache
def _running(warps: int, index: int | None) -> int:
    """How many programs run at once."""
    return int(torch.cuda.get_device_properties(index).multi_processor_count) * (THREADS // (32 * warps))


def _cast_by_lines(x: Tensor, C: CastConstants, wanted: Wanted, amax: Amax) -> None:
    """A scale for each row of x, and for each column. A given amax serves the one output that is wanted."""
    if wanted[1] is None and amax is None:
        _cast_rows(x, C, wanted[0])
        return
    matrix, programs, sizes = _pieces(x, C, dense=False)
    if amax is None and C.bits == 8 and _is_at_once(matrix, C):
        programs = _at_once(programs, sizes["warps"], x.device)[0]
        given = (matrix, *map(_orientation, wanted), None, zeros_left_zero(sum(x.shape) + 1, x.device))
        launch(triton_transpose.amax_and_cast, programs, *given, PARTS=0, **sizes, **AT_ONCE)
        return
    ended, maxima = None, [None if amax is None else amax.view(torch.int32)] * 2
    if amax is None:
        lengths = [0 if output is None else length for output, length in zip(wanted, x.shape, strict=True)]
        *parts, ended = zeros_left_zero(sum(lengths) + 1, x.device).split([*lengths, 1])
        maxima = [part if len(part) else None for part in parts]
        launch(triton_transpose.maxima, programs, matrix, *maxima, ROWS=SQUARE, COLUMNS=SQUARE, warps=SQUARE_WARPS)
    launch(triton_transpose.cast_both, programs, matrix, *map(_orientation, wanted, maxima), ended, PARTS=0, **sizes)


def _cast_rows(x: Tensor, C: CastConstants, output: Output | None) -> None:
    """A scale for each row of x, which is read once if a row fits into the registers of a program."""
    outer, inner = x.shape
    whole = inner <= LONGEST_ROW
    piece = max(1 << (inner - 1).bit_length(), 16) if whole else ROW_PIECE
    rows = max(LONGEST_ROW // (4 * piece), 1) if whole else 1
    launch(
        triton_transpose.cast_rows, -(-outer // rows), Matrix.of(x), _orientation(output), C=C, WHOLE_ROW=whole,
        ROWS=rows, COLUMNS=piece, warps=ROW_WARPS if piece * rows > 2048 else 4,
    )  # fmt: skip


def _cast_blocks(x: Tensor, C: CastConstants, wanted: Wanted, amax: Amax) -> None:
    """A scale for each block; of two levels with a float32 that all of them share."""
    given = next(output for output in wanted if output is not None)
    maxima = _tensor_maxima(x) if C.two_level else None
    a, b = given.cast.tile
    side, warps = (LARGE_BLOCK, LARGE_BLOCK_WARPS) if max(a, b) > SQUARE else (SQUARE, SQUARE_WARPS)
    first = _orientation(wanted[0])._replace(maxima=maxima)
    launch(
        triton_block.cast_blocks, -(-x.shape[0] // side) * -(-x.shape[1] // side), Matrix.of(x), first,
        _orientation(wanted[1]), given.shared, C=C, PARTS=0 if maxima is None else maxima.numel(),
        A=a, B=b, ROWS=side, COLUMNS=side, warps=warps,
    )  # fmt: skip
    if wanted[1] is not None:
        wanted[1].shared = given.shared
