"""Launches of the kernels that quantize, on tensors that the caller has checked. The op's contract: `ops.quantize`.

Sizes of the pieces, none of them measured yet on a GPU:

    flat      4 warps, 4,096 elements: 16-bit input arrives in loads of 16 bytes, four per thread
    rows      a whole row of up to 8,192 elements in 8 warps: 32 registers of values per thread
    both      64 x 64 in 8 warps: the runs of x.T are 64 bytes; twice as wide, Triton 3.6 takes 228 registers, one program per processor
    blocks    a block of 128 in both directions and nothing more: 128 x 128 in 16 warps, 32 elements per thread
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from narrowgauge.ops.quantize import triton_block, triton_row, triton_tensor, triton_transpose
from narrowgauge.ops.triton.cast_constants import CastConstants
from narrowgauge.ops.triton.launch import AmaxState, Matrix, Orientation, launch
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
BOTH_ROWS, BOTH_COLUMNS, BOTH_WARPS = 64, 64, 8
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

    @classmethod
    def both(cls, x: Tensor, cast: Cast) -> tuple[Output, Output]:
        """Of x and of x.T."""
        outer, inner = x.shape
        return cls((outer, inner), cast, x.device), cls((inner, outer), cast, x.device)

    def finished(self) -> QTensor:
        shared = self.shared
        if shared is None and self.cast.has_global_scale:
            shared = self.scale.new_full((), self.cast.headroom)
        return QTensor(data=self.data, scale=self.scale, cast=self.cast, inner=self.inner, global_scale=shared)


def one(
    x: Tensor,
    cast: Cast,
    C: CastConstants,
    amax: Tensor | None = None,
    key: Tensor | None = None,
    expand: torch.dtype | None = None,
) -> QTensor:
    """x [outer, inner], not empty -> QTensor.

    amax  float32, contiguous in the shape of the scales, or None; not with blocks
    key   int64 [2] of the noise, on x's device
    """
    memory, is_transposed = in_memory_order(x)
    output = Output((x.shape[0], x.shape[1]), cast, x.device, expand)
    if is_transposed:
        _in_both(memory, C, None, output, amax, None, key)
    elif cast.tile == (WHOLE, WHOLE) and memory.is_contiguous() and not (C.packed and x.shape[1] % 2):
        _flat(memory, C, output, amax, key)
    elif cast.tile == (1, WHOLE) and amax is None:
        _rows(memory, C, output, key)
    else:
        _in_both(memory, C, output, None, amax, key, None)
    return output.finished()


def both(
    x: Tensor, cast: Cast, C: CastConstants, amax: Tensor | None, key: Tensor | None, transposed_key: Tensor | None
) -> tuple[QTensor, QTensor]:
    """x and x.T by the same cast. amax float32, a power of two of places whose largest it is, or None."""
    memory, is_transposed = in_memory_order(x)
    plain, transposed = Output.both(x, cast)
    if is_transposed:
        _in_both(memory, C, transposed, plain, amax, transposed_key, key)
    else:
        _in_both(memory, C, plain, transposed, amax, key, transposed_key)
    return plain.finished(), transposed.finished()


def delayed(
    x: Tensor, cast: Cast, C: CastConstants, live: Tensor, records: bool, key: Tensor | None
) -> tuple[QTensor, Tensor]:
    """x, contiguous and with even rows if codes are packed, by the scale of earlier steps; with the amax that was used [1, 1]."""
    output = Output((x.shape[0], x.shape[1]), cast, x.device)
    parts = _parts(x)
    state = amax_state(live, torch.empty(parts, dtype=torch.int32, device=x.device), output.scale)
    sizes: dict[str, Any] = {"C": C, "PARTS": parts, "BLOCK": FLAT_BLOCK, "warps": FLAT_WARPS}
    launch(triton_tensor.cast_delayed, parts, x, output.codes, state.maxima, live, key, x.numel(), **sizes)
    launch(triton_tensor.settle, parts, x, output.codes, state, key, x.numel(), RECORDS=records, **sizes)
    return output.finished(), state.amax


def both_delayed(
    x: Tensor, cast: Cast, C: CastConstants, live: Tensor, records: bool
) -> tuple[QTensor, QTensor, Tensor]:
    """x and x.T by the scale of earlier steps, with the amax that was used [1, 1]."""
    memory, is_transposed = in_memory_order(x)
    plain, transposed = Output.both(x, cast)
    first, second = (transposed, plain) if is_transposed else (plain, transposed)
    state = amax_state(live, torch.zeros(DELAYED_PARTS, dtype=torch.int32, device=x.device), plain.scale)
    given = (Matrix.of(memory), first.codes, second.codes, state)
    sizes = _both_sizes(C, DELAYED_PARTS)
    launch(triton_transpose.both_delayed, _pieces(memory), *given, **sizes)
    launch(triton_transpose.settle_both, _pieces(memory), *given, None, RECORDS=records, PROGRAMS=0, **sizes)
    transposed.scale = plain.scale
    return plain.finished(), transposed.finished(), state.amax


def stepped_delayed(
    x: Tensor,
    cast: Cast,
    C: CastConstants,
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
    state = amax_state(live, maxima, torch.empty(1, 1, dtype=torch.float32, device=x.device))
    launch(
        triton_transpose.settle_both, _pieces(x), Matrix.of(x), *(each.view(torch.uint8) for each in codes), state, expected,
        RECORDS=records, PROGRAMS=0, **_both_sizes(C, maxima.numel()),
    )  # fmt: skip
    plain = QTensor(data=codes[0], scale=state.scale, cast=cast, inner=x.shape[1])
    return plain, QTensor(data=codes[1], scale=state.scale, cast=cast, inner=x.shape[0]), state.amax


def amax_state(live: Tensor, maxima: Tensor, scale: Tensor) -> AmaxState:
    """With a place for the amax in use, [1, 1]."""
    return AmaxState(live, maxima, torch.empty(1, 1, dtype=torch.float32, device=live.device), scale)


def in_memory_order(x: Tensor) -> tuple[Tensor, bool]:
    """(x, False) if its rows lie in memory one element after the other; (x.T, True) if its columns do; else a copy of x."""
    if x.stride(1) == 1 or x.shape[1] == 1:
        return x, False
    if x.stride(0) == 1 or x.shape[0] == 1:
        return x.T, True
    return x.contiguous(), False


def _orientation(output: Output | None, maxima: Tensor | None, key: Tensor | None) -> Orientation:
    return Orientation() if output is None else Orientation(output.codes, output.scale, maxima, key)


def _pieces(x: Tensor) -> int:
    return -(-x.shape[0] // BOTH_ROWS) * -(-x.shape[1] // BOTH_COLUMNS)


def _both_sizes(C: CastConstants, parts: int) -> dict[str, Any]:
    return {"C": C, "PARTS": parts, "ROWS": BOTH_ROWS, "COLUMNS": BOTH_COLUMNS, "warps": BOTH_WARPS}


def _flat(x: Tensor, C: CastConstants, output: Output, amax: Tensor | None, key: Tensor | None) -> None:
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


def _rows(x: Tensor, C: CastConstants, output: Output, key: Tensor | None) -> None:
    outer, inner = x.shape
    whole = inner <= LONGEST_BLOCK
    block = max(_power_of_two(inner), 16) if whole else ROW_BLOCK
    lines = max(LONGEST_BLOCK // (4 * block), 1) if whole else 1
    launch(
        triton_row.cast_rows, -(-outer // lines), Matrix.of(x), _orientation(output, None, key), C=C,
        WHOLE_ROW=whole, ROWS=lines, BLOCK=block, warps=ROW_WARPS if block * lines > 2048 else 4,
    )  # fmt: skip


def _in_both(
    x: Tensor,
    C: CastConstants,
    plain: Output | None,
    transposed: Output | None,
    amax: Tensor | None,
    key: Tensor | None,
    transposed_key: Tensor | None,
) -> None:
    """x with its rows in memory -> the outputs that are not None."""
    output = plain or transposed
    assert output is not None
    tile = output.cast.tile
    if WHOLE not in tile:
        maxima = _tensor_maxima(x) if C.two_level else None
        outputs = _orientation(plain, None, key)._replace(maxima=maxima), _orientation(transposed, None, transposed_key)
        _blocks(x, C, tile, *outputs, output.shared)
        if transposed is not None:
            transposed.shared = output.shared
        return
    parts = 0
    if tile == (WHOLE, WHOLE):
        whole = _tensor_maxima(x) if amax is None else amax.view(torch.int32)
        parts = whole.numel()
        first = _orientation(plain, None, key)._replace(scales=output.scale, maxima=whole)
        second = _orientation(transposed, None, transposed_key)
    else:
        of_rows, of_columns = _line_maxima(x, amax, plain is not None, transposed is not None)
        first, second = _orientation(plain, of_rows, key), _orientation(transposed, of_columns, transposed_key)
    launch(triton_transpose.cast_both, _pieces(x), Matrix.of(x), first, second, **_both_sizes(C, parts))
    if parts and transposed is not None:
        transposed.scale = output.scale


def _blocks(
    x: Tensor,
    C: CastConstants,
    tile: tuple[int, int],
    plain: Orientation,
    transposed: Orientation,
    shared: Tensor | None,
) -> None:
    side, warps = (SIDE, SIDE_WARPS) if max(tile) > SMALL_SIDE else (SMALL_SIDE, SMALL_SIDE_WARPS)
    launch(
        triton_block.cast_blocks, -(-x.shape[0] // side) * -(-x.shape[1] // side), Matrix.of(x), plain, transposed, shared, C=C,
        PARTS=0 if plain.maxima is None else plain.maxima.numel(), A=tile[0], B=tile[1], ROWS=side, COLUMNS=side, warps=warps,
    )  # fmt: skip


def _line_maxima(
    x: Tensor, amax: Tensor | None, of_rows: bool, of_columns: bool
) -> tuple[Tensor | None, Tensor | None]:
    """int32 [rows] and [columns], of which only what is asked for; a given amax serves the one that is."""
    if amax is not None:
        bits = amax.view(torch.int32)
        return (bits, None) if of_rows else (None, bits)
    found = [
        torch.zeros(length, dtype=torch.int32, device=x.device) if wanted else None
        for length, wanted in zip(x.shape, (of_rows, of_columns), strict=True)
    ]
    launch(
        triton_transpose.maxima, _pieces(x), Matrix.of(x), *found, ROWS=BOTH_ROWS, COLUMNS=BOTH_COLUMNS, warps=BOTH_WARPS
    )  # fmt: skip
    return found[0], found[1]


def _power_of_two(length: int) -> int:
    return 1 << (length - 1).bit_length()
