"""Codes in both orientations from one read, where the scale is of the tensor, of a row, or of a column.

    maxima   the bits of the largest magnitude of each row and of each column of x, one read      (not for a scale per tensor)
    turn     casts with the scales of these, and writes the codes of x, of x.T, or of both
    turn_delayed, settle_both    the same by the tensor's scale of earlier steps, and its amax, from one read    (delayed scaling)
    settle_stepped               the window's state, the scale; and the cast itself only where another wrote the codes by another scale

A program takes ROWS x COLUMNS elements. The codes of x.T are transposed through shared memory, so both are written in long runs.
With one scale per tensor, rounded to nearest, the codes of x.T are those of x, and are computed once.
"""

import triton
import triton.language as tl

from narrowgauge.ops.quantize.triton_tensor import IN_USE, settled
from narrowgauge.ops.triton.elements import encode, magnitude_bits, pack
from narrowgauge.ops.triton.noise import uniform
from narrowgauge.ops.triton.scales import divided, divisor, scale_of


@triton.jit
def place_of_program(columns, COLUMNS: tl.constexpr):
    """(down, across) int64 of this program's piece; a grid of one axis, for a second one ends at 65,535."""
    program = tl.program_id(0).to(tl.int64)
    pieces = tl.cdiv(columns, COLUMNS)
    return program // pieces, program % pieces


@triton.jit
def maxima(
    x,
    of_rows,
    of_columns,
    rows,
    columns,
    stride,
    WANTS_ROWS: tl.constexpr,
    WANTS_COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """of_rows [rows] and of_columns [columns] int32, zero before."""
    down, across = place_of_program(columns, COLUMNS)
    row = down * ROWS + tl.arange(0, ROWS)
    column = across * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    bits = magnitude_bits(tl.load(x + row[:, None] * stride + column[None, :], mask=mask, other=0.0))
    if WANTS_ROWS:
        tl.atomic_max(of_rows + row, tl.max(bits, axis=1), mask=row < rows, sem="relaxed")
    if WANTS_COLUMNS:
        tl.atomic_max(of_columns + column, tl.max(bits, axis=0), mask=column < columns, sem="relaxed")


@triton.jit
def _coded(values, scale, key, first, second, length, C: tl.constexpr):
    """Codes of values; element (first, second) of a matrix whose rows have `length` elements has the noise of that place."""
    y = divided(values.to(tl.float32), divisor(scale, C), C)
    noise = uniform(key, first, length, second) if C.stochastic else y
    return encode(y, noise, C)


@triton.jit
def store_codes(found, codes, row, column, rows, columns, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """found [ROWS, COLUMNS] into codes [rows, columns] uint8, two to a byte where C.packed. row, column: int64."""
    inside = (row < rows)[:, None]
    if C.packed:
        found = tl.where(inside & (column < columns)[None, :], found, 0)  # an odd row ends in a nibble of zero
        width = (columns + 1) // 2
        byte = tl.min(tl.reshape(column // 2, (COLUMNS // 2, 2)), axis=1)
        place = row[:, None] * width + byte[None, :]
        tl.store(codes + place, pack(found, ROWS, COLUMNS), mask=inside & (byte < width)[None, :])
    else:
        place = row[:, None] * columns + column[None, :]
        tl.store(codes + place, found, mask=inside & (column < columns)[None, :])


@triton.jit
def turn(
    x,
    codes,
    turned,
    of_rows,
    of_columns,
    scales,
    turned_scales,
    key,
    turned_key,
    rows,
    columns,
    stride,
    C: tl.constexpr,
    PARTS: tl.constexpr,
    WANTS_CODES: tl.constexpr,
    WANTS_TURNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """codes of x [rows, columns] and of x.T [columns, rows]; scales [rows] and turned_scales [columns], or [1] each.

    PARTS  above zero: one scale, from the largest of of_rows [PARTS]; zero: one per row of x, and one per row of x.T
    """
    down, across = place_of_program(columns, COLUMNS)
    row = down * ROWS + tl.arange(0, ROWS)
    column = across * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    values = tl.load(x + row[:, None] * stride + column[None, :], mask=mask, other=0.0)
    SAME: tl.constexpr = PARTS > 0 and not C.stochastic
    if PARTS > 0:
        whole = scale_of(tl.max(tl.load(of_rows + tl.arange(0, PARTS)), axis=0), C)
        if tl.program_id(0) == 0:
            tl.store(scales, whole)
    if WANTS_CODES or SAME:
        if PARTS > 0:
            scale = whole
        else:
            by_row = scale_of(tl.load(of_rows + row, mask=row < rows, other=0), C)
            scale = by_row[:, None]
            if across == 0:
                tl.store(scales + row, by_row, mask=row < rows)
        found = _coded(values, scale, key, row[:, None], column[None, :], columns, C)
        if WANTS_CODES:
            store_codes(found, codes, row, column, rows, columns, C, ROWS, COLUMNS)
        if WANTS_TURNED and SAME:
            store_codes(tl.trans(found), turned, column, row, columns, rows, C, COLUMNS, ROWS)
    if WANTS_TURNED and not SAME:
        if PARTS > 0:
            scale = whole
        else:
            by_column = scale_of(tl.load(of_columns + column, mask=column < columns, other=0), C)
            scale = by_column[None, :]
            if down == 0:
                tl.store(turned_scales + column, by_column, mask=column < columns)
        found = _coded(values, scale, turned_key, column[None, :], row[:, None], rows, C)
        store_codes(tl.trans(found), turned, column, row, columns, rows, C, COLUMNS, ROWS)


@triton.jit
def _turn_both(
    values, codes, turned, scale, row, column, rows, columns, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Casts values [ROWS, COLUMNS] to nearest by one scale and stores both orientations."""
    found = _coded(values, scale, None, row, column, columns, C)
    store_codes(found, codes, row, column, rows, columns, C, ROWS, COLUMNS)
    store_codes(tl.trans(found), turned, column, row, columns, rows, C, COLUMNS, ROWS)


@triton.jit
def turn_delayed(
    x,
    codes,
    turned,
    maxima_out,
    live,
    rows,
    columns,
    stride,
    C: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Codes of x and of x.T by the scale of live[IN_USE], if that is above zero; maxima_out [PARTS] int32 of x, zero before."""
    down, across = place_of_program(columns, COLUMNS)
    row = down * ROWS + tl.arange(0, ROWS)
    column = across * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    values = tl.load(x + row[:, None] * stride + column[None, :], mask=mask, other=0.0)
    largest = tl.max(tl.max(magnitude_bits(values), axis=1), axis=0)
    tl.atomic_max(maxima_out + tl.program_id(0) % PARTS, largest, sem="relaxed")
    in_use = tl.load(live + IN_USE)
    if in_use > 0:
        scale = scale_of(in_use.to(tl.int32, bitcast=True), C)
        _turn_both(values, codes, turned, scale, row, column, rows, columns, C, ROWS, COLUMNS)


@triton.jit
def settle_both(
    x,
    codes,
    turned,
    maxima_in,
    live,
    amax_out,
    scale_out,
    rows,
    columns,
    stride,
    RECORDS: tl.constexpr,
    C: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """After turn_delayed what `flat.settle` does for one orientation; casts only where no earlier step gave a scale."""
    scale, in_use = settled(maxima_in, live, amax_out, scale_out, tl.program_id(0) == 0, RECORDS, C, PARTS)
    if in_use <= 0:
        down, across = place_of_program(columns, COLUMNS)
        row = down * ROWS + tl.arange(0, ROWS)
        column = across * COLUMNS + tl.arange(0, COLUMNS)
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        values = tl.load(x + row[:, None] * stride + column[None, :], mask=mask, other=0.0)
        _turn_both(values, codes, turned, scale, row, column, rows, columns, C, ROWS, COLUMNS)


@triton.jit
def settle_stepped(
    x,
    codes,
    turned,
    maxima_in,
    expected,
    live,
    amax_out,
    scale_out,
    rows,
    columns,
    RECORDS: tl.constexpr,
    C: tl.constexpr,
    PARTS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """As settle_both, of codes that were written when the window's amax was still to come, by the expected[0].

    If it is another now, or none, they are written anew. x [rows, columns], one row after the other.
    """
    scale, in_use = settled(maxima_in, live, amax_out, scale_out, tl.program_id(0) == 0, RECORDS, C, PARTS)
    serves = (in_use > 0) & (in_use == tl.load(expected))
    if not serves:
        down, across = place_of_program(columns, COLUMNS)
        row = down * ROWS + tl.arange(0, ROWS)
        column = across * COLUMNS + tl.arange(0, COLUMNS)
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        values = tl.load(x + row[:, None] * columns + column[None, :], mask=mask, other=0.0)
        _turn_both(values, codes, turned, scale, row, column, rows, columns, C, ROWS, COLUMNS)
