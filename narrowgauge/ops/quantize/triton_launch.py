"""Launches of the kernels that quantize, on tensors that the caller has checked. The op's contract: `ops.quantize`.

Sizes of the pieces, none of them measured yet on a GPU:

    flat      4 warps, 4,096 elements: 16-bit input arrives in loads of 16 bytes, four per thread
    rows      a whole row of up to 8,192 elements in 8 warps: 32 registers of values per thread
    turning   64 x 64 in 8 warps: the runs of x.T are 64 bytes; twice as wide, Triton 3.6 takes 228 registers, one program per processor
    blocks    a block of 128 in both directions and nothing more: 128 x 128 in 16 warps, 32 elements per thread
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from narrowgauge.ops.quantize import triton_block, triton_row, triton_tensor, triton_transpose
from narrowgauge.ops.triton.cast_constants import Settings
from narrowgauge.ops.triton.launch import launch
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast
from narrowgauge.scaling import WHOLE, scale_shape

FLAT_BLOCK, FLAT_WARPS = 4096, 4
PARTS = (
    1,
    32,
    512,
)  # programs that look for a maximum; 512 of 4 warps hold 64 KB in flight per multiprocessor of an H200
DELAYED_PARTS = 64  # places that programs share for the maximum: few enough to read, enough not to queue
LONGEST_BLOCK, ROW_BLOCK, ROW_WARPS = 8192, 4096, 8
TURN_ROWS, TURN_COLUMNS, TURN_WARPS = 64, 64, 8
SIDE, SIDE_WARPS = 128, 16
SMALL_SIDE, SMALL_SIDE_WARPS = 64, 8


class Output:
    """Codes, or values of dtype `expand`, and scales of one orientation, [outer, inner], to be filled by a kernel."""

    def __init__(
        self, shape: tuple[int, int], cast: Cast, device: torch.device, expand: torch.dtype | None = None
    ) -> None:
        format = cast.format
        per_byte = 1 if expand is not None else format.codes_per_byte
        dtype = expand or (torch.uint8 if per_byte > 1 else format.storage)
        self.cast, self.inner = cast, shape[1]
        self.data = torch.empty(shape[0], -(-shape[1] // per_byte), dtype=dtype, device=device)
        self.scale = torch.empty(scale_shape(shape, cast.tile), dtype=torch.float32, device=device)
        self.codes = self.data if expand is not None else self.data.view(torch.uint8)
        self.shared = self.scale.new_empty(()) if cast.scale.two_level else None

    def finished(self) -> QTensor:
        shared = self.shared
        if shared is None and self.cast.has_global_scale:
            shared = self.scale.new_full((), self.cast.headroom)
        return QTensor(data=self.data, scale=self.scale, cast=self.cast, inner=self.inner, global_scale=shared)


def one(
    x: Tensor,
    cast: Cast,
    C: Settings,
    amax: Tensor | None = None,
    key: Tensor | None = None,
    expand: torch.dtype | None = None,
) -> QTensor:
    """x [outer, inner], not empty -> QTensor.

    amax  float32, contiguous in the shape of the scales, or None; not with blocks
    key   int64 [2] of the noise, on x's device
    """
    memory, is_turned = in_memory_order(x)
    output = Output((x.shape[0], x.shape[1]), cast, x.device, expand)
    if is_turned:
        _in_both(memory, C, None, output, amax, None, key)
    elif cast.tile == (WHOLE, WHOLE) and memory.is_contiguous() and not (C.packed and x.shape[1] % 2):
        _flat(memory, C, output, amax, key)
    elif cast.tile == (1, WHOLE) and amax is None:
        _rows(memory, C, output, key)
    else:
        _in_both(memory, C, output, None, amax, key, None)
    return output.finished()


def both(
    x: Tensor, cast: Cast, C: Settings, amax: Tensor | None, key: Tensor | None, turned_key: Tensor | None
) -> tuple[QTensor, QTensor]:
    """x and x.T by the same cast. amax float32, a power of two of places whose largest it is, or None."""
    memory, is_turned = in_memory_order(x)
    plain = Output((x.shape[0], x.shape[1]), cast, x.device)
    turned = Output((x.shape[1], x.shape[0]), cast, x.device)
    if is_turned:
        _in_both(memory, C, turned, plain, amax, turned_key, key)
    else:
        _in_both(memory, C, plain, turned, amax, key, turned_key)
    return plain.finished(), turned.finished()


def delayed(
    x: Tensor, cast: Cast, C: Settings, live: Tensor, records: bool, key: Tensor | None
) -> tuple[QTensor, Tensor]:
    """x, contiguous and with even rows if codes are packed, by the scale of earlier steps; with the amax that was used [1, 1]."""
    output = Output((x.shape[0], x.shape[1]), cast, x.device)
    parts = _parts(x)
    maxima = torch.empty(parts, dtype=torch.int32, device=x.device)
    used = torch.empty(1, 1, dtype=torch.float32, device=x.device)
    sizes: dict[str, Any] = {"C": C, "PARTS": parts, "BLOCK": FLAT_BLOCK, "warps": FLAT_WARPS}
    launch(triton_tensor.cast_delayed, parts, x, output.codes, maxima, live, key, x.numel(), **sizes)
    launch(
        triton_tensor.settle,
        parts,
        x,
        output.codes,
        maxima,
        live,
        used,
        output.scale,
        key,
        x.numel(),
        RECORDS=records,
        **sizes,
    )
    return output.finished(), used


def both_delayed(x: Tensor, cast: Cast, C: Settings, live: Tensor, records: bool) -> tuple[QTensor, QTensor, Tensor]:
    """x and x.T by the scale of earlier steps, with the amax that was used [1, 1]."""
    memory, is_turned = in_memory_order(x)
    plain = Output((x.shape[0], x.shape[1]), cast, x.device)
    turned = Output((x.shape[1], x.shape[0]), cast, x.device)
    first, second = (turned, plain) if is_turned else (plain, turned)
    maxima = torch.zeros(DELAYED_PARTS, dtype=torch.int32, device=x.device)
    used = torch.empty(1, 1, dtype=torch.float32, device=x.device)
    outer, inner = memory.shape
    programs = -(-outer // TURN_ROWS) * -(-inner // TURN_COLUMNS)
    shape = (outer, inner, memory.stride(0))
    sizes: dict[str, Any] = {
        "C": C, "PARTS": DELAYED_PARTS, "ROWS": TURN_ROWS, "COLUMNS": TURN_COLUMNS, "warps": TURN_WARPS,
    }  # fmt: skip
    launch(triton_transpose.turn_delayed, programs, memory, first.codes, second.codes, maxima, live, *shape, **sizes)
    launch(
        triton_transpose.settle_both, programs, memory, first.codes, second.codes, maxima, live, used, plain.scale, *shape,
        RECORDS=records, **sizes,
    )  # fmt: skip
    turned.scale = plain.scale
    return plain.finished(), turned.finished(), used


def stepped_delayed(
    x: Tensor,
    cast: Cast,
    C: Settings,
    codes: tuple[Tensor, Tensor],
    maxima: Tensor,
    expected: Tensor,
    live: Tensor,
    records: bool,
) -> tuple[QTensor, QTensor, Tensor]:
    """x, contiguous, and x.T from the codes that its optimizer step wrote, with the amax that was used [1, 1].

    codes     of x and of x.T, in the type in which the format stores them; written anew where `expected` was wrong
    maxima    int32 [PARTS], whose largest is x's amax; expected [1] float32
    """
    scale = torch.empty(1, 1, dtype=torch.float32, device=x.device)
    used = torch.empty_like(scale)
    outer, inner = x.shape
    programs = -(-outer // TURN_ROWS) * -(-inner // TURN_COLUMNS)
    launch(
        triton_transpose.settle_stepped, programs, x, *(each.view(torch.uint8) for each in codes), maxima, expected, live, used, scale,
        outer, inner, RECORDS=records, C=C, PARTS=maxima.numel(), ROWS=TURN_ROWS, COLUMNS=TURN_COLUMNS, warps=TURN_WARPS,
    )  # fmt: skip
    plain = QTensor(data=codes[0], scale=scale, cast=cast, inner=inner)
    return plain, QTensor(data=codes[1], scale=scale, cast=cast, inner=outer), used


def in_memory_order(x: Tensor) -> tuple[Tensor, bool]:
    """(x, False) if its rows lie in memory one element after the other; (x.T, True) if its columns do; else a copy of x."""
    if x.stride(1) == 1 or x.shape[1] == 1:
        return x, False
    if x.stride(0) == 1 or x.shape[0] == 1:
        return x.T, True
    return x.contiguous(), False


def _flat(x: Tensor, C: Settings, output: Output, amax: Tensor | None, key: Tensor | None) -> None:
    maxima = _tensor_maxima(x) if amax is None else amax.view(torch.int32)
    launch(
        triton_tensor.cast, -(-x.numel() // FLAT_BLOCK), x, output.codes, maxima, output.scale, key, x.numel(), C=C,
        PARTS=maxima.numel(), BLOCK=FLAT_BLOCK, warps=FLAT_WARPS,
    )  # fmt: skip


def _tensor_maxima(x: Tensor) -> Tensor:
    """[PARTS] int32 of a tensor in any dense order."""
    x = x if x.is_contiguous() else x.contiguous()
    parts = _parts(x)
    maxima = torch.empty(parts, dtype=torch.int32, device=x.device)
    launch(triton_tensor.amax, parts, x, maxima, x.numel(), PARTS=parts, BLOCK=FLAT_BLOCK, warps=FLAT_WARPS)
    return maxima


def _parts(x: Tensor) -> int:
    pieces = -(-x.numel() // FLAT_BLOCK)
    return next((parts for parts in PARTS if parts >= pieces), PARTS[-1])


def _rows(x: Tensor, C: Settings, output: Output, key: Tensor | None) -> None:
    outer, inner = x.shape
    whole = inner <= LONGEST_BLOCK
    block = max(_power_of_two(inner), 16) if whole else ROW_BLOCK
    lines = max(LONGEST_BLOCK // (4 * block), 1) if whole else 1
    launch(
        triton_row.cast_rows, -(-outer // lines), x, output.codes, output.scale, key, outer, inner, x.stride(0), C=C,
        WHOLE_ROW=whole, ROWS=lines, BLOCK=block, warps=ROW_WARPS if block * lines > 2048 else 4,
    )  # fmt: skip


def _in_both(
    x: Tensor,
    C: Settings,
    plain: Output | None,
    turned: Output | None,
    amax: Tensor | None,
    key: Tensor | None,
    turned_key: Tensor | None,
) -> None:
    """x with its rows in memory -> the outputs that are not None."""
    output = plain or turned
    assert output is not None
    tile = output.cast.tile
    tensors = (plain and plain.codes, turned and turned.codes)
    scales = (plain and plain.scale, turned and turned.scale)
    wants = {"WANTS_CODES": plain is not None, "WANTS_TURNED": turned is not None}
    outer, inner = x.shape
    sizes = (outer, inner, x.stride(0))
    if WHOLE not in tile:
        side, warps = (SIDE, SIDE_WARPS) if max(tile) > SMALL_SIDE else (SMALL_SIDE, SMALL_SIDE_WARPS)
        programs = -(-outer // side) * -(-inner // side)
        maxima = _tensor_maxima(x) if C.two_level else None
        launch(
            triton_block.cast_blocks, programs, x, *tensors, *scales, maxima, output.shared, key, turned_key, *sizes, C=C,
            PARTS=0 if maxima is None else maxima.numel(), A=tile[0], B=tile[1], **wants, ROWS=side, COLUMNS=side, warps=warps,
        )  # fmt: skip
        if plain is not None and turned is not None:
            turned.shared = plain.shared
        return
    programs = -(-outer // TURN_ROWS) * -(-inner // TURN_COLUMNS)
    of_rows: Tensor | None
    of_columns: Tensor | None
    if tile == (WHOLE, WHOLE):
        whole = _tensor_maxima(x) if amax is None else amax.view(torch.int32)
        of_rows, of_columns, parts = whole, None, whole.numel()
        scales = (output.scale, None)
    else:
        of_rows, of_columns = _line_maxima(x, amax, plain is not None, turned is not None, programs)
        parts = 0
    launch(
        triton_transpose.turn, programs, x, *tensors, of_rows, of_columns, *scales, key, turned_key, *sizes, C=C, PARTS=parts, **wants,
        ROWS=TURN_ROWS, COLUMNS=TURN_COLUMNS, warps=TURN_WARPS,
    )  # fmt: skip
    if parts and plain is not None and turned is not None:
        turned.scale = plain.scale


def _line_maxima(
    x: Tensor, amax: Tensor | None, of_rows: bool, of_columns: bool, programs: int
) -> tuple[Tensor | None, Tensor | None]:
    """int32 [rows] and [columns], of which only what is asked for; a given amax serves the one that is."""
    if amax is not None:
        bits = amax.view(torch.int32)
        return (bits, None) if of_rows else (None, bits)
    rows_out = torch.zeros(x.shape[0], dtype=torch.int32, device=x.device) if of_rows else None
    columns_out = torch.zeros(x.shape[1], dtype=torch.int32, device=x.device) if of_columns else None
    launch(
        triton_transpose.maxima, programs, x, rows_out, columns_out, *x.shape, x.stride(0), WANTS_ROWS=of_rows,
        WANTS_COLUMNS=of_columns, ROWS=TURN_ROWS, COLUMNS=TURN_COLUMNS, warps=TURN_WARPS,
    )  # fmt: skip
    return rows_out, columns_out


def _power_of_two(length: int) -> int:
    return 1 << (length - 1).bit_length()
