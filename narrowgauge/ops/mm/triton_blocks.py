"""Triton kernel of `triton.py`: an FP8 GEMM with one scale per tile of each operand.

A program computes BLOCK_M x BLOCK_N of the result. It iterates over K in steps of BLOCK_K, the
shorter tile, at most 128. In each step the tensor cores sum one block of products from zero. The
scales multiply that sum, which is added to a float32 total in registers. The tensor core's own
accumulator (about 14 bits on Hopper) therefore never holds more than 128 products: the promotion of
DeepSeek-V3 (arXiv 2412.19437, 3.3.2).

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
    start,
    K,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Load the scales of the rows `index` [BLOCK], which start at `first`, for the column `start`.

    Returns [BLOCK], or [1] if the rows lie within one row of tiles.
    """
    width, column = tl.cdiv(K, COLUMNS), start // COLUMNS
    if ROWS % BLOCK == 0:
        found = tl.load(scale + (first // ROWS).to(tl.int64) * width + column + tl.arange(0, 1))
    else:
        found = tl.load(scale + index // ROWS * width + column, index < length, other=0.0)
    return found


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
    BLOCK_M: tl.constexpr = B.m
    BLOCK_N: tl.constexpr = B.n
    BLOCK_K: tl.constexpr = B.k
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    group = program // (B.group_m * tiles_n)
    rows_in_group = min(tiles_m - group * B.group_m, B.group_m)
    tile_m = group * B.group_m + (program % (B.group_m * tiles_n)) % rows_in_group
    tile_n = (program % (B.group_m * tiles_n)) // rows_in_group

    # int64: 65536 x 32768 elements are 2**31.
    m = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    n = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    lhs_rows, rhs_rows = lhs + m[:, None] * K, rhs + n[:, None] * K
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        inside = start + k < K
        left = tl.load(
            lhs_rows + (start + k)[None, :], (m < M)[:, None] & inside[None, :], other=0.0
        )
        right = tl.load(
            rhs_rows + (start + k)[None, :], (n < N)[:, None] & inside[None, :], other=0.0
        )
        # Starts from zero, without the total as accumulator, see the module.
        part = tl.dot(left, tl.trans(right))
        of_rows = _scales(
            lhs_scale, m, M, tile_m * BLOCK_M, start, K, B.lhs_rows, B.lhs_columns, BLOCK_M
        )
        of_columns = _scales(
            rhs_scale, n, N, tile_n * BLOCK_N, start, K, B.rhs_rows, B.rhs_columns, BLOCK_N
        )
        total += part * (of_rows[:, None] * of_columns[None, :])
    if bias is not None:
        total += tl.load(bias + n, n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(
        out + m[:, None] * N + n[None, :],
        total.to(out.dtype.element_ty),
        (m < M)[:, None] & (n < N)[None, :],
    )
