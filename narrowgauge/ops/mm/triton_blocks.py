"""The Triton kernel behind `triton.py`: an FP8 product with one scale per 128 elements of the contracted axis.

A program computes BLOCK_M x BLOCK_N of the result. It walks K in steps of 128: the tensor cores sum one block of 128 products from
zero, the block's scales multiply that sum, and it is added to a float32 total in registers. So the tensor core's own accumulator
(about 14 bits on Hopper) never holds more than 128 products: the promotion of DeepSeek-V3 (arXiv 2412.19437, 3.3.2).

Programs are numbered so that `group_m` tiles of rows share the columns they read while those are in the L2 cache.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl


@dataclass(frozen=True)
class Blocks:
    """The constant of the kernel. lhs_rows, rhs_rows: of a tile with one scale, 1 or 128; m (divides 128), n: of a program."""

    lhs_rows: int
    rhs_rows: int
    m: int
    n: int
    group_m: int
    k: int = 128  # the tiles' length along the contracted axis


@triton.jit
def block_mm(
    lhs,  # [M, K] e4m3 or e5m2, rows of K elements
    rhs,  # [N, K]
    lhs_scale,  # [ceil(M / B.lhs_rows), ceil(K / 128)] float32
    rhs_scale,  # [ceil(N / B.rhs_rows), ceil(K / 128)]
    bias,  # [N] or None
    out,  # [M, N]
    M,
    N,
    K,
    B: tl.constexpr,  # Blocks
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

    m = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)  # 2**31 elements are passed at 65536 x 32768
    n = (tile_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    blocks = tl.cdiv(K, BLOCK_K)
    lhs_rows, rhs_rows = lhs + m[:, None] * K, rhs + n[:, None] * K
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for block in range(blocks):
        inside = block * BLOCK_K + k < K
        left = tl.load(lhs_rows + (block * BLOCK_K + k)[None, :], (m < M)[:, None] & inside[None, :], other=0.0)
        right = tl.load(rhs_rows + (block * BLOCK_K + k)[None, :], (n < N)[:, None] & inside[None, :], other=0.0)
        part = tl.dot(left, tl.trans(right))
        # A program lies within one row of square tiles, whose scale is then one number.
        if B.lhs_rows == 1:
            part = part * tl.load(lhs_scale + m * blocks + block, m < M, other=0.0)[:, None]
        else:
            part = part * tl.load(lhs_scale + (tile_m * BLOCK_M // B.lhs_rows).to(tl.int64) * blocks + block)
        if B.rhs_rows == 1:
            part = part * tl.load(rhs_scale + n * blocks + block, n < N, other=0.0)[None, :]
        else:
            part = part * tl.load(rhs_scale + (tile_n * BLOCK_N // B.rhs_rows).to(tl.int64) * blocks + block)
        total += part
    if bias is not None:
        total += tl.load(bias + n, n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(out + m[:, None] * N + n[None, :], total.to(out.dtype.element_ty), (m < M)[:, None] & (n < N)[None, :])
