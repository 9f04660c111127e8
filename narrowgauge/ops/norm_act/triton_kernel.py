"""Kernels of `ops.norm_act`. What happens to a piece of a result once it is computed: triton_store.py.

forward         a norm, and an activation with a scale per row: a program takes ROWS whole rows, with a pass for the mean (layer-norm),
                one for the mean square (norms), one for the maxima (a scale per row), and one for the values and their cast; the later
                passes read out of the cache. Other activations: a program takes one piece
act_backward    a program takes one piece; of swiglu two results come from one read of g, u and h
norm_backward   rows in registers, sums for weight and bias over all rows that a program takes, which the caller adds up in a
                fixed order: PARTS each
"""

import triton
import triton.language as tl

from narrowgauge.ops.norm_act.triton_store import (
    BY_ROW,
    known_scale,
    piece_at,
    piece_of_program,
    rounded,
    store_maximum,
    store_piece,
    store_values,
)
from narrowgauge.ops.triton.elements import magnitude_bits
from narrowgauge.ops.triton.scales import scale_of

# FUNCTION, in the order of `spec.KINDS`.
RMS_NORM, LAYER_NORM, SWIGLU, GELU = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)


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
def _value(inputs, mean, rate, at, FUNCTION: tl.constexpr):
    """y float32 [ROWS, COLUMNS] of the `Piece` at; mean, rate [ROWS]."""
    raw = tl.load(inputs[0] + at.start + at.place, mask=at.mask, other=0.0)
    x = raw.to(tl.float32)
    if FUNCTION == RMS_NORM:
        weight = tl.load(inputs[1] + at.column, mask=at.inside, other=0.0).to(tl.float32)
        y = (x * rate[:, None]).to(raw.dtype).to(tl.float32) * weight[None, :]
    elif FUNCTION == LAYER_NORM:
        weight = tl.load(inputs[1] + at.column, mask=at.inside, other=0.0).to(tl.float32)
        bias = tl.load(inputs[2] + at.column, mask=at.inside, other=0.0).to(tl.float32)
        y = (x - mean[:, None]) * rate[:, None] * weight[None, :] + bias[None, :]
    elif FUNCTION == SWIGLU:
        up = tl.load(inputs[1] + at.start + at.place, mask=at.mask, other=0.0).to(tl.float32)
        y = (x * _sigmoid(x)).to(raw.dtype).to(tl.float32) * up
    elif FUNCTION == GELU:
        y = x * _normal(x)
    else:
        y = x * _tanh_gate(x)
    return y


@triton.jit
def _row_mean(x, center, rows, columns, H: tl.constexpr, SQUARES: tl.constexpr):
    """The mean of each row of x, or of (x - center)^2, [ROWS]."""
    ROWS: tl.constexpr = H.rows
    COLUMNS: tl.constexpr = H.columns
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, columns, COLUMNS):
        at = piece_at(rows, columns, tl.program_id(0).to(tl.int64), first, H)
        values = tl.load(x + at.start + at.place, mask=at.mask, other=0.0).to(tl.float32)
        if SQUARES:
            away = tl.where(at.mask, values - center[:, None], 0.0)
            values = away * away
        sums += values
    return tl.sum(sums, axis=1) / columns


@triton.jit
def _store_rows(inputs, mean, rate, out, rows, columns, FUNCTION: tl.constexpr, H: tl.constexpr):
    """All pieces of the rows that are this program's, rounded, with their cast."""
    ROWS: tl.constexpr = H.rows
    COLUMNS: tl.constexpr = H.columns
    C: tl.constexpr = H.C
    down = tl.program_id(0).to(tl.int64)
    scale = known_scale(out, H)
    if H.scaling == BY_ROW:
        largest = tl.zeros((ROWS, COLUMNS), tl.int32)
        for first in range(0, columns, COLUMNS):
            at = piece_at(rows, columns, down, first, H)
            values = rounded(_value(inputs, mean, rate, at, FUNCTION), out.y, at.mask)
            largest = tl.maximum(largest, magnitude_bits(values))
        row = down * ROWS + tl.arange(0, ROWS)
        of_rows = scale_of(tl.max(largest, axis=1), C)
        tl.store(out.scales + row, of_rows, mask=row < rows)
        scale = of_rows[:, None]
    greatest = tl.zeros((ROWS, COLUMNS), tl.int32)
    for first in range(0, tl.cast(columns, tl.int64), COLUMNS):
        at = piece_at(rows, columns, down, first, H)
        values = rounded(_value(inputs, mean, rate, at, FUNCTION), out.y, at.mask)
        if out.maxima is not None:
            greatest = tl.maximum(greatest, magnitude_bits(values))
        store_values(values, scale, out, at, H)
    if out.maxima is not None:
        store_maximum(greatest, out, H)


@triton.jit
def forward(inputs, statistics, out, eps, rows, columns, FUNCTION: tl.constexpr, H: tl.constexpr):
    """inputs: the tensors. Of norms, which have an eps, the statistics (mean or None, r), [rows] float32, are written."""
    ROWS: tl.constexpr = H.rows
    IS_NORM: tl.constexpr = statistics[1] is not None
    mean = tl.zeros((ROWS,), tl.float32)
    rate = mean
    if IS_NORM:
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        if FUNCTION == LAYER_NORM:
            mean = _row_mean(inputs[0], mean, rows, columns, H, False)
            tl.store(statistics[0] + row, mean, mask=row < rows)
        squares = _row_mean(inputs[0], mean, rows, columns, H, True)
        rate = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.sqrt_rn(squares + eps))
        tl.store(statistics[1] + row, rate, mask=row < rows)
    if IS_NORM or H.scaling == BY_ROW:
        _store_rows(inputs, mean, rate, out, rows, columns, FUNCTION, H)
    else:
        at = piece_of_program(rows, columns, H)
        store_piece(_value(inputs, mean, rate, at, FUNCTION), out, at, H)


@triton.jit
def act_backward(inputs, gy, outputs, rows, columns, FUNCTION: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """The gradient of x -> outputs[0], cast as FIRST says; of swiglu, whose gate is x, that of u -> outputs[1], as SECOND says."""
    at = piece_of_program(rows, columns, FIRST)
    here = at.start + at.place
    x = tl.load(inputs[0] + here, mask=at.mask, other=0.0).to(tl.float32)
    h = tl.load(gy + here, mask=at.mask, other=0.0).to(tl.float32)
    if FUNCTION == SWIGLU:
        share = _sigmoid(x)
        u = tl.load(inputs[1] + here, mask=at.mask, other=0.0).to(tl.float32)
        store_piece(h * u * (share * (1.0 + x * (1.0 - share))), outputs[0], at, FIRST)
        store_piece(h * (x * share), outputs[1], at, SECOND)
    elif FUNCTION == GELU:
        slope = tl.exp(-0.5 * x * x) * 0.3989422804014327
        store_piece(h * (_normal(x) + x * slope), outputs[0], at, FIRST)
    else:
        share = _tanh_gate(x)
        slope = 1.5957691216057308 * (1.0 + 0.134145 * x * x)
        store_piece(h * (share + x * (share * (1.0 - share) * slope)), outputs[0], at, FIRST)


@triton.jit
def norm_backward(inputs, statistics, h, dx, sums, rows, columns, PARTS: tl.constexpr, WIDTH: tl.constexpr):
    """x, h, dx [rows, columns]; sums (for w, for b or None) [PARTS, columns] float32; WIDTH: a power of two of at least `columns`.

    dx = r (w h - n mean(w h n) [- mean(w h)]),  n = (x - mean) r;  without a mean that is 0
    """
    x, weight = inputs[0], inputs[1]
    means, rates = statistics
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
    tl.store(sums[0] + part * columns + column, of_weight, mask=inside)
    if means is not None:
        tl.store(sums[1] + part * columns + column, of_bias, mask=inside)
