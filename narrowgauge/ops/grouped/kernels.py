"""Triton kernels of `launches.py`: casts and products of rows sorted by expert.

The number of rows of each expert is in device memory, so no program can know its place from its
number alone. Each one reads the E numbers and finds the tile of TILE rows that is its own
(`place_of_tile`). The grid has a place for every tile that could exist; programs without a tile end
at once.

    group_maxima   the largest magnitude of each row, and of each column of each expert
    cast_groups    codes of x and of x.T, with a scale for 1 x TILE or 1 x 32 elements along either axis,
                   or for a row and for a column of an expert. No tile of x.T holds tokens of two experts
    grouped_mm     the product of each expert's rows with its matrix
    grouped_grad   the product of two operands over the tokens of each expert
    sum_groups     the sum of each expert's rows
    clear_rest     zeros in rows without an expert, where torch's product leaves them

The codes of x.T of tile t begin at column t * TILE, so each tile is aligned. Rows beyond an expert's
last one are zero codes there.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from narrowgauge.ops.mm.triton_blocks import place_of_program, sum_of_blocks
from narrowgauge.ops.quantize.triton_block import cast_block, unit_codes
from narrowgauge.ops.triton.elements import encode, magnitude_bits
from narrowgauge.ops.triton.scales import reciprocal_of, scale_of


@triton.jit
def _counts(counts, G: tl.constexpr):
    """Return (index, rows of each expert, tiles of each expert), each int32 [G.wide].

    counts has G.experts + 1 numbers; the last one counts rows without an expert.
    """
    index = tl.arange(0, G.wide)
    rows = tl.load(counts + index, index <= G.experts, other=0)
    return index, rows, (rows + (G.tile - 1)) // G.tile


@triton.jit
def place_of_tile(counts, tile, G: tl.constexpr):
    """Return (expert, its tiles, number of this one within it, its first row here, rows of the tile).

    The expert is G.experts for rows without one. There are no rows if the tile does not exist.
    """
    index, rows, tiles = _counts(counts, G)
    expert = tl.sum((tl.cumsum(tiles, axis=0) <= tile).to(tl.int32), axis=0)
    is_before = index < expert
    begin = tl.sum(tl.where(is_before, rows, 0), axis=0)
    within = tile - tl.sum(tl.where(is_before, tiles, 0), axis=0)
    own = tl.sum(tl.where(index == expert, rows, 0), axis=0)
    its_tiles = tl.sum(tl.where(index == expert, tiles, 0), axis=0)
    count = max(min(own - within * G.tile, G.tile), 0)
    return expert, its_tiles, within, begin + within * G.tile, count


@triton.jit
def _load(x, first, count, across, TILE: tl.constexpr):
    """Return (values [TILE, TILE], zero outside; row, column, and whether each is inside)."""
    place = tl.arange(0, TILE)
    row, column = (first + place).to(tl.int64), across * TILE + place
    inside, is_column = place < count, column < x.columns
    mask = inside[:, None] & is_column[None, :]
    values = tl.load(x.data + row[:, None] * x.stride + column[None, :], mask=mask, other=0.0)
    return values, row, column, inside, is_column


@triton.jit
def group_maxima(
    x,  # a `Matrix`
    of_rows,  # int32 [S], bits of magnitudes, zero on entry; or None
    of_columns,  # int32 [E, K], the same
    counts,
    G: tl.constexpr,
):
    """Find the largest magnitudes of a tile of TILE tokens and TILE columns."""
    TILE: tl.constexpr = G.tile
    width = tl.cdiv(x.columns, TILE)
    tile, across = tl.program_id(0) // width, tl.program_id(0) % width
    expert, _, _, first, count = place_of_tile(counts, tile, G)
    if (expert < G.experts) & (count > 0):
        values, row, column, inside, is_column = _load(x, first, count, across, TILE)
        bits = magnitude_bits(values)
        if of_rows is not None:
            tl.atomic_max(of_rows + row, tl.max(bits, axis=1), mask=inside, sem="relaxed")
        if of_columns is not None:
            to = of_columns + expert.to(tl.int64) * x.columns + column
            tl.atomic_max(to, tl.max(bits, axis=0), mask=is_column, sem="relaxed")


@triton.jit
def cast_groups(
    x,  # a `Matrix`
    plain,  # an `Orientation` of x: codes uint8 [S, K], scales float32 [S, ceil(K / TILE)]
    transposed,  # of x.T: codes uint8 [K, slots * TILE], or [E, K, N] if APART; scales [K, slots]
    # With maxima, of `group_maxima`: scales [S] and [E, K]. With MX: bytes [slots * TILE, K / MX]
    # and [K, slots * TILE / MX].
    counts,
    slots,
    G: tl.constexpr,
    C: tl.constexpr,
    APART: tl.constexpr,  # every expert has N rows, whole tiles
    MX: tl.constexpr,  # elements with one scale, whose exponent is stored as tensor cores read it; 0: none
):
    """Cast a tile of TILE tokens and TILE columns."""
    TILE: tl.constexpr = G.tile
    width = tl.cdiv(x.columns, TILE)
    tile, across = tl.program_id(0) // width, tl.program_id(0) % width
    expert, its_tiles, within, first, count = place_of_tile(counts, tile, G)
    if (expert < G.experts) & (count > 0):
        values, row, column, inside, is_column = _load(x, first, count, across, TILE)
        mask = inside[:, None] & is_column[None, :]
        shared = tl.zeros((1, 1), tl.float32)
        one = tl.arange(0, 1)
        if plain.codes is not None:
            if MX:
                found, scale = cast_block(
                    values, shared, None, row[:, None], column[None, :], x.columns, C, 1, MX
                )
                _store_units(plain.scales, tile * width + across, scale, C)
            elif plain.maxima is None:
                found, scale = cast_block(
                    values, shared, None, row[:, None], column[None, :], x.columns, C, 1, TILE
                )
                to = plain.scales + row[:, None] * width + across + one[None, :]
                tl.store(to, scale, inside[:, None])
            else:
                scale = scale_of(tl.load(plain.maxima + row, inside, other=0), C)
                found = _encoded(values, scale[:, None], C)
                # Once for a row, and once for a column of an expert.
                once = first + tl.where(across == 0, count, 0)
                tl.store(plain.scales + row, scale, row < once)
            tl.store(plain.codes + row[:, None] * x.columns + column[None, :], found, mask=mask)
        if transposed.codes is not None:
            line = column.to(tl.int64)[:, None]
            if MX:
                found, scale = cast_block(
                    values, shared, None, column[None, :], row[:, None], x.rows, C, MX, 1
                )
                # The blocks of an expert lie together: rows of blocks, each of its tiles.
                block = (tile - within) * width + across * its_tiles + within
                _store_units(transposed.scales, block, tl.trans(scale), C)
            elif transposed.maxima is None:
                found, scale = cast_block(
                    values, shared, None, column[None, :], row[:, None], x.rows, C, TILE, 1
                )
                to = transposed.scales + line * slots + tile + one[None, :]
                tl.store(to, tl.trans(scale), is_column[:, None])
            else:
                at = expert.to(tl.int64) * x.columns + column
                scale = scale_of(tl.load(transposed.maxima + at, is_column, other=0), C)
                found = _encoded(values, scale[None, :], C)
                once = tl.where(within == 0, x.columns, 0)
                tl.store(transposed.scales + at, scale, column < once)
            if APART:
                length, start = its_tiles * TILE, within * TILE
                to = transposed.codes + (expert.to(tl.int64) * x.columns + line) * length
            else:
                start = tile * TILE
                to = transposed.codes + line * (slots * TILE)
            to += (start + tl.arange(0, TILE))[None, :]
            tl.store(to, tl.trans(found), mask=is_column[:, None])


@triton.jit
def _store_units(units, block, scale, C: tl.constexpr):
    """Store scale [128, 4] as block `block` of 512 bytes in the order of `scaling.swizzled`."""
    row = tl.arange(0, 128)
    within = (row % 32 * 16 + row // 32 * 4)[:, None] + tl.arange(0, 4)[None, :]
    tl.store(units + block.to(tl.int64) * 512 + within, unit_codes(scale, C))


@triton.jit
def _encoded(values, scale, C: tl.constexpr):
    y = values.to(tl.float32) * reciprocal_of(scale, None, C)
    return encode(y, y, C)


@triton.jit
def grouped_mm(
    x,  # [S, K] e4m3
    x_scale,  # float32 [S, ceil(K / TILE)], or [S]
    w,  # e4m3; `shape` says where the experts' matrices and their scales lie
    w_scale,  # float32
    bias,  # [E, N] or None
    out,  # [S, N]; rows without an expert become zero
    counts,
    tiles,
    shape,  # `Place`
    G: tl.constexpr,
    B: tl.constexpr,
):
    """Multiply a tile of rows by columns of their expert's matrix [N, K]."""
    GROUP: tl.constexpr = B.group_m
    N, K = shape.rows, shape.columns
    tile_m, tile_n = place_of_program(tl.program_id(0), tiles, tl.cdiv(N, B.n), GROUP)
    expert, _, _, first, count = place_of_tile(counts, tile_m, G)
    if count > 0:
        m = (first + tl.arange(0, B.m)).to(tl.int64)
        n = (tile_n * B.n + tl.arange(0, B.n)).to(tl.int64)
        is_known = expert < G.experts
        of = tl.where(is_known, expert, 0).to(tl.int64)
        own, own_scale = w + of * shape.expert, w_scale + of * shape.scale_expert
        left = x, x_scale, K, tl.cdiv(K, B.lhs_columns) if B.lhs_columns else 1
        right = own, own_scale, shape.stride, shape.scale_stride
        rows, columns = (m, first, first + count), (n, tile_n * B.n, N)
        total = sum_of_blocks(left, rows, right, columns, 0, tl.where(is_known, K, 0), B)
        if bias is not None:
            known = tl.where(is_known, N, 0)
            total += tl.load(bias + of * N + n, n < known, other=0.0).to(tl.float32)[None, :]
        # A scale of expert 0 that is NaN must not reach rows without an expert.
        total = tl.where(is_known, total, 0.0)
        tl.store(
            out + m[:, None] * N + n[None, :],
            total.to(out.dtype.element_ty),
            (m < first + count)[:, None] & (n < N)[None, :],
        )


@triton.jit
def grouped_grad(
    lhs,  # [M, slots * TILE] e4m3, as `cast_groups` writes x.T
    lhs_scale,  # float32 [M, slots], or [E, M]
    rhs,  # [N, slots * TILE]
    rhs_scale,  # [N, slots], or [E, N]
    out,  # [E, M, N]; zero for an expert without rows
    counts,
    slots,
    M,
    N,
    G: tl.constexpr,
    B: tl.constexpr,
):
    """Multiply M by N elements of one expert's result."""
    GROUP: tl.constexpr = B.group_m
    tiles_m, tiles_n = tl.cdiv(M, B.m), tl.cdiv(N, B.n)
    expert = tl.program_id(0) // (tiles_m * tiles_n)
    within = tl.program_id(0) % (tiles_m * tiles_n)
    tile_m, tile_n = place_of_program(within, tiles_m, tiles_n, GROUP)
    index, _, tiles = _counts(counts, G)
    begin = tl.sum(tl.where(index < expert, tiles, 0), axis=0)
    own = tl.sum(tl.where(index == expert, tiles, 0), axis=0)
    m = (tile_m * B.m + tl.arange(0, B.m)).to(tl.int64)
    n = (tile_n * B.n + tl.arange(0, B.n)).to(tl.int64)
    wide = expert.to(tl.int64)
    if B.lhs_columns == 0:
        lhs_scale, rhs_scale = lhs_scale + wide * M, rhs_scale + wide * N
    scales = slots if B.lhs_columns else 1
    left, right = (
        (lhs, lhs_scale, slots * G.tile, scales),
        (rhs, rhs_scale, slots * G.tile, scales),
    )
    rows, columns = (m, tile_m * B.m, M), (n, tile_n * B.n, N)
    total = sum_of_blocks(
        left, rows, right, columns, begin * G.tile, (begin + own) * G.tile, B
    )  # fmt: skip
    tl.store(
        out + wide * M * N + m[:, None] * N + n[None, :],
        total.to(out.dtype.element_ty),
        (m < M)[:, None] & (n < N)[None, :],
    )


@triton.jit
def sum_groups(x, out, counts, G: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sum the rows of an expert in float32: x, a `Matrix` [S, N] -> out [E, N]."""
    width = tl.cdiv(x.columns, COLUMNS)
    expert, across = tl.program_id(0) // width, tl.program_id(0) % width
    index, rows, _ = _counts(counts, G)
    begin = tl.sum(tl.where(index < expert, rows, 0), axis=0)
    end = begin + tl.sum(tl.where(index == expert, rows, 0), axis=0)
    column = across * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(begin, end, ROWS):
        row = (start + tl.arange(0, ROWS)).to(tl.int64)
        mask = (row < end)[:, None] & (column < x.columns)[None, :]
        place = x.data + row[:, None] * x.stride + column[None, :]
        total += tl.load(place, mask=mask, other=0.0).to(tl.float32)
    found = tl.sum(total, axis=0).to(out.dtype.element_ty)
    tl.store(out + expert.to(tl.int64) * x.columns + column, found, column < x.columns)


@triton.jit
def clear_rest(y, counts, G: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Set rows without an expert to zero: y, a `Matrix` [S, N]. Other programs end at once."""
    index, rows, _ = _counts(counts, G)
    first = tl.sum(tl.where(index < G.experts, rows, 0), axis=0)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if (tl.program_id(0) + 1) * ROWS > first:
        mask = (row >= first) & (row < y.rows)
        for start in range(0, y.columns, COLUMNS):
            column = start + tl.arange(0, COLUMNS)
            to = y.data + row.to(tl.int64)[:, None] * y.stride + column[None, :]
            zeros = tl.zeros((ROWS, COLUMNS), tl.float32).to(y.data.dtype.element_ty)
            tl.store(to, zeros, mask=mask[:, None] & (column < y.columns)[None, :])
