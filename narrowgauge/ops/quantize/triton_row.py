"""One scale per row in one launch: a program finds the largest magnitude of its rows and casts them.

A program takes ROWS rows (several where rows are short), BLOCK columns at a time. Where a row is one block, it stays in registers
between both steps (WHOLE_ROW); longer rows are read a second time, out of the cache that they have just passed.

For the columns of x, which are the rows of x.T, see `triton_transpose`.
"""

import triton
import triton.language as tl

from narrowgauge.ops.quantize.triton_transpose import store_codes
from narrowgauge.ops.triton.elements import encode, magnitude_bits
from narrowgauge.ops.triton.noise import uniform
from narrowgauge.ops.triton.scales import divided, divisor, scale_of


@triton.jit
def _cast(values, out, row, column, rows, columns, scale, C: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Casts values [ROWS, BLOCK] at rows `row` [ROWS] and columns `column` [BLOCK], int64."""
    y = divided(values.to(tl.float32), divisor(scale[:, None], C), C)
    noise = uniform(out.key, row[:, None], columns, column[None, :]) if C.stochastic else y
    store_codes(encode(y, noise, C), out.codes, row, column, rows, columns, C, ROWS, BLOCK)


@triton.jit
def cast_rows(x, out, C: tl.constexpr, WHOLE_ROW: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """x, a `Matrix` -> `Orientation` out: codes [rows, columns or half of it] uint8, scales [rows] float32."""
    rows, columns = x.rows, x.columns
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    line = x.data + row[:, None] * x.stride
    inside = (row < rows)[:, None]
    if WHOLE_ROW:
        column = tl.arange(0, BLOCK).to(tl.int64)
        values = tl.load(line + column[None, :], mask=inside & (column < columns)[None, :], other=0.0)
        scale = scale_of(tl.max(magnitude_bits(values), axis=1), C)
        _cast(values, out, row, column, rows, columns, scale, C, ROWS, BLOCK)
    else:
        largest = tl.zeros((ROWS, BLOCK), tl.int32)
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK).to(tl.int64)
            values = tl.load(line + column[None, :], mask=inside & (column < columns)[None, :], other=0.0)
            largest = tl.maximum(largest, magnitude_bits(values))
        scale = scale_of(tl.max(largest, axis=1), C)
        for start in range(0, columns, BLOCK):
            column = start + tl.arange(0, BLOCK).to(tl.int64)
            values = tl.load(line + column[None, :], mask=inside & (column < columns)[None, :], other=0.0)
            _cast(values, out, row, column, rows, columns, scale, C, ROWS, BLOCK)
    tl.store(out.scales + row, scale, mask=row < rows)
