"""Triton kernel of `triton.py`: an FP8 GEMM with one scale per tile of each operand.

A program computes BLOCK_M x BLOCK_N of the result. It iterates over K in steps of BLOCK_K, the
shorter tile, at most 128. In each step the tensor cores sum one block of products from zero. The
scales multiply that sum, which is added to a float32 total in registers. The tensor core's own
accumulator (about 14 bits on Hopper) therefore never holds more than 128 products: the promotion of
DeepSeek-V3 (arXiv 2412.19437, 3.3.2).

`sum_of_blocks` also serves the products of experts (ops/grouped).

`group_m` tiles of rows are numbered consecutively, so that they share the columns they read while
those are in the L2 cache.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _scales(
    scale,
    index,
    length,
    first,
    column,
    width,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Load the scales of the rows `index` [BLOCK], which start at `first`, in a column of tiles.

    width  columns of tiles in a row. Returns [BLOCK], or [1] if the rows lie in one row of tiles.
    """
    if ROWS % BLOCK == 0:
        found = tl.load(scale + (first // ROWS).to(tl.int64) * width + column + tl.arange(0, 1))
    else:
        found = tl.load(scale + index // ROWS * width + column, index < length, other=0.0)
    return found


@triton.jit
def place_of_program(program, tiles_m, tiles_n, GROUP: tl.constexpr):
    """Return (tile_m, tile_n): GROUP tiles of rows are numbered consecutively, see the module."""
    group = program // (GROUP * tiles_n)
    rows_in_group = min(tiles_m - group * GROUP, GROUP)
    tile_m = group * GROUP + (program % (GROUP * tiles_n)) % rows_in_group
    return tile_m, (program % (GROUP * tiles_n)) // rows_in_group


@triton.jit
def sum_of_blocks(lhs, rows, rhs, columns, begin, end, B: tl.constexpr):
    """Return the sum over [begin, end) of lhs times rhs, both multiplied by their scales.

    Without `B.lhs_columns` a row of each operand has one scale, which multiplies the whole sum.

    lhs    pointers to elements and scales, and the strides of their rows
    rows   int64 [B.m], the first of them, and the end. Rows from the end on count as zero
    begin  a multiple of B.k. rhs and columns are as lhs and rows
    """
    # Constants of their own: Triton 3.7 passes no number of a structure to a device function.
    BLOCK_M: tl.constexpr = B.m
    BLOCK_N: tl.constexpr = B.n
    LEFT: tl.constexpr = B.lhs_rows
    RIGHT: tl.constexpr = B.rhs_rows
    m, first_m, M = rows
    n, first_n, N = columns
    lhs_data, lhs_scale, lhs_stride, lhs_width = lhs
    rhs_data, rhs_scale, rhs_stride, rhs_width = rhs
    k = tl.arange(0, B.k)
    lhs_rows, rhs_rows = lhs_data + m[:, None] * lhs_stride, rhs_data + n[:, None] * rhs_stride
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(begin, end, B.k):
        inside = start + k < end
        left = tl.load(
            lhs_rows + (start + k)[None, :], (m < M)[:, None] & inside[None, :], other=0.0
        )
        right = tl.load(
            rhs_rows + (start + k)[None, :], (n < N)[:, None] & inside[None, :], other=0.0
        )
        if B.lhs_columns == 0 and B.fast:
            total = tl.dot(left, tl.trans(right), total)
        else:
            # Starts from zero, without the total as accumulator, see the module.
            part = tl.dot(left, tl.trans(right))
            if B.lhs_columns == 0:
                total += part
            else:
                of_lhs, of_rhs = start // B.lhs_columns, start // B.rhs_columns
                of_rows = _scales(lhs_scale, m, M, first_m, of_lhs, lhs_width, LEFT, BLOCK_M)
                of_columns = _scales(rhs_scale, n, N, first_n, of_rhs, rhs_width, RIGHT, BLOCK_N)
                total += part * (of_rows[:, None] * of_columns[None, :])
    if B.lhs_columns == 0:
        of_rows = _scales(lhs_scale, m, M, first_m, 0, lhs_width, LEFT, BLOCK_M)
        of_columns = _scales(rhs_scale, n, N, first_n, 0, rhs_width, RIGHT, BLOCK_N)
        total *= of_rows[:, None] * of_columns[None, :]
    return total


@triton.jit
def block_mm(
    lhs,  # [M, K] e4m3 or e5m2, rows of K elements
    rhs,  # [N, K]
    lhs_scale,  # [ceil(M / B.lhs_rows), ceil(K / B.lhs_columns)] float32
    rhs_scale,  # [ceil(N / B.rhs_rows), ceil(K / B.rhs_columns)]
    bias,  # [N] or None
    out,  # [M, N]
    M,
    N,
    K,
    B: tl.constexpr,  # triton.Blocks
):
    GROUP: tl.constexpr = B.group_m
    tile_m, tile_n = place_of_program(tl.program_id(0), tl.cdiv(M, B.m), tl.cdiv(N, B.n), GROUP)
    # int64: 65536 x 32768 elements are 2**31.
    m = (tile_m * B.m + tl.arange(0, B.m)).to(tl.int64)
    n = (tile_n * B.n + tl.arange(0, B.n)).to(tl.int64)
    left = lhs, lhs_scale, K, tl.cdiv(K, B.lhs_columns)
    right = rhs, rhs_scale, K, tl.cdiv(K, B.rhs_columns)
    rows, columns = (m, tile_m * B.m, M), (n, tile_n * B.n, N)
    total = sum_of_blocks(left, rows, right, columns, 0, K, B)
    if bias is not None:
        total += tl.load(bias + n, n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + m[:, None] * N + n[None, :],
        total.to(out.dtype.element_ty),
        (m < M)[:, None] & (n < N)[None, :],
    )
