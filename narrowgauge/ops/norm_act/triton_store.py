"""What the kernels of `ops.norm_act` do with a piece of y once it is computed: round it, store it, and store its codes.

A program takes ROWS rows and COLUMNS columns at a time. How a scale is found (`Casting.scaling`):

    NOTHING    no cast; the largest magnitude only, where a place for maxima is given
    DELAYED    one scale, of earlier steps; `settle_both` follows
    BY_ROW     a pass over the row for its largest magnitude, ahead of the one that casts
    BY_BLOCK   of each piece of `block` columns; of y alone, since pieces of y.T too were tried and spilled

The codes of y.T are transposed through shared memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import triton
import triton.language as tl

from narrowgauge.ops.quantize.triton_block import cast_block, store_block
from narrowgauge.ops.quantize.triton_transpose import IN_USE, store_codes
from narrowgauge.ops.triton.cast_constants import CastConstants
from narrowgauge.ops.triton.elements import encode, magnitude_bits
from narrowgauge.ops.triton.scales import divided, divisor, scale_of

NOTHING = tl.constexpr(0)
DELAYED = tl.constexpr(1)
BY_ROW = tl.constexpr(2)
BY_BLOCK = tl.constexpr(3)


@dataclass(frozen=True)
class Casting:
    """One constant of a kernel: how a result is cast, and in pieces of what size. parts: places for maxima."""

    C: CastConstants | None
    scaling: int
    block: int
    rows: int
    columns: int
    parts: int


class Result(NamedTuple):
    """What is written: y [rows, columns], codes of y and of y.T, scales, maxima [parts] int32, zero before; and a window's live [3]."""

    y: Any
    codes: Any = None
    transposed: Any = None
    scales: Any = None
    maxima: Any = None
    live: Any = None


class Piece(NamedTuple):
    """Where a program is in y [rows, columns].

    down, across   number of the piece, from above and from the left
    start, place   int64 of its first element; int32 [ROWS, COLUMNS] from there: 64 bits for every element would fill the registers
    row, column    int64 [ROWS], [COLUMNS]
    inside, mask   [COLUMNS], [ROWS, COLUMNS]
    """

    rows: Any
    columns: Any
    down: Any
    across: Any
    start: Any
    place: Any
    row: Any
    column: Any
    inside: Any
    mask: Any


@triton.jit
def piece_at(rows, columns, down, first, H: tl.constexpr):
    """The piece in line `down` whose first column is `first`."""
    ROWS: tl.constexpr = H.rows
    COLUMNS: tl.constexpr = H.columns
    row = down * ROWS + tl.arange(0, ROWS)
    column = first + tl.arange(0, COLUMNS).to(tl.int64)
    place = tl.arange(0, ROWS)[:, None] * columns + tl.arange(0, COLUMNS)[None, :]
    inside = column < columns
    mask = (row < rows)[:, None] & inside[None, :]
    start = down * ROWS * columns + first
    return Piece(rows, columns, down, first // COLUMNS, start, place, row, column, inside, mask)


@triton.jit
def piece_of_program(rows, columns, H: tl.constexpr):
    """The one that is this program's, where each has one."""
    COLUMNS: tl.constexpr = H.columns
    program = tl.program_id(0).to(tl.int64)
    width = tl.cdiv(columns, COLUMNS)
    return piece_at(rows, columns, program // width, (program % width) * COLUMNS, H)


@triton.jit
def _rounded(values, y, mask):
    """As y keeps them, zero outside, in its type: 16 bits take half the registers until they are cast."""
    return tl.where(mask, values, 0.0).to(y.dtype.element_ty)


@triton.jit
def _known_scale(out, H: tl.constexpr):
    """[1, 1] of earlier steps; 1 where the scale is found later or not at all."""
    C: tl.constexpr = H.C
    scale = tl.full((1, 1), 1.0, tl.float32)
    if H.scaling == DELAYED:
        scale = scale_of(tl.load(out.live + IN_USE + tl.zeros((1, 1), tl.int32)).to(tl.int32, bitcast=True), C)
    return scale


@triton.jit
def _store(values, scale, out, at, H: tl.constexpr):
    """Stores the values of the `Piece` at, rounded already, and their codes by `scale`, or by their own (BY_BLOCK)."""
    C: tl.constexpr = H.C
    tl.store(out.y + at.start + at.place, values, mask=at.mask)
    if H.scaling == DELAYED or H.scaling == BY_ROW:
        wide = values.to(tl.float32)
        found = encode(divided(wide, divisor(scale, C), C), wide, C)
        store_codes(found, out.codes, at.down, at.across, at.rows, at.columns, C)
        if out.transposed is not None:
            store_codes(tl.trans(found), out.transposed, at.across, at.down, at.columns, at.rows, C)
    if H.scaling == BY_BLOCK:
        BLOCK: tl.constexpr = H.block
        found, scales = cast_block(values, None, None, at.row[:, None], at.column[None, :], at.columns, C, 1, BLOCK)
        across = tl.cast(at.across, tl.int32)  # in 64 bits it takes registers, and pieces are few across
        store_block(found, scales, out, at.down, across, at.rows, at.columns, C, 1, BLOCK)


@triton.jit
def _store_maximum(greatest, out, H: tl.constexpr):
    """The largest of greatest [ROWS, COLUMNS] int32, which programs share places for."""
    tl.atomic_max(out.maxima + tl.program_id(0) % H.parts, tl.max(tl.max(greatest, axis=1), axis=0), sem="relaxed")


@triton.jit
def store_piece(values, out, at, H: tl.constexpr):
    """Values float32 [ROWS, COLUMNS] of the `Piece` at, rounded, with their cast."""
    values = _rounded(values, out.y, at.mask)
    if out.maxima is not None:
        _store_maximum(magnitude_bits(values), out, H)
    _store(values, _known_scale(out, H), out, at, H)


@triton.jit
def store_rows(VALUE: tl.constexpr, inputs, out, rows, columns, H: tl.constexpr):
    """VALUE(inputs, piece), float32, of all pieces of the rows that are this program's, rounded, with their cast."""
    ROWS: tl.constexpr = H.rows
    COLUMNS: tl.constexpr = H.columns
    C: tl.constexpr = H.C
    down = tl.program_id(0).to(tl.int64)
    scale = _known_scale(out, H)
    if H.scaling == BY_ROW:
        largest = tl.zeros((ROWS, COLUMNS), tl.int32)
        for first in range(0, columns, COLUMNS):
            at = piece_at(rows, columns, down, first, H)
            largest = tl.maximum(largest, magnitude_bits(_rounded(VALUE(inputs, at), out.y, at.mask)))
        row = down * ROWS + tl.arange(0, ROWS)
        of_rows = scale_of(tl.max(largest, axis=1), C)
        tl.store(out.scales + row, of_rows, mask=row < rows)
        scale = of_rows[:, None]
    greatest = tl.zeros((ROWS, COLUMNS), tl.int32)
    for first in range(0, tl.cast(columns, tl.int64), COLUMNS):
        at = piece_at(rows, columns, down, first, H)
        values = _rounded(VALUE(inputs, at), out.y, at.mask)
        if out.maxima is not None:
            greatest = tl.maximum(greatest, magnitude_bits(values))
        _store(values, scale, out, at, H)
    if out.maxima is not None:
        _store_maximum(greatest, out, H)
