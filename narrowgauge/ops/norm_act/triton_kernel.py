"""Norms and activations with their casts in the pass that computes them, and the gradients of activations with theirs.

A program takes ROWS rows and SPAN columns, COLUMNS of them at a time; of a norm, and where a row has a scale, SPAN is the row:

    norm       a pass over the rows for the mean (layer-norm), one for the mean square       the later ones out of the cache
    row scale  a pass for the largest magnitude of each row
    then       the values, rounded to y's type; codes of y, and of y.T through shared memory

How a scale is found (CASTS):

    0    no cast; the largest magnitude only, where `maxima` is asked for
    1    one scale, of earlier steps (delayed scaling); `settle` follows                      2    of each row
    3    of each piece of BLOCK columns; of y alone, since pieces of y.T too were tried and spilled

The functions (KIND) and their names for tensors: `ops.norm_act`. of a gradient h: 5 swiglu (two results), 6 gelu, 7 gelu-tanh.
"""

import triton
import triton.language as tl

from narrowgauge.ops.quantize.triton_block import _cast as cast_block
from narrowgauge.ops.quantize.triton_block import _store_scales as store_block_scales
from narrowgauge.ops.quantize.triton_tensor import IN_USE, settled
from narrowgauge.ops.quantize.triton_transpose import store_codes
from narrowgauge.ops.triton.elements import encode, magnitude_bits
from narrowgauge.ops.triton.scales import divided, divisor, scale_of

RMS_NORM = tl.constexpr(0)
LAYER_NORM = tl.constexpr(1)
SWIGLU = tl.constexpr(2)
GELU = tl.constexpr(3)
GELU_TANH = tl.constexpr(4)
SWIGLU_GRADIENTS = tl.constexpr(5)
GELU_GRADIENT = tl.constexpr(6)
GELU_TANH_GRADIENT = tl.constexpr(7)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _normal(x):
    """The normal distribution."""
    return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _tanh_gate(x):
    """(1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2."""
    return _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def _values(a, b, c, mean, rate, offset, place, column, mask, inside, KIND: tl.constexpr):
    """What is computed at offset + place [ROWS, COLUMNS], float32; a second result of swiglu's gradients, else the first again.

    offset int64, place int32: numbers of 64 bits for every element would fill the registers
    """
    raw = tl.load(a + offset + place, mask=mask, other=0.0)
    x = raw.to(tl.float32)
    if KIND == RMS_NORM:
        weight = tl.load(b + column, mask=inside, other=0.0).to(tl.float32)
        first = (x * rate[:, None]).to(raw.dtype).to(tl.float32) * weight[None, :]
        second = first
    elif KIND == LAYER_NORM:
        weight = tl.load(b + column, mask=inside, other=0.0).to(tl.float32)
        bias = tl.load(c + column, mask=inside, other=0.0).to(tl.float32)
        first = (x - mean[:, None]) * rate[:, None] * weight[None, :] + bias[None, :]
        second = first
    elif KIND == SWIGLU:
        first = (x * _sigmoid(x)).to(raw.dtype).to(tl.float32) * tl.load(b + offset + place, mask=mask, other=0.0).to(
            tl.float32
        )
        second = first
    elif KIND == GELU:
        first = x * _normal(x)
        second = first
    elif KIND == GELU_TANH:
        first = x * _tanh_gate(x)
        second = first
    else:
        h = tl.load(c + offset + place, mask=mask, other=0.0).to(tl.float32)
        if KIND == SWIGLU_GRADIENTS:
            share = _sigmoid(x)
            up = tl.load(b + offset + place, mask=mask, other=0.0).to(tl.float32)
            first = h * up * (share * (1.0 + x * (1.0 - share)))
            second = h * (x * share)
        elif KIND == GELU_GRADIENT:
            first = h * (_normal(x) + x * (tl.exp(-0.5 * x * x) * 0.3989422804014327))
            second = first
        else:
            share = _tanh_gate(x)
            slope = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
            first = h * (share + x * (share * (1.0 - share) * slope))
            second = first
    return first, second


@triton.jit
def _emit(
    values,
    y,
    codes,
    turned,
    scales,
    scale,
    offset,
    place,
    row,
    column,
    rows,
    columns,
    mask,
    CASTS: tl.constexpr,
    C: tl.constexpr,
    BLOCK: tl.constexpr,
    WANTS_TURNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Stores values [ROWS, COLUMNS], rounded already, and their codes by `scale` (CASTS 1 and 2) or their own (3)."""
    tl.store(y + offset + place, values, mask=mask)
    if CASTS == 1 or CASTS == 2:
        wide = values.to(tl.float32)
        found = encode(divided(wide, divisor(scale, C), C), wide, C)
        store_codes(found, codes, row, column, rows, columns, C, ROWS, COLUMNS)
        if WANTS_TURNED:
            store_codes(tl.trans(found), turned, column, row, columns, rows, C, COLUMNS, ROWS)
    if CASTS == 3:
        down, across = tl.min(row, axis=0) // ROWS, tl.min(column, axis=0) // COLUMNS
        found, of_blocks = cast_block(
            values, None, None, row[:, None], column[None, :], columns, C, 1, BLOCK, ROWS, COLUMNS
        )
        store_codes(found, codes, row, column, rows, columns, C, ROWS, COLUMNS)
        store_block_scales(of_blocks, scales, rows, columns, down, across, 1, BLOCK, ROWS, COLUMNS)


@triton.jit
def _rounded(values, y, mask):
    """As y keeps them, zero outside, in its type: 16 bits take half the registers until they are cast."""
    return tl.where(mask, values, 0.0).to(y.dtype.element_ty)


@triton.jit
def _statistics(
    a,
    eps,
    means,
    rates,
    top,
    row,
    known,
    place,
    columns,
    KIND: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """(mean, 1 / deviation) of each row [ROWS] of a norm, stored too; zeros for what is none."""
    mean = tl.zeros((ROWS,), tl.float32)
    rate = mean
    if KIND <= LAYER_NORM:
        if KIND == LAYER_NORM:
            sums = tl.zeros((ROWS, COLUMNS), tl.float32)
            for start in range(0, columns, COLUMNS):
                column = start + tl.arange(0, COLUMNS).to(tl.int64)
                mask = known[:, None] & (column < columns)[None, :]
                sums += tl.load(a + top * columns + start + place, mask=mask, other=0.0).to(tl.float32)
            mean = tl.sum(sums, axis=1) / columns
            tl.store(means + row, mean, mask=known)
        squares = tl.zeros((ROWS, COLUMNS), tl.float32)
        for start in range(0, columns, COLUMNS):
            column = start + tl.arange(0, COLUMNS).to(tl.int64)
            mask = known[:, None] & (column < columns)[None, :]
            x = tl.load(a + top * columns + start + place, mask=mask, other=0.0).to(tl.float32)
            away = tl.where(mask, x - mean[:, None], 0.0)
            squares += away * away
        rate = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.sqrt_rn(tl.sum(squares, axis=1) / columns + eps))
        tl.store(rates + row, rate, mask=known)
    return mean, rate


@triton.jit
def _row_scales(
    a, b, c, mean, rate, y, y2, scales, scales2, scale, scale2, top, row, known, place, columns,
    KIND: tl.constexpr, CASTS: tl.constexpr, C: tl.constexpr, CASTS2: tl.constexpr, C2: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The scale of each row, [ROWS, 1], of what has one (CASTS == 2), written as well; the others as they are given."""
    largest = tl.zeros((ROWS, COLUMNS), tl.int32)
    largest2 = largest
    for start in range(0, columns, COLUMNS):
        column = start + tl.arange(0, COLUMNS).to(tl.int64)
        inside = column < columns
        mask = known[:, None] & inside[None, :]
        first, second = _values(a, b, c, mean, rate, top * columns + start, place, column, mask, inside, KIND)
        largest = tl.maximum(largest, magnitude_bits(_rounded(first, y, mask)))
        if CASTS2 == 2:
            largest2 = tl.maximum(largest2, magnitude_bits(_rounded(second, y2, mask)))
    if CASTS == 2:
        of_rows = scale_of(tl.max(largest, axis=1), C)
        tl.store(scales + row, of_rows, mask=known)
        scale = of_rows[:, None]
    if CASTS2 == 2:
        of_rows2 = scale_of(tl.max(largest2, axis=1), C2)
        tl.store(scales2 + row, of_rows2, mask=known)
        scale2 = of_rows2[:, None]
    return scale, scale2


@triton.jit
def produce(
    a, b, c, eps, means, rates,
    y, codes, turned, scales, maxima, live,
    y2, codes2, turned2, scales2, maxima2, live2,
    rows, columns, span,
    KIND: tl.constexpr, CASTS: tl.constexpr, C: tl.constexpr, CASTS2: tl.constexpr, C2: tl.constexpr, BLOCK: tl.constexpr,
    WANTS_TURNED: tl.constexpr, WANTS_MAXIMA: tl.constexpr, WANTS_MAXIMA2: tl.constexpr,
    PARTS: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """See the module. means, rates [rows] float32 of a norm are written; maxima [PARTS] int32 are zero before; span: SPAN."""
    program = tl.program_id(0).to(tl.int64)
    pieces = tl.cdiv(columns, span)
    top = (program // pieces) * ROWS
    row = top + tl.arange(0, ROWS)
    begin = (program % pieces) * span
    end = tl.minimum(begin + span, columns)
    known = row < rows
    place = tl.arange(0, ROWS)[:, None] * columns + tl.arange(0, COLUMNS)[None, :]
    mean, rate = _statistics(a, eps, means, rates, top, row, known, place, columns, KIND, ROWS, COLUMNS)
    scale = tl.full((1, 1), 1.0, tl.float32)
    scale2 = scale
    if CASTS == 1:
        scale = scale_of(tl.load(live + IN_USE + tl.zeros((1, 1), tl.int32)).to(tl.int32, bitcast=True), C)
    if CASTS2 == 1:
        scale2 = scale_of(tl.load(live2 + IN_USE + tl.zeros((1, 1), tl.int32)).to(tl.int32, bitcast=True), C2)
    if CASTS == 2 or CASTS2 == 2:
        scale, scale2 = _row_scales(
            a, b, c, mean, rate, y, y2, scales, scales2, scale, scale2, top, row, known, place, columns,
            KIND, CASTS, C, CASTS2, C2, ROWS, COLUMNS,
        )  # fmt: skip
    greatest = tl.zeros((ROWS, COLUMNS), tl.int32)
    greatest2 = greatest
    for start in range(begin, end, COLUMNS):
        column = start + tl.arange(0, COLUMNS).to(tl.int64)
        inside = column < columns
        mask = known[:, None] & inside[None, :]
        offset = top * columns + start
        first, second = _values(a, b, c, mean, rate, offset, place, column, mask, inside, KIND)
        first = _rounded(first, y, mask)
        if WANTS_MAXIMA:
            greatest = tl.maximum(greatest, magnitude_bits(first))
        _emit(
            first, y, codes, turned, scales, scale, offset, place, row, column, rows, columns, mask,
            CASTS, C, BLOCK, WANTS_TURNED, ROWS, COLUMNS,
        )  # fmt: skip
        if KIND == SWIGLU_GRADIENTS:
            second = _rounded(second, y2, mask)
            if WANTS_MAXIMA2:
                greatest2 = tl.maximum(greatest2, magnitude_bits(second))
            _emit(
                second, y2, codes2, turned2, scales2, scale2, offset, place, row, column, rows, columns, mask,
                CASTS2, C2, BLOCK, WANTS_TURNED, ROWS, COLUMNS,
            )  # fmt: skip
    if WANTS_MAXIMA:
        tl.atomic_max(maxima + program % PARTS, tl.max(tl.max(greatest, axis=1), axis=0), sem="relaxed")
    if WANTS_MAXIMA2:
        tl.atomic_max(maxima2 + program % PARTS, tl.max(tl.max(greatest2, axis=1), axis=0), sem="relaxed")


@triton.jit
def settle(
    y,
    codes,
    turned,
    maxima,
    live,
    amax_out,
    scale_out,
    rows,
    columns,
    RECORDS: tl.constexpr,
    WANTS_TURNED: tl.constexpr,
    C: tl.constexpr,
    PARTS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """After `produce` with a scale of earlier steps: what `flat.settle` does, and y.T too where no earlier step gave a scale."""
    program = tl.program_id(0)
    scale, in_use = settled(maxima, live, amax_out, scale_out, program == 0, RECORDS, C, PARTS)
    if in_use <= 0:
        pieces = tl.cdiv(columns, COLUMNS)
        for piece in range(program.to(tl.int64), tl.cdiv(rows, ROWS) * pieces, PROGRAMS):
            row = (piece // pieces) * ROWS + tl.arange(0, ROWS)
            column = (piece % pieces) * COLUMNS + tl.arange(0, COLUMNS)
            mask = (row < rows)[:, None] & (column < columns)[None, :]
            place = row[:, None] * columns + column[None, :]
            values = tl.load(y + place, mask=mask, other=0.0).to(tl.float32)
            found = encode(divided(values, divisor(scale, C), C), values, C)
            store_codes(found, codes, row, column, rows, columns, C, ROWS, COLUMNS)
            if WANTS_TURNED:
                store_codes(tl.trans(found), turned, column, row, columns, rows, C, COLUMNS, ROWS)
