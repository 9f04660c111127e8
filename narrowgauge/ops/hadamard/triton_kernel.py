"""Rotation, encoding, packing and clipping bits in one pass over x, for a known scale.

    y = x diag(signs) H     codes = encode(y * (1 / scale))     bits = |y * (1 / scale)| <= largest

A program computes ROWS x COLUMNS elements, as [ROWS * COLUMNS / ORDER, ORDER] times H without its
factor: a matrix of +1 and -1. Tensor cores multiply 16-bit numbers by +1 and -1 exactly and sum in
float32. float32 input is split into three bfloat16 numbers whose sum is exact, which takes three
matmuls (PIECES).

The factor 1 / sqrt(ORDER) is applied last. With orders of 16 and 64 results are therefore
bit-identical to the reference wherever its sums are exact; otherwise they differ by the order of
summation.
"""

from __future__ import annotations

import triton
import triton.language as tl

from narrowgauge.ops.quantize.triton_transpose import load_piece, place_of_program
from narrowgauge.ops.triton.elements import encode, pack
from narrowgauge.ops.triton.scales import reciprocal_of


@triton.jit
def _product(values, signs, total, C: tl.constexpr):
    """Return total + values @ signs: values in 16 bits, signs of +1 and -1, total float32."""
    if C.interpreted:
        # Triton's interpreter computes wrong bfloat16 products (3.9).
        total += tl.dot(values.to(tl.float32), signs)
    else:
        total = tl.dot(values, signs.to(values.dtype), total, out_dtype=tl.float32)
    return total


@triton.jit
def _rotated(values, C: tl.constexpr, ORDER: tl.constexpr, PIECES: tl.constexpr):
    """Return values [n, ORDER] times H, float32."""
    # signs = (-1) ** popcount(i & j): the folds move the parity of the bits into the lowest bit.
    parity = tl.arange(0, ORDER)[:, None] & tl.arange(0, ORDER)[None, :]
    parity = parity ^ (parity >> 4)
    parity = parity ^ (parity >> 2)
    parity = parity ^ (parity >> 1)
    signs = 1.0 - 2.0 * (parity & 1).to(tl.float32)
    total = tl.zeros(values.shape, tl.float32)
    if PIECES == 1:
        total = _product(values, signs, total, C)
    else:
        high = values.to(tl.bfloat16)
        rest = values - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        # Smallest parts first, so that less is rounded away.
        total = _product(low, signs, total, C)
        total = _product(middle, signs, total, C)
        total = _product(high, signs, total, C)
    return total * (ORDER**-0.5)


@triton.jit
def rotate_and_encode(
    x, signs, scale, out, whole,
    C: tl.constexpr, ORDER: tl.constexpr, PIECES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Entry point of the kernel.

    x      a `Matrix`
    signs  [whole] float32 or None
    scale  [1] float32
    out    `encoding.Outputs`
    whole  number of columns in whole blocks of ORDER
    """
    down, across = place_of_program(whole, COLUMNS)
    values, row, column = load_piece(x, down, across, ROWS, COLUMNS)
    if signs is not None:
        flips = tl.load(signs + column, mask=column < whole, other=1.0)
        values = (values.to(tl.float32) * flips[None, :]).to(values.dtype)
    rotated = _rotated(tl.reshape(values, (ROWS * COLUMNS // ORDER, ORDER)), C, ORDER, PIECES)
    ratio = rotated * reciprocal_of(tl.load(scale), None, C)
    inside = tl.reshape((tl.abs(ratio) <= C.largest).to(tl.int32), (ROWS, COLUMNS))
    found = tl.reshape(encode(ratio, ratio, C), (ROWS, COLUMNS))
    in_rows = (row < x.rows)[:, None]
    kept = in_rows & (column < whole)[None, :]
    tl.store(out.codes + row[:, None] * whole + column[None, :], found, mask=kept)
    if out.packed is not None:
        byte = across * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
        place = row[:, None] * (whole // 2) + byte[None, :]
        tl.store(
            out.packed + place,
            pack(found, ROWS, COLUMNS),
            mask=in_rows & (byte < whole // 2)[None, :],
        )
    if out.bits is not None:
        width = (whole + 7) // 8
        byte = across * (COLUMNS // 8) + tl.arange(0, COLUMNS // 8)
        # Bits outside of the matrix must be zero, as `pack_bits` leaves them.
        eight = (
            tl.reshape(tl.where(kept, inside, 0), (ROWS, COLUMNS // 8, 8))
            << tl.arange(0, 8)[None, None, :]
        )
        place = row[:, None] * width + byte[None, :]
        tl.store(
            out.bits + place,
            tl.sum(eight, axis=2).to(tl.uint8),
            mask=in_rows & (byte < width)[None, :],
        )
