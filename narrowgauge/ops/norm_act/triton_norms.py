"""The gradients of the norms: rows in registers, sums for weight and bias over all rows that a program takes.

dx = r (w h - n mean(w h n) [- mean(w h)])     n = (x - mean) r
dw = sum h n, db = sum h                       PARTS sums each, which the caller adds up in a fixed order
"""

import triton
import triton.language as tl


@triton.jit
def norm_gradients(
    x,
    weight,
    h,
    means,
    rates,
    dx,
    dweight,
    dbias,
    rows,
    columns,
    CENTERS: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """x, h, dx [rows, columns]; dweight, dbias [PARTS, columns] float32; WIDTH: a power of two of at least `columns`."""
    part = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH).to(tl.int64)
    inside = column < columns
    w = tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    of_weight = tl.zeros((WIDTH,), tl.float32)
    of_bias = of_weight
    for row in range(part, rows, PARTS):
        line = row * columns + column
        rate = tl.load(rates + row)
        mean = tl.load(means + row) if CENTERS else 0.0
        normal = (tl.load(x + line, mask=inside, other=0.0).to(tl.float32) - mean) * rate
        normal = tl.where(inside, normal, 0.0)
        gradient = tl.load(h + line, mask=inside, other=0.0).to(tl.float32)
        of_weight += gradient * normal
        inner = w * gradient
        result = inner - normal * (tl.sum(inner * normal, axis=0) / columns)
        if CENTERS:
            of_bias += gradient
            result -= tl.sum(inner, axis=0) / columns
        tl.store(dx + line, (result * rate).to(dx.dtype.element_ty), mask=inside)
    tl.store(dweight + part * columns + column, of_weight, mask=inside)
    if CENTERS:
        tl.store(dbias + part * columns + column, of_bias, mask=inside)
