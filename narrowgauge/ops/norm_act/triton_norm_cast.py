"""Kernels of norm_cast and norm_backward, see `ops.norm_act`.

norm_cast       a program takes ROWS whole rows: a pass for the mean (layer-norm), one for the mean square, then the values and
                their casts (`triton_store`); the later passes read out of the cache
norm_backward   rows in registers, sums for weight and bias over all rows that a program takes, which the caller adds up in a
                fixed order: PARTS each
"""

import triton
import triton.language as tl

from narrowgauge.ops.norm_act.triton_store import piece_at, store_rows


@triton.jit
def _mean(x, rows, columns, H: tl.constexpr):
    """[ROWS]"""
    ROWS: tl.constexpr = H.rows
    COLUMNS: tl.constexpr = H.columns
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, columns, COLUMNS):
        at = piece_at(rows, columns, tl.program_id(0).to(tl.int64), first, H)
        sums += tl.load(x + at.start + at.place, mask=at.mask, other=0.0).to(tl.float32)
    return tl.sum(sums, axis=1) / columns


@triton.jit
def _rate(x, mean, rows, columns, eps, H: tl.constexpr):
    """1 / sqrt(mean of (x - mean)^2 + eps), [ROWS]"""
    ROWS: tl.constexpr = H.rows
    COLUMNS: tl.constexpr = H.columns
    squares = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, columns, COLUMNS):
        at = piece_at(rows, columns, tl.program_id(0).to(tl.int64), first, H)
        values = tl.load(x + at.start + at.place, mask=at.mask, other=0.0).to(tl.float32)
        away = tl.where(at.mask, values - mean[:, None], 0.0)
        squares += away * away
    return tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.sqrt_rn(tl.sum(squares, axis=1) / columns + eps))


@triton.jit
def _rms_norm(inputs, at):
    x, weight, rate = inputs
    raw = tl.load(x + at.start + at.place, mask=at.mask, other=0.0)
    of_columns = tl.load(weight + at.column, mask=at.inside, other=0.0).to(tl.float32)
    return (raw.to(tl.float32) * rate[:, None]).to(raw.dtype).to(tl.float32) * of_columns[None, :]


@triton.jit
def _layer_norm(inputs, at):
    x, weight, bias, mean, rate = inputs
    values = tl.load(x + at.start + at.place, mask=at.mask, other=0.0).to(tl.float32)
    of_columns = tl.load(weight + at.column, mask=at.inside, other=0.0).to(tl.float32)
    added = tl.load(bias + at.column, mask=at.inside, other=0.0).to(tl.float32)
    return (values - mean[:, None]) * rate[:, None] * of_columns[None, :] + added[None, :]


@triton.jit
def norm_cast(x, weight, bias, eps, means, rates, out, rows, columns, H: tl.constexpr):
    """means (layer-norm, as bias), rates [rows] float32 are written."""
    ROWS: tl.constexpr = H.rows
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mean = tl.zeros((ROWS,), tl.float32)
    if means is not None:
        mean = _mean(x, rows, columns, H)
        tl.store(means + row, mean, mask=row < rows)
    rate = _rate(x, mean, rows, columns, eps, H)
    tl.store(rates + row, rate, mask=row < rows)
    if means is None:
        store_rows(_rms_norm, (x, weight, rate), out, rows, columns, H)
    else:
        store_rows(_layer_norm, (x, weight, bias, mean, rate), out, rows, columns, H)


@triton.jit
def norm_backward(
    x, weight, h, means, rates, dx, dweight, dbias, rows, columns, PARTS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """x, h, dx [rows, columns]; dweight, dbias [PARTS, columns] float32; WIDTH: a power of two of at least `columns`.

    dx = r (w h - n mean(w h n) [- mean(w h)]),  n = (x - mean) r;  means and dbias None: the mean is 0
    """
    part = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH).to(tl.int64)
    inside = column < columns
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    of_weight = tl.zeros((WIDTH,), tl.float32)
    of_bias = of_weight
    for row in range(part, rows, PARTS):
        line = row * columns + column
        rate = tl.load(rates + row)
        mean = tl.load(means + row) if means is not None else 0.0
        normal = (tl.load(x + line, mask=inside, other=0.0).to(tl.float32) - mean) * rate
        normal = tl.where(inside, normal, 0.0)
        gradient = tl.load(h + line, mask=inside, other=0.0).to(tl.float32)
        of_weight += gradient * normal
        inner = w * gradient
        result = inner - normal * (tl.sum(inner * normal, axis=0) / columns)
        if means is not None:
            of_bias += gradient
            result -= tl.sum(inner, axis=0) / columns
        tl.store(dx + line, (result * rate).to(dx.dtype.element_ty), mask=inside)
    tl.store(dweight + part * columns + column, of_weight, mask=inside)
    if means is not None:
        tl.store(dbias + part * columns + column, of_bias, mask=inside)
