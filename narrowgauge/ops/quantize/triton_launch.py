"""Launch the Triton kernels that quantize.

Results are bit-identical to the reference, in one or two launches.

    tile             launches                         reads of x (including x.T, if requested)
    tensor           one, with all programs resident  2, the second from the cache if x fits
    tensor, delayed  one, by as many programs as fit  1
    row              one                              1; 2 above 8,192 elements, like a tensor
    row, with x.T    one, like a tensor               2, like a tensor
    blocks           one                              1
    blocks, 2 level  maxima, cast                     2, like a tensor
    EDEN             one; maxima, cast under 2 levels 1; 2
    rotated blocks   one; maxima, cast under 2 levels 1; 2, x.T rotated and x beside it

Two launches, maxima and cast, replace one that would exceed its limit of 64 registers: for
stochastic rounding, for sides that are no multiple of 16, and for rows with x.T in formats outside
`cast_constants.IN_64_REGISTERS`. They also replace it beside collectives, and where the driver
refuses it (`ops.triton.grids`).

Sizes of the pieces, none measured on a GPU:

    runs       4,096 elements of dense memory in 4 warps: 16-bit input arrives in four 16-byte loads
               per thread
    rows       a whole row of up to 8,192 elements in 8 warps: 32 registers of values per thread
    squares    64 x 64 in 8 warps: the runs of x.T are 64 bytes. 64 x 128 takes 228 registers with
               Triton 3.6, i.e. one program per multiprocessor
    filling    runs of 32,768 and squares of 128 x 128 in 32 warps, for cooperative grids that leave
               multiprocessors free: as many elements per thread, and one program per multiprocessor
    blocks     one block of 128 in both directions: 128 x 128 in 16 warps, 32 elements per thread
    EDEN       rows of one corrected block, 2,048 elements in 4 warps
    rotated    four blocks of rows by 64 columns in 8 warps: a thread has one block of one column. Two
               columns in 4 warps spilled 8 bytes on 10.0 with Triton 3.7, and had up to 172 registers
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge.addresses import dry_run_on
from narrowgauge.formats import E4M3
from narrowgauge.ops.quantize.spec import empty_scales, empty_units
from narrowgauge.ops.random import Key
from narrowgauge.ops.registry import device_facts
from narrowgauge.ops.triton import cast_constants, version
from narrowgauge.ops.triton.grids import free_multiprocessors, launched_as_grid, multiprocessors
from narrowgauge.ops.triton.launch import (
    AmaxState,
    Kernels,
    Matrix,
    Orientation,
    launch,
    zeroed_workspace,
)
from narrowgauge.ops.triton.workspaces import dropped_on_error
from narrowgauge.qtensor import QTensor, SwizzledQTensor
from narrowgauge.recipe import Cast
from narrowgauge.scaling import WHOLE, scale_shape

if TYPE_CHECKING:
    from narrowgauge.ops.triton.cast_constants import CastConstants

triton_block = Kernels("narrowgauge.ops.quantize.triton_block")
triton_eden = Kernels("narrowgauge.ops.quantize.triton_eden")
triton_rotated = Kernels("narrowgauge.ops.quantize.triton_rotated")
triton_transpose = Kernels("narrowgauge.ops.quantize.triton_transpose")

RUN, RUN_WARPS = 4096, 4
SQUARE, SQUARE_WARPS = 64, 8
LONGEST_ROW, ROW_PIECE, ROW_WARPS = 8192, 4096, 8
CORRECTED, CORRECTED_WARPS = 2048, 4
ROTATED_BLOCKS = 4  # blocks of a rotation that a program has in each column
LARGE_BLOCK, LARGE_BLOCK_WARPS = 128, 16  # for tiles with a side above 64; other tiles take squares
# Number of programs that compute a maximum: the smallest that suffices, so that few variants are
# compiled. 512 programs of 4 warps keep 64 KB in flight per multiprocessor of an H200.
PARTS = 1, 32, 512
SETTLING = 512  # programs that in most steps find nothing to cast
# Programs that cast a tensor again if its amax history was empty, and their polls for its scale, of
# about a microsecond. Few enough that others find a place beside them on a tenth of a GPU.
HELPERS, PATIENCE = 64, 1024
# Registers of a thread of `both_delayed`, in FP8 that the GPU converts, with sides that are multiples of 16.
# Other forms spilled up to 504 bytes, and take what they need.
#   AHEAD        four programs of 8 warps to a multiprocessor, or eight of 4. On 12.0 Triton 3.7 spilled 8 bytes
#   ONE          squares, one per program: six programs. Triton 3.7 took up to 60 registers by itself
#   ONE_BY_36    the same for Triton 3.6, which spilled 32 bytes from 40: five programs
AHEAD, ONE, ONE_BY_36 = 64, 40, 48
LOADS_AHEAD = 9, 10  # major capabilities
# Launch options of `amax_and_cast`. A cooperative launch makes the driver start all programs at
# once, or refuse. 1,024 threads of at most 64 registers fit on every multiprocessor from compute
# capability 8.0 on.
COOPERATIVE: dict[str, Any] = {"launch_cooperative_grid": True, "maxnreg": 64}
THREADS = 1024
FILLING = THREADS // 32  # warps of a program that has a multiprocessor to itself
FEW = 32  # size for small grids, see `_cooperative_grid`
SHARED_PARTS = 64  # slots for the maximum: few enough to read, enough to avoid contention
DELAYED_COUNTERS = SHARED_PARTS + 4  # of `both_delayed`

_SCALES = Cast(format=E4M3, rounding="stochastic")  # of corrected scales under two-level rules

Dtype = torch.dtype | None
Amax = Tensor | None
Noise = tuple[Key | None, Key | None]  # noise of x and of x.T
Both = tuple[QTensor, QTensor | None, Tensor | None]  # x, x.T, amax of delayed scaling


def run(x: Tensor, cast: Cast, amax: Amax, noise: Key | None, expand: Dtype) -> QTensor:
    """See `ops.quantize`."""
    if amax is not None:
        amax = (
            amax.to(torch.float32)
            .expand(scale_shape((x.shape[0], x.shape[1]), cast.tile))
            .contiguous()
        )
    return cast_pair(x, cast, amax=amax, noise=(noise, None), expand=expand)[0]


def both(x: Tensor, cast: Cast, cols: bool, amax: Amax) -> tuple[QTensor, QTensor | None]:
    """Cast x and, with cols, x.T, for `ops.quantize.compiled`.

    amax  [1, 1] amax of the tensor, or None: computed here
    """
    return cast_pair(x, cast, cols=cols, amax=amax, in_operator=True)


def eden(x: Tensor, cast: Cast, amax: Amax, noise: Key | None, expand: Dtype) -> QTensor:
    """See `ops.quantize`; of casts with rounding "eden", for an x that is rotated already. No amax."""
    x = x.detach()
    x = x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
    output = Output(tuple(x.shape), cast, x.device, expand, noise, for_units=True)
    maxima = _tensor_maxima(x) if cast.scale.two_level else None
    rows = max(CORRECTED // cast.block, 1)
    first, *others = cast.scale.tries
    launch(
        triton_eden.cast_eden, -(-x.shape[0] // rows) * -(-x.shape[1] // cast.block), Matrix.of(x),
        _orientation(output, maxima), output.shared, C=constants(x, cast, expand), OF_SCALES=constants(x, _SCALES),
        FIRST=first, SECOND=others[0] if others else 0.0, PARTS=0 if maxima is None else maxima.numel(),
        BLOCK=cast.block, TILE=cast.tile[1], ROWS=rows, warps=CORRECTED_WARPS,
    )  # fmt: skip
    return output.finished()


def rotated(
    x: Tensor, cast: Cast, turn: Any, noise: Noise, expand: Dtype, beside: bool
) -> tuple[QTensor, QTensor | None]:
    """See `ops.hadamard.casting`. turn: a `spec.Turn` of one round."""
    block, signs, _ = turn
    # Rows of x lie across the memory of x.T, whose rows are contiguous.
    memory = x.detach().T
    memory = memory if memory.stride(1) == 1 or memory.shape[1] == 1 else memory.contiguous()
    rows, columns = memory.shape
    length = -(-rows // block) * block
    turned = Output((columns, length), cast, x.device, expand, noise[0], for_units=True)
    plain = Output((rows, columns), cast, x.device, None, noise[1], True) if beside else None
    height = ROTATED_BLOCKS * block
    sizes = {"ORDER": block, "ROWS": height, "COLUMNS": SQUARE, "warps": SQUARE_WARPS}
    given = Matrix.of(memory), signs
    of_plain = of_turned = None
    parts = _parts(memory) if cast.scale.two_level else 0
    if parts:
        of_turned, of_plain = (
            torch.empty(parts, dtype=torch.int32, device=x.device) if is_wanted else None
            for is_wanted in (True, beside)
        )
        launch(
            triton_rotated.maxima_rotated, parts, *given, of_plain, of_turned, PARTS=parts, **sizes
        )
    launch(
        triton_rotated.cast_rotated, -(-rows // height) * -(-columns // SQUARE), *given,
        _orientation(plain, of_plain), _orientation(turned, of_turned),
        None if plain is None else plain.shared, turned.shared,
        C=constants(x, cast, expand), PARTS=parts, TILE=cast.tile[1], **sizes,
    )  # fmt: skip
    return turned.finished(), None if plain is None else plain.finished()


def empty(x: Tensor, cast: Cast) -> QTensor:
    """Return the result of a cast of x without its values: shapes, dtypes and memory layout."""
    return Output(tuple(x.shape), cast, x.device).finished()


def pair(
    x: Tensor, cast: Cast, amax_state: Tensor | None, records: bool, cols: bool, noise: Noise
) -> Both:
    """See `ops.quantize.quantize_pair`."""
    if amax_state is None:
        return (*cast_pair(x, cast, cols=True, noise=noise), None)
    return cast_delayed(x, cast, amax_state, records, cols)


def precast(x: Tensor, precast: Any, amax_state: Tensor | None, records: bool) -> Both:
    """See `ops.quantize.quantize_precast`.

    It recomputes the codes if the amax in use is not the expected one.

    precast  a PrecastWeight; importing its class here would be circular
    """
    cast, codes = precast.cast, precast.codes
    if amax_state is None or codes is None:
        return (*cast_pair(x, cast, cols=True, amax=precast.maxima.view(torch.float32)), None)
    state = state_of(
        amax_state, precast.maxima, torch.empty(1, 1, dtype=torch.float32, device=x.device)
    )
    # Codes of both orientations may have to be written again, so pieces are squares.
    matrix, programs, sizes = _pieces(x.detach(), constants(x, cast), dense=False)
    launch(
        triton_transpose.settle_both, min(programs, SETTLING), matrix, *(each.view(torch.uint8) for each in codes), state, precast.expected,
        RECORDS=records, PARTS=precast.maxima.numel(), **sizes,
    )  # fmt: skip
    rows = QTensor(data=codes[0], scale=state.scale, cast=cast, inner=x.shape[1])
    return rows, QTensor(data=codes[1], scale=state.scale, cast=cast, inner=x.shape[0]), state.amax


def constants(x: Tensor, cast: Cast, expand: Dtype = None) -> CastConstants:
    """Return the compile-time constants of kernels that cast x."""
    capability = device_facts(x.device.type, x.device.index).capability
    return cast_constants.constants_of(cast, capability, expand is not None)


class Output:
    """Buffers for one orientation of a cast, [outer, inner], which a kernel fills.

    data    codes, or values of dtype `expand`
    codes   data as the kernel takes it: codes as bytes
    scale   [A, B] float32, or None
    units   uint8, the scales as `QTensor.units`, in place of `scale`; or None
    shared  0-d float32 scale of the tensor under two-level rules, else None
    key     words of the noise on the device, or None
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        cast: Cast,
        device: torch.device,
        expand: Dtype = None,
        noise: Key | None = None,
        for_units: bool = False,
    ) -> None:
        format = cast.format
        per_byte = 1 if expand is not None else format.codes_per_byte
        dtype = expand or (torch.uint8 if per_byte > 1 else format.storage)
        self.cast, self.inner = cast, shape[1]
        self.key = None if noise is None else noise.on_device(device)
        self.data = torch.empty(shape[0], -(-shape[1] // per_byte), dtype=dtype, device=device)
        sizes = shape[0], shape[1]
        self.units = empty_units(sizes, cast, device) if for_units and expand is None else None
        self.scale: Any = empty_scales(sizes, cast, device) if self.units is None else None
        # Kernels write codes of every format as bytes.
        self.codes = self.data if expand is not None else self.data.view(torch.uint8)
        self.shared = (
            torch.empty((), dtype=torch.float32, device=device) if cast.scale.two_level else None
        )

    def finished(self) -> QTensor:
        shared = self.shared
        if shared is None and self.cast.has_global_scale:
            shared = torch.full(
                (), self.cast.headroom, dtype=torch.float32, device=self.data.device
            )
        if self.units is not None:
            return SwizzledQTensor.of_units(self.data, self.units, self.cast, self.inner, shared)
        return QTensor(
            data=self.data, scale=self.scale, cast=self.cast, inner=self.inner, global_scale=shared
        )


def cast_pair(
    x: Tensor,
    cast: Cast,
    *,
    cols: bool = False,
    amax: Amax = None,
    noise: Noise = (None, None),
    expand: Dtype = None,
    in_operator: bool = False,
) -> tuple[QTensor, QTensor | None]:
    """Cast x [outer, inner], not empty, and, with cols, x.T by the same cast.

    in_operator  True for an operator of compiled code, whose outputs are float32 scales

    amax  float32, contiguous. For a tensor, and for blocks under two-level rules: slots whose
          maximum is the amax of the tensor, a power of two of them. For rows: one each (without
          cols). Not for other blocks
    """
    given = cast, x.device, expand
    rows = Output(tuple(x.shape), *given, noise[0], not in_operator)
    columns = Output(tuple(x.T.shape), *given, noise[1], not in_operator) if cols else None
    memory, is_transposed = _in_memory_order(x.detach())
    by_tile = {(WHOLE, WHOLE): _cast_by_one, (1, WHOLE): _cast_by_lines}.get(
        cast.tile, _cast_blocks
    )
    by_tile(
        memory,
        constants(x, cast, expand),
        (columns, rows) if is_transposed else (rows, columns),
        amax,
    )
    return rows.finished(), None if columns is None else columns.finished()


def cast_delayed(x: Tensor, cast: Cast, amax_state: Tensor, records: bool, cols: bool) -> Both:
    """Cast x and, with cols, x.T by the scale of earlier steps.

    Also returns the amax that was used [1, 1].

    Without cols the rows of x must be even if codes are packed.
    """
    rows = Output(tuple(x.shape), cast, x.device)
    columns = Output(tuple(x.T.shape), cast, x.device) if cols else None
    memory, is_transposed = _in_memory_order(x.detach() if cols else x.detach().contiguous())
    codes = [None if output is None else output.codes for output in (rows, columns)]
    C = constants(x, cast)
    matrix, programs, sizes = _pieces(memory, C, dense=not cols)
    ahead, limit = _delayed_form(matrix, C, sizes["warps"])
    if ahead:
        programs = _cooperative_grid(programs, sizes["warps"], x.device)[0]
    state = state_of(amax_state, zeroed_workspace(DELAYED_COUNTERS, x.device), rows.scale)
    # Triton's interpreter runs programs in turns: none can wait for another.
    patience = 0 if C.interpreted else PATIENCE
    given = (matrix, *(codes[::-1] if is_transposed else codes), state, patience)
    launch(
        triton_transpose.both_delayed,
        programs,
        *given,
        RECORDS=records,
        PARTS=SHARED_PARTS,
        HELPERS=HELPERS,
        AHEAD=ahead,
        **sizes,
        **limit,
    )
    if columns is not None:
        columns.scale = rows.scale
    return rows.finished(), None if columns is None else columns.finished(), state.amax


def _delayed_form(x: Matrix, C: CastConstants, warps: int) -> tuple[bool, dict[str, Any]]:
    """Return (True if few programs of `both_delayed` share the pieces, its launch options)."""
    if not (C.hardware and _fits_cooperative_launch(x, C)):
        return False, {}
    major = device_facts(x.data.device.type, x.data.device.index).capability[0]
    if major in LOADS_AHEAD and x.data.element_size() == 2:
        return True, {"maxnreg": AHEAD}
    one = ONE if version() >= (3, 7) else ONE_BY_36
    return False, {"maxnreg": one} if warps == SQUARE_WARPS else {}


def state_of(live: Tensor, maxima: Tensor, scale: Tensor) -> AmaxState:
    """Return the amax state for a kernel, with a new buffer for the amax in use [1, 1]."""
    return AmaxState(
        live, maxima, torch.empty(1, 1, dtype=torch.float32, device=live.device), scale
    )


def _in_memory_order(x: Tensor) -> tuple[Tensor, bool]:
    """Return (matrix with contiguous rows, True if it is x.T).

    x is copied if neither its rows nor its columns are contiguous.
    """
    if x.stride(1) == 1 or x.shape[1] == 1:
        return x, False
    if x.stride(0) == 1 or x.shape[0] == 1:
        return x.T, True
    return x.contiguous(), False


def _pieces(
    x: Tensor, C: CastConstants, dense: bool, fills: bool = False
) -> tuple[Matrix, int, dict[str, Any]]:
    """Return (x as a `Matrix`, number of programs, sizes of a piece).

    Pieces are squares. If only codes of x are written (dense) and x is contiguous, pieces are runs
    of a single row.

    fills  True for programs of `THREADS` threads, with as many elements per thread
    """
    if dense and x.is_contiguous() and not (C.packed and x.shape[1] % 2):
        run = RUN * (FILLING // RUN_WARPS) if fills else RUN
        sizes = {"C": C, "ROWS": 1, "COLUMNS": run, "warps": FILLING if fills else RUN_WARPS}
        return Matrix.of(x.view(1, -1)), -(-x.numel() // run), sizes
    side = 2 * SQUARE if fills else SQUARE
    warps = FILLING if fills else SQUARE_WARPS
    sizes = {"C": C, "ROWS": side, "COLUMNS": side, "warps": warps}
    return Matrix.of(x), -(-x.shape[0] // side) * -(-x.shape[1] // side), sizes


def _grid_pieces(x: Tensor, C: CastConstants, dense: bool) -> tuple[Matrix, int, dict[str, Any]]:
    """Like `_pieces`, for a cooperative grid."""
    return _pieces(x, C, dense, fills=free_multiprocessors(x.device.index) > 0)


def _parts(x: Tensor) -> int:
    pieces = -(-x.numel() // RUN)
    return next((parts for parts in PARTS if parts >= pieces), PARTS[-1])


def _tensor_maxima(x: Tensor, whole: Tensor | None = None) -> Tensor:
    """Return the maxima [PARTS] int32 of a tensor in any dense layout.

    whole  int32 [1, 1], receives the largest of them; None: not wanted
    """
    parts = _parts(x)
    maxima = torch.empty(parts, dtype=torch.int32, device=x.device)
    ended = None if whole is None else zeroed_workspace(1, x.device)
    given = (x.contiguous(), maxima, whole, ended, x.numel())
    launch(triton_transpose.amax, parts, *given, PARTS=parts, RUN=RUN, warps=RUN_WARPS)
    return maxima


def amax(x: Tensor) -> Tensor:
    """Return the largest magnitude of x, not empty, [1, 1] float32, in one launch."""
    parts, x = _parts(x), _in_memory_order(x.detach())[0]
    maxima, whole = (
        torch.empty(size, dtype=torch.int32, device=x.device) for size in ((parts,), (1, 1))
    )
    given = (x.contiguous(), maxima, whole, zeroed_workspace(1, x.device), x.numel())
    launch(triton_transpose.amax, parts, *given, PARTS=parts, RUN=RUN, warps=RUN_WARPS)
    return whole.view(torch.float32)


def with_amax(x: Tensor, cast: Cast) -> tuple[QTensor | None, Tensor]:
    """Cast x, not empty, and return (cast, amax [1, 1] float32), without another read for the amax.

    cast  with one scale, or with a scale of the tensor above those of its tiles

    With stochastic rounding the cast is None.
    """
    if cast.draws:
        return None, amax(x)
    of_blocks = cast.scale.two_level
    rows, whole = (
        Output(tuple(x.shape), cast, x.device, for_units=of_blocks),
        torch.empty(1, 1, dtype=torch.int32, device=x.device),
    )
    memory, is_transposed = _in_memory_order(x.detach())
    wanted = (None, rows) if is_transposed else (rows, None)
    if of_blocks:
        _tensor_maxima(memory, whole)
        _cast_blocks(memory, constants(x, cast), wanted, whole.view(torch.float32))
    else:
        _cast_by_one(memory, constants(x, cast), wanted, None, whole)
    return rows.finished(), whole.view(torch.float32)


def by_amax(x: Tensor, cast: Cast, amax: Tensor) -> QTensor:
    """Cast x, not empty, under a two-level rule, by the amax of the tensor that `with_amax` returned."""
    return cast_pair(x, cast, amax=amax)[0]


# Outputs for x, whose rows are contiguous, and for x.T; None: not requested.
Wanted = tuple["Output | None", "Output | None"]


def _orientation(output: Output | None, maxima: Tensor | None = None) -> Orientation:
    return (
        Orientation()
        if output is None
        else Orientation(output.codes, output.scale, maxima, output.key, output.units)
    )


def _cast_by_one(
    x: Tensor, C: CastConstants, wanted: Wanted, amax: Amax, whole: Tensor | None = None
) -> None:
    """Cast with one scale for the tensor.

    whole  int32 [1, 1], receives the bits of the largest magnitude; it requires rounding to nearest
    """
    scale = next(output.scale for output in wanted if output is not None)
    first = _orientation(wanted[0])._replace(scales=scale)
    second = _orientation(wanted[1])._replace(scales=None)  # its scale is the first one
    matrix, pieces, sizes = _pieces(x, C, dense=wanted[1] is None)

    def grid() -> None:
        shared, count, of_grid = _grid_pieces(x, C, dense=wanted[1] is None)
        programs, parts = _cooperative_grid(count, of_grid["warps"], x.device)
        given = (shared, first, second, whole, zeroed_workspace(parts + 1, x.device, written=parts))
        launch(
            triton_transpose.amax_and_cast, programs, *given, PARTS=parts, **of_grid, **COOPERATIVE
        )

    fits = amax is None and _fits_cooperative_launch(matrix, C)
    if not (fits and launched_as_grid(grid, x.device.index)):
        maxima = _tensor_maxima(x, whole) if amax is None else amax.view(torch.int32)
        first = first._replace(maxima=maxima)
        launch(
            triton_transpose.cast_both,
            pieces,
            matrix,
            first,
            second,
            None,
            PARTS=maxima.numel(),
            **sizes,
        )
    if wanted[1] is not None:
        wanted[1].scale = scale


def _fits_cooperative_launch(x: Matrix, C: CastConstants) -> bool:
    """Return True if 64 registers suffice for `amax_and_cast`, and 40 for `both_delayed` in FP8.

    They do for rounding to nearest, if rows and columns are multiples of 16; other forms spilled
    (decisions/gpu.md).
    """
    return not (C.stochastic or x.rows % 16 * (x.rows > 1) or x.columns % 16 or x.stride % 16)


def _cooperative_grid(pieces: int, warps: int, device: torch.device) -> tuple[int, int]:
    """Return (number of programs that run at once and share the pieces, slots for their maxima).

    The slots have few sizes, because each size is compiled separately.
    """
    most = (
        _resident_programs(warps, device.index)
        if device.type == "cuda" and dry_run_on() is None
        else 1
    )
    programs = min(pieces, most)
    return programs, FEW if programs <= FEW else 1 << (most - 1).bit_length()


def _resident_programs(warps: int, index: int | None) -> int:
    """Return the number of programs that run at once on the multiprocessors that are not left free."""
    return (multiprocessors(index) - free_multiprocessors(index)) * (THREADS // (32 * warps))


def _cast_by_lines(x: Tensor, C: CastConstants, wanted: Wanted, amax: Amax) -> None:
    """Cast with a scale for each row of x, and for each column.

    A given amax is for the only output that is requested.
    """
    if wanted[1] is None and amax is None:
        _cast_rows(x, C, wanted[0])
        return
    matrix, programs, sizes = _pieces(x, C, dense=False)

    def grid() -> None:
        shared, count, of_grid = _grid_pieces(x, C, dense=False)
        resident = _cooperative_grid(count, of_grid["warps"], x.device)[0]
        zeros = zeroed_workspace(sum(x.shape) + 1, x.device)
        given = (shared, *map(_orientation, wanted), None, zeros)
        launch(triton_transpose.amax_and_cast, resident, *given, PARTS=0, **of_grid, **COOPERATIVE)

    fits = amax is None and C.in_64_registers and _fits_cooperative_launch(matrix, C)
    if fits and launched_as_grid(grid, x.device.index):
        return
    with dropped_on_error():  # both launches share a buffer
        _cast_lines_in_two(x, matrix, programs, sizes, wanted, amax)


def _cast_lines_in_two(
    x: Tensor, matrix: Matrix, programs: int, sizes: dict[str, Any], wanted: Wanted, amax: Amax
) -> None:
    """Find maxima, unless the amax is given, and cast by them."""
    ended, maxima = None, [None if amax is None else amax.view(torch.int32)] * 2
    if amax is None:
        lengths = [
            0 if output is None else length for output, length in zip(wanted, x.shape, strict=True)
        ]
        *parts, ended = zeroed_workspace(sum(lengths) + 1, x.device).split([*lengths, 1])
        maxima = [part if len(part) else None for part in parts]
        launch(
            triton_transpose.maxima,
            programs,
            matrix,
            *maxima,
            ROWS=SQUARE,
            COLUMNS=SQUARE,
            warps=SQUARE_WARPS,
        )
    launch(
        triton_transpose.cast_both,
        programs,
        matrix,
        *map(_orientation, wanted, maxima),
        ended,
        PARTS=0,
        **sizes,
    )


def _cast_rows(x: Tensor, C: CastConstants, output: Output | None) -> None:
    """Cast with a scale for each row of x.

    A row that fits into the registers of a program is read once.
    """
    outer, inner = x.shape
    whole = inner <= LONGEST_ROW
    piece = max(1 << (inner - 1).bit_length(), 16) if whole else ROW_PIECE
    rows = max(LONGEST_ROW // (4 * piece), 1) if whole else 1
    launch(
        triton_transpose.cast_rows, -(-outer // rows), Matrix.of(x), _orientation(output), C=C, WHOLE_ROW=whole,
        ROWS=rows, COLUMNS=piece, warps=ROW_WARPS if piece * rows > 2048 else 4,
    )  # fmt: skip


def _cast_blocks(x: Tensor, C: CastConstants, wanted: Wanted, amax: Amax) -> None:
    """Cast with a scale for each block, and a shared float32 scale under two-level rules.

    amax  under two-level rules: slots whose maximum is the amax of the tensor
    """
    given = next(output for output in wanted if output is not None)
    maxima = None
    if C.two_level:
        maxima = _tensor_maxima(x) if amax is None else amax.view(torch.int32)
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
