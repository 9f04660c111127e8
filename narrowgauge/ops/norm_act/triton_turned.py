"""Gradient of a norm from saved codes of y.T, without x: n = (y - b) / w.

    dx = r (w h - n mean(w h n) [- mean(w h)]);  n = 0 where w = 0
    dw = sum h n,  db = sum h

The Linears that read y save these codes anyway.

A program processes ROWS rows, whose codes are adjacent in y.T, in two passes over pieces of COLUMNS
columns. The first pass computes the means of its rows, the second one dx and its share of the sums,
reading from the cache.
"""

import triton
import triton.language as tl

from narrowgauge.ops.triton.elements import decode


@triton.jit
def _piece(
    codes, scale, parameters, h, row, column, rows, columns, PLUS: tl.constexpr, C: tl.constexpr
):
    """Return (n, w h, h) float32 [ROWS, COLUMNS], zero outside of the matrix."""
    inside = column < columns
    mask = (row < rows)[:, None] & inside[None, :]
    # Loaded in the order of y.T, where a column's rows are adjacent, and transposed in registers.
    turned = tl.load(
        codes + column[:, None] * rows + row[None, :],
        mask=inside[:, None] & (row < rows)[None, :],
        other=0,
    )
    y = tl.trans(decode(turned, C) * scale)
    w = PLUS + tl.load(parameters[0] + column, mask=inside, other=0.0).to(tl.float32)
    if len(parameters) == 2:
        y -= tl.load(parameters[1] + column, mask=inside, other=0.0).to(tl.float32)[None, :]
    known = (w != 0.0) & inside
    normal = tl.where(known[None, :], y / tl.where(known, w, 1.0)[None, :], 0.0)
    gradient = tl.load(h + row[:, None] * columns + column[None, :], mask=mask, other=0.0).to(
        tl.float32
    )
    return normal, w[None, :] * gradient, gradient


@triton.jit
def norm_backward_turned(
    codes, scales, parameters, rates, h, dx, sums, rows, columns, T: tl.constexpr
):
    """Entry point of the kernel.

    codes  [columns, rows] with one scale
    h, dx  [rows, columns]
    sums   (for w, for b) [programs, columns] float32
    T      a `triton_launch.Turned`
    """
    # Triton 3.6 rejects fields of a constant dataclass as arguments and shapes, so they are bound
    # to constants first.
    PLUS: tl.constexpr = T.plus
    CENTERED: tl.constexpr = T.centered
    C: tl.constexpr = T.C
    ROWS: tl.constexpr = T.rows
    COLUMNS: tl.constexpr = T.columns
    part = tl.program_id(0).to(tl.int64)
    row = part * ROWS + tl.arange(0, ROWS)
    scale = tl.load(scales)
    inner = tl.zeros((ROWS, COLUMNS), tl.float32)
    outer = inner
    for first in range(0, columns, COLUMNS):
        column = first + tl.arange(0, COLUMNS).to(tl.int64)
        normal, weighted, _ = _piece(
            codes, scale, parameters, h, row, column, rows, columns, PLUS, C
        )
        inner += weighted * normal
        if CENTERED:
            outer += weighted
    mean_inner = tl.sum(inner, axis=1) / columns
    mean_outer = tl.sum(outer, axis=1) / columns
    rate = tl.load(rates + row, mask=row < rows, other=0.0)
    for first in range(0, columns, COLUMNS):
        column = first + tl.arange(0, COLUMNS).to(tl.int64)
        normal, weighted, gradient = _piece(
            codes, scale, parameters, h, row, column, rows, columns, PLUS, C
        )
        result = weighted - normal * mean_inner[:, None]
        if CENTERED:
            result -= mean_outer[:, None]
        place = row[:, None] * columns + column[None, :]
        mask = (row < rows)[:, None] & (column < columns)[None, :]
        tl.store(dx + place, (result * rate[:, None]).to(dx.dtype.element_ty), mask=mask)
        tl.store(
            sums[0] + part * columns + column,
            tl.sum(gradient * normal, axis=0),
            mask=column < columns,
        )
        if CENTERED:
            tl.store(
                sums[1] + part * columns + column, tl.sum(gradient, axis=0), mask=column < columns
            )
