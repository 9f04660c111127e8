"""Codes in both orientations from one read, where the scale is of the tensor, of a row, or of a column.

    maxima        the bits of the largest magnitude of each row and of each column of x, one read     (not for a scale per tensor)
    cast_both     casts with the scales of these, and writes the codes of x, of x.T, or of both
    both_delayed  the same by the tensor's scale of earlier steps, and its amax, from one read        (delayed scaling)
    settle_both   the window's state, the scale; and the cast itself only where there was none, or one by another scale

A program takes ROWS x COLUMNS elements. The codes of x.T are transposed through shared memory, so both are written in long runs.
With one scale per tensor, rounded to nearest, the codes of x.T are those of x, and are computed once.

x: a `Matrix`; plain, transposed: `Orientation`s; C: `CastConstants`.
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
def load_piece(x, down, across, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(values [ROWS, COLUMNS], zero outside of x, row [ROWS], column [COLUMNS]); the places int64."""
    row = down * ROWS + tl.arange(0, ROWS)
    column = across * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < x.rows)[:, None] & (column < x.columns)[None, :]
    return tl.load(x.data + row[:, None] * x.stride + column[None, :], mask=mask, other=0.0), row, column


@triton.jit
def maxima(x, of_rows, of_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """of_rows [rows] and of_columns [columns] int32, zero before; None: not wanted."""
    down, across = place_of_program(x.columns, COLUMNS)
    values, row, column = load_piece(x, down, across, ROWS, COLUMNS)
    bits = magnitude_bits(values)
    if of_rows is not None:
        tl.atomic_max(of_rows + row, tl.max(bits, axis=1), mask=row < x.rows, sem="relaxed")
    if of_columns is not None:
        tl.atomic_max(of_columns + column, tl.max(bits, axis=0), mask=column < x.columns, sem="relaxed")


@triton.jit
def _encoded(values, scale, key, first, second, length, C: tl.constexpr):
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
def _line_scale(of, place, length, writes, C: tl.constexpr):
    """The scale of each line from `of`.maxima; written by those of its programs that `writes`."""
    scale = scale_of(tl.load(of.maxima + place, mask=place < length, other=0), C)
    if writes:
        tl.store(of.scales + place, scale, mask=place < length)
    return scale


@triton.jit
def cast_both(
    x, plain, transposed, C: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    """Codes of x [rows, columns] and of x.T [columns, rows]; scales [rows] of the one and [columns] of the other, or [1].

    PARTS  above zero: one scale, from the largest of plain.maxima [PARTS], in plain.scales; zero: one per row of each
    """
    down, across = place_of_program(x.columns, COLUMNS)
    values, row, column = load_piece(x, down, across, ROWS, COLUMNS)
    SAME: tl.constexpr = PARTS > 0 and not C.stochastic
    if PARTS > 0:
        whole = scale_of(tl.max(tl.load(plain.maxima + tl.arange(0, PARTS)), axis=0), C)
        if tl.program_id(0) == 0:
            tl.store(plain.scales, whole)
    if plain.codes is not None or SAME:
        scale = whole if PARTS > 0 else _line_scale(plain, row, x.rows, across == 0, C)[:, None]
        found = _encoded(values, scale, plain.key, row[:, None], column[None, :], x.columns, C)
        if plain.codes is not None:
            store_codes(found, plain.codes, row, column, x.rows, x.columns, C, ROWS, COLUMNS)
        if transposed.codes is not None and SAME:
            store_codes(tl.trans(found), transposed.codes, column, row, x.columns, x.rows, C, COLUMNS, ROWS)
    if transposed.codes is not None and not SAME:
        scale = whole if PARTS > 0 else _line_scale(transposed, column, x.columns, down == 0, C)[None, :]
        found = _encoded(values, scale, transposed.key, column[None, :], row[:, None], x.rows, C)
        store_codes(tl.trans(found), transposed.codes, column, row, x.columns, x.rows, C, COLUMNS, ROWS)


@triton.jit
def store_both(
    values, scale, x, codes, transposed, row, column, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Casts values [ROWS, COLUMNS] to nearest by one scale and stores both orientations, or the one that is wanted."""
    found = _encoded(values, scale, None, row, column, x.columns, C)
    store_codes(found, codes, row, column, x.rows, x.columns, C, ROWS, COLUMNS)
    if transposed is not None:
        store_codes(tl.trans(found), transposed, column, row, x.columns, x.rows, C, COLUMNS, ROWS)


@triton.jit
def both_delayed(
    x, codes, transposed, state, C: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Codes of x and of x.T by the scale of state.live[IN_USE], if that is above zero; state.maxima, zero before."""
    down, across = place_of_program(x.columns, COLUMNS)
    values, row, column = load_piece(x, down, across, ROWS, COLUMNS)
    largest = tl.max(tl.max(magnitude_bits(values), axis=1), axis=0)
    tl.atomic_max(state.maxima + tl.program_id(0) % PARTS, largest, sem="relaxed")
    in_use = tl.load(state.live + IN_USE)
    if in_use > 0:
        scale = scale_of(in_use.to(tl.int32, bitcast=True), C)
        store_both(values, scale, x, codes, transposed, row, column, C, ROWS, COLUMNS)


@triton.jit
def settle_both(
    x, codes, transposed, state, expected,
    RECORDS: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr, PROGRAMS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """After both_delayed, or whatever else left state.maxima: what `triton_tensor.settle` does for one orientation.

    Casts only where no earlier step gave a scale, or, of codes that were written by expected[0] while the window's amax was still
    to come, where it is another now. PROGRAMS share the pieces; 0: there is a program for each, which takes fewer registers.
    """
    program = tl.program_id(0)
    scale, in_use = settled(state, program == 0, RECORDS, C, PARTS)
    serves = in_use > 0
    if expected is not None:
        serves = serves & (in_use == tl.load(expected))
    if not serves:
        if PROGRAMS == 0:
            down, across = place_of_program(x.columns, COLUMNS)
            values, row, column = load_piece(x, down, across, ROWS, COLUMNS)
            store_both(values, scale, x, codes, transposed, row, column, C, ROWS, COLUMNS)
        else:
            width = tl.cdiv(x.columns, COLUMNS)
            for piece in range(program.to(tl.int64), tl.cdiv(x.rows, ROWS) * width, PROGRAMS):
                values, row, column = load_piece(x, piece // width, piece % width, ROWS, COLUMNS)
                store_both(values, scale, x, codes, transposed, row, column, C, ROWS, COLUMNS)
