"""Rotate and cast x.T, and cast x beside it, in blocks of a row from one read (`rotated`).

    y = x.T diag(signs) BlockDiag(H)        H of order ORDER = 2**k

A block of y are ORDER neighbouring rows of x in one column. The rows of all blocks of a piece are
loaded one after the other, each as a tensor of its own, [blocks, columns], and the butterflies add
and subtract these tensors: every sum is within a thread, in the order of `hadamard.definition`. The
order is that of a recursion, since the stage of distance N / 2 joins two halves of N rows.

    maxima_rotated  largest magnitudes of x and of y, for two-level scales
    cast_rotated    codes of x and of y

x is a `Matrix`, beside and turned are `Orientation`s of x and of y.
"""

import triton
import triton.language as tl

from narrowgauge.ops.quantize.triton_block import cast_block, shared_scale, store_block
from narrowgauge.ops.quantize.triton_transpose import (
    load_piece,
    place_of_piece,
    place_of_program,
)
from narrowgauge.ops.triton.elements import magnitude_bits


@triton.jit
def _butterflies(
    x, signs, start, column, FIRST: tl.constexpr, N: tl.constexpr
):  # fmt: skip
    """Return (rows FIRST ... FIRST + N - 1 of each block after log2 N stages, their largest bits).

    start   [B] int64, first rows of the blocks
    column  [C] int64
    ->      float32 [B, C, 2, ... 2], an axis for each stage; int32 [B, C], magnitudes of x
    """
    if N == 1:
        row = start + FIRST
        inside = row < x.rows
        place = row[:, None] * x.stride + column[None, :]
        loaded = tl.load(
            x.data + place, mask=inside[:, None] & (column < x.columns)[None, :], other=0.0
        )
        largest = magnitude_bits(loaded)
        values = loaded.to(tl.float32)
        if signs is not None:
            # Zeros of the padding have no sign of their own, see `hadamard.definition`.
            values = values * tl.load(signs + row, mask=inside, other=1.0)[:, None]
    else:
        low, of_low = _butterflies(x, signs, start, column, FIRST, N // 2)
        high, of_high = _butterflies(x, signs, start, column, FIRST + N // 2, N // 2)
        values = tl.join(low + high, low - high)
        largest = tl.maximum(of_low, of_high)
    return values, largest


@triton.jit
def _rotated_piece(
    x, signs, down, across, ORDER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Return (y [COLUMNS, ROWS] float32 of piece (down, across) of x, largest bits of x, int32).

    Beyond x it is zero.
    """
    BLOCKS: tl.constexpr = ROWS // ORDER
    start = (tl.arange(0, BLOCKS) + down * BLOCKS) * ORDER
    column = tl.arange(0, COLUMNS) + across * COLUMNS
    values, largest = _butterflies(x, signs, start, column, 0, ORDER)
    # The first stage has the lowest bit of an element's place in its block.
    # Triton 3.7 takes no constant for the axes.
    values = (
        tl.permute(values, (1, 0, 5, 4, 3, 2))
        if ORDER == 16
        else tl.permute(values, (1, 0, 6, 5, 4, 3, 2))
    )
    return tl.reshape(values, (COLUMNS, ROWS)) * (ORDER**-0.5), largest


@triton.jit
def maxima_rotated(
    x, signs, beside, turned,
    PARTS: tl.constexpr, ORDER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Entry point: largest magnitudes of x and of y. PARTS programs share the pieces.

    beside, turned  [PARTS] int32, receive the bits of the largest magnitude of each program; beside
                    may be None
    """
    program = tl.program_id(0)
    pieces = tl.cast(tl.cdiv(x.rows, ROWS) * tl.cdiv(x.columns, COLUMNS), tl.int32)
    of_x = tl.zeros((ROWS // ORDER, COLUMNS), tl.int32)
    of_y = tl.zeros((COLUMNS, ROWS // ORDER), tl.int32)
    for piece in range(program, pieces, PARTS):
        down, across = place_of_piece(piece, x.columns, COLUMNS)
        values, largest = _rotated_piece(x, signs, down, across, ORDER, ROWS, COLUMNS)
        bits = tl.reshape(magnitude_bits(values), (COLUMNS, ROWS // ORDER, ORDER))
        of_x, of_y = tl.maximum(of_x, largest), tl.maximum(of_y, tl.max(bits, axis=2))
    tl.store(turned + program, tl.max(tl.max(of_y, axis=1), axis=0))
    if beside is not None:
        tl.store(beside + program, tl.max(tl.max(of_x, axis=1), axis=0))


@triton.jit
def cast_rotated(
    x, signs, beside, turned, whole_beside, whole_turned,
    C: tl.constexpr, PARTS: tl.constexpr, ORDER: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Entry point: codes of y, and of x unless beside.codes is None, in tiles of 1 x TILE.

    beside.maxima, turned.maxima  [PARTS] int32 under two-level rules, else None
    whole_beside, whole_turned    [1] float32, the scales of the tensors under two-level rules
    """
    down, across = place_of_program(x.columns, COLUMNS)
    if beside.codes is not None:
        # Read in another layout than the rotated rows; the cache has the piece for those.
        values, row, column = load_piece(x, down, across, ROWS, COLUMNS)
        shared = shared_scale(beside.maxima, whole_beside, C, PARTS)
        found, scale = cast_block(
            values, shared, beside.key, row[:, None], column[None, :], x.columns, C, 1, TILE
        )
        store_block(found, scale, beside, down, across, x.rows, x.columns, C, 1, TILE)
    rotated, _ = _rotated_piece(x, signs, down, across, ORDER, ROWS, COLUMNS)
    length = tl.cdiv(x.rows, ORDER) * ORDER
    row, column = tl.arange(0, ROWS) + down * ROWS, tl.arange(0, COLUMNS) + across * COLUMNS
    shared = shared_scale(turned.maxima, whole_turned, C, PARTS)
    found, scale = cast_block(
        rotated, shared, turned.key, column[:, None], row[None, :], length, C, 1, TILE
    )
    store_block(found, scale, turned, across, down, x.columns, length, C, 1, TILE)
