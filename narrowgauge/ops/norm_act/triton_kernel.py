"""Kernels of `ops.norm_act`.

A program processes ROWS rows and COLUMNS columns at a time, a `Piece`.

forward         norms, and activations with a scale per row: a program processes ROWS whole rows.
                There is a pass for the mean (layer-norm), one for the mean square (norms), one for
                the maxima (a scale per row), and one for the values and their cast; later passes
                read from the cache. Other activations: a program processes a run of adjacent pieces
act_backward    a program processes such a run. A gated activation computes two results from one
                read of g, u and h, one after the other, so that few values are live at a time
norm_backward   rows in registers, and partial sums for weight and bias over all rows of a program.
                There are PARTS of each, and the caller adds them in a fixed order

A piece of a result is rounded, stored, and cast as H says, a `triton_launch.Casting`; the codes of
y.T are transposed through shared memory. out: a `triton_launch.Result`.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from narrowgauge.ops.quantize.triton_block import cast_block, spread, store_block
from narrowgauge.ops.quantize.triton_transpose import IN_USE, store_both
from narrowgauge.ops.triton.elements import decode, magnitude_bits
from narrowgauge.ops.triton.scales import scale_of

LANE = tl.constexpr(8)  # 16-bit elements that a thread loads at once


class Piece(NamedTuple):
    """Position of a program's piece in y [rows, columns].

    rows, columns  shape of y
    down, across   number of the piece from the top and from the left
    first          first column
    place          int64 [ROWS, COLUMNS], offsets of the elements
    row, column    int64 [ROWS], [COLUMNS]
    inside         [COLUMNS], True for columns of y
    mask           [ROWS, COLUMNS], True for elements of y
    """

    rows: Any
    columns: Any
    down: Any
    first: Any
    across: Any
    place: Any
    row: Any
    column: Any
    inside: Any
    mask: Any


@triton.jit
def _piece_at(rows, columns, down, first, H: tl.constexpr):
    """Return the piece in line `down` whose first column is `first`."""
    ROWS: tl.constexpr = H.rows
    COLUMNS: tl.constexpr = H.columns
    row = down * ROWS + tl.arange(0, ROWS)
    column = first + tl.arange(0, COLUMNS).to(tl.int64)
    # int64 by `row`: y may have more than 2**31 elements.
    place = row[:, None] * columns + column[None, :]
    inside = column < columns
    mask = (row < rows)[:, None] & inside[None, :]
    return Piece(rows, columns, down, first, first // COLUMNS, place, row, column, inside, mask)


@triton.jit
def _run_of_program(columns, H: tl.constexpr):
    """Return (line int64, first column, end column) of this program's pieces."""
    program = tl.program_id(0)
    if H.run == 0:
        down, first, beyond = program, 0, columns
    else:
        runs = tl.cdiv(columns, H.run)
        down = program // runs
        first = program % runs * H.run
        beyond = tl.minimum(first + H.run, columns)
    return down.to(tl.int64), first, beyond


@triton.jit
def _rounded(values, y, mask):
    """Round values to y's dtype, zero outside. 16 bits take half the registers."""
    return tl.where(mask, values, 0.0).to(y.dtype.element_ty)


@triton.jit
def _known_scale(out, H: tl.constexpr):
    """Return the scale [1, 1] of earlier steps, or 1 if the scale is found later or not at all."""
    C: tl.constexpr = H.C
    scale = tl.full((1, 1), 1.0, tl.float32)
    if H.scaling == "delayed":
        scale = scale_of(
            tl.load(out.live + IN_USE + tl.zeros((1, 1), tl.int32)).to(tl.int32, bitcast=True), C
        )
    return scale


@triton.jit
def _store_values(values, scale, out, at, H: tl.constexpr):
    """Store the rounded values of piece `at`, and their codes.

    scale  scale of the codes, unless blocks have their own
    """
    C: tl.constexpr = H.C
    tl.store(out.y + at.place, values, mask=at.mask)
    if H.scaling == "delayed" or H.scaling == "row":
        store_both(
            values, scale, at, out.codes, out.transposed, at.down, tl.cast(at.across, tl.int64), C
        )
    if H.scaling == "block":
        BLOCK: tl.constexpr = H.block
        found, scales = cast_block(
            values, None, None, at.row[:, None], at.column[None, :], at.columns, C, 1, BLOCK
        )
        # 64 bits would take more registers, and there are few pieces across.
        across = tl.cast(at.across, tl.int32)
        store_block(found, scales, out, at.down, across, at.rows, at.columns, C, 1, BLOCK)


@triton.jit
def _no_magnitudes(H: tl.constexpr):
    """Return the initial value for `_larger`."""
    ROWS: tl.constexpr = H.rows
    COLUMNS: tl.constexpr = H.columns
    return tl.zeros((ROWS, COLUMNS // LANE), tl.int32)


@triton.jit
def _larger(greatest, values, H: tl.constexpr):
    """Update the largest magnitude of each LANE elements.

    One thread holds these LANE elements, so the maximum takes one register between pieces.
    """
    ROWS: tl.constexpr = H.rows
    COLUMNS: tl.constexpr = H.columns
    return tl.maximum(
        greatest, tl.max(tl.reshape(magnitude_bits(values), (ROWS, COLUMNS // LANE, LANE)), axis=2)
    )


@triton.jit
def _store_maximum(greatest, out, H: tl.constexpr):
    """Combine the largest magnitude with a slot in out.maxima that several programs share."""
    tl.atomic_max(
        out.maxima + tl.program_id(0) % H.parts,
        tl.max(tl.max(greatest, axis=1), axis=0),
        sem="relaxed",
    )


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _normal(x):
    """Return the normal distribution function."""
    return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))


@triton.jit
def _tanh_gate(x):
    """Return (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2."""
    return _sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))


@triton.jit
def _activation(x, FUNCTION: tl.constexpr):
    """Return y float32 of x. A gated FUNCTION returns the activation of its gate."""
    if FUNCTION == "silu" or FUNCTION == "swiglu":
        y = x * _sigmoid(x)
    elif FUNCTION == "gelu" or FUNCTION == "geglu":
        y = x * _normal(x)
    elif FUNCTION == "gelu-tanh" or FUNCTION == "geglu-tanh":
        y = x * _tanh_gate(x)
    else:
        # Not tl.maximum: NaN must pass.
        y = tl.where(x <= 0.0, 0.0, x)
        if FUNCTION == "relu2":
            y = y * y
    return y


@triton.jit
def _slope(x, FUNCTION: tl.constexpr):
    """Return the derivative of `_activation` at x."""
    if FUNCTION == "silu" or FUNCTION == "swiglu":
        # p (1 + x (1 - p)) as p + x p (1 - p), with one rounding for the last two operations.
        share = _sigmoid(x)
        slope = tl.fma(x * share, 1.0 - share, share)
    elif FUNCTION == "gelu" or FUNCTION == "geglu":
        slope = _normal(x) + x * (tl.exp(-0.5 * x * x) * 0.3989422804014327)
    elif FUNCTION == "gelu-tanh" or FUNCTION == "geglu-tanh":
        share = _tanh_gate(x)
        slope = share + x * (
            share * (1.0 - share) * (1.5957691216057308 * (1.0 + 0.134145 * x * x))
        )
    elif FUNCTION == "relu2":
        slope = 2.0 * tl.where(x <= 0.0, 0.0, x)
    else:
        slope = tl.where(x <= 0.0, 0.0, 1.0)
    return slope


@triton.jit
def _input(x, scales, at, K: tl.constexpr):
    """Return the piece `at` of x, float32 [ROWS, COLUMNS].

    scales  None: x holds numbers; else x holds codes by K.C, with a scale per K.block columns
    """
    if scales is None:
        value = tl.load(x + at.place, mask=at.mask, other=0.0).to(tl.float32)
    else:
        C: tl.constexpr = K.C
        ROWS: tl.constexpr = at.mask.shape[0]
        COLUMNS: tl.constexpr = at.mask.shape[1]
        BLOCK: tl.constexpr = min(K.block, COLUMNS)  # a piece may be narrower than a block
        block = (at.first // K.block + tl.arange(0, COLUMNS // BLOCK)).to(tl.int64)
        blocks = tl.cdiv(at.columns, K.block)
        known = (at.row < at.rows)[:, None] & (block < blocks)[None, :]
        scale = tl.load(scales + at.row[:, None] * blocks + block[None, :], mask=known, other=0.0)
        value = decode(tl.load(x + at.place, mask=at.mask, other=0), C) * spread(
            scale, 1, BLOCK, ROWS, COLUMNS
        )
    return value


@triton.jit
def _value(
    inputs, scales, mean, rate, at, FUNCTION: tl.constexpr, GATED: tl.constexpr, K: tl.constexpr
):
    """Return the piece `at` of y, float32 [ROWS, COLUMNS]. mean, rate: [ROWS]."""
    x = _input(inputs[0], scales[0], at, K)
    if FUNCTION == "rms-norm":
        weight = tl.load(inputs[1] + at.column, mask=at.inside, other=0.0).to(tl.float32)
        normal = x * rate[:, None]
        if not K.wide:
            normal = normal.to(K.dtype).to(tl.float32)
        y = normal * weight[None, :]
    elif FUNCTION == "gemma-norm":
        weight = 1.0 + tl.load(inputs[1] + at.column, mask=at.inside, other=0.0).to(tl.float32)
        y = x * rate[:, None] * weight[None, :]
    elif FUNCTION == "layer-norm":
        weight = tl.load(inputs[1] + at.column, mask=at.inside, other=0.0).to(tl.float32)
        bias = tl.load(inputs[2] + at.column, mask=at.inside, other=0.0).to(tl.float32)
        y = (x - mean[:, None]) * rate[:, None] * weight[None, :] + bias[None, :]
    elif GATED:
        up = _input(inputs[1], scales[1], at, K)
        y = _activation(x, FUNCTION).to(K.dtype).to(tl.float32) * up
    else:
        y = _activation(x, FUNCTION)
    return y


@triton.jit
def _row_mean(x, center, rows, columns, H: tl.constexpr, SQUARES: tl.constexpr):
    """Return the mean of each row of x, or of (x - center)^2, [ROWS]."""
    ROWS: tl.constexpr = H.rows
    COLUMNS: tl.constexpr = H.columns
    sums = tl.zeros((ROWS, COLUMNS), tl.float32)
    for first in range(0, columns, COLUMNS):
        at = _piece_at(rows, columns, tl.program_id(0).to(tl.int64), first, H)
        values = tl.load(x + at.place, mask=at.mask, other=0.0).to(tl.float32)
        if SQUARES:
            away = tl.where(at.mask, values - center[:, None], 0.0)
            values = away * away
        sums += values
    return tl.sum(sums, axis=1) / columns


@triton.jit
def _store_run(
    inputs, scales, mean, rate, out, rows, columns,
    FUNCTION: tl.constexpr, GATED: tl.constexpr, K: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """Compute, round, store and cast all pieces of this program."""
    ROWS: tl.constexpr = H.rows
    COLUMNS: tl.constexpr = H.columns
    C: tl.constexpr = H.C
    down, start, beyond = _run_of_program(columns, H)
    scale = _known_scale(out, H)
    if H.scaling == "row":
        largest = tl.zeros((ROWS, COLUMNS), tl.int32)
        for first in range(start, beyond, COLUMNS):
            at = _piece_at(rows, columns, down, first, H)
            values = _rounded(
                _value(inputs, scales, mean, rate, at, FUNCTION, GATED, K), out.y, at.mask
            )
            largest = tl.maximum(largest, magnitude_bits(values))
        row = down * ROWS + tl.arange(0, ROWS)
        of_rows = scale_of(tl.max(largest, axis=1), C)
        tl.store(out.scales + row, of_rows, mask=row < rows)
        scale = of_rows[:, None]
    greatest = _no_magnitudes(H)
    for first in range(start, beyond, COLUMNS):
        at = _piece_at(rows, columns, down, first, H)
        values = _rounded(
            _value(inputs, scales, mean, rate, at, FUNCTION, GATED, K), out.y, at.mask
        )
        if out.maxima is not None:
            greatest = _larger(greatest, values, H)
        _store_values(values, scale, out, at, H)
    if out.maxima is not None:
        _store_maximum(greatest, out, H)


@triton.jit
def forward(
    inputs, scales, statistics, out, eps, rows, columns,
    FUNCTION: tl.constexpr, GATED: tl.constexpr, K: tl.constexpr, H: tl.constexpr,
):  # fmt: skip
    """Entry point of the forward kernel.

    inputs      the tensors
    scales      scales of each tensor, None if it holds no codes
    statistics  (mean or None, r), [rows] float32, written for norms, which have an eps
    K           a `triton_launch.Reading`
    """
    ROWS: tl.constexpr = H.rows
    IS_NORM: tl.constexpr = statistics[1] is not None
    mean = tl.zeros((ROWS,), tl.float32)
    rate = mean
    if IS_NORM:
        row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
        if FUNCTION == "layer-norm":
            mean = _row_mean(inputs[0], mean, rows, columns, H, False)
            tl.store(statistics[0] + row, mean, mask=row < rows)
        squares = _row_mean(inputs[0], mean, rows, columns, H, True)
        # Correctly rounded root and division; the defaults are approximations.
        rate = tl.div_rn(tl.full((ROWS,), 1.0, tl.float32), tl.sqrt_rn(squares + eps))
        tl.store(statistics[1] + row, rate, mask=row < rows)
    _store_run(inputs, scales, mean, rate, out, rows, columns, FUNCTION, GATED, K, H)


@triton.jit
def act_backward(
    inputs, scales, gy, outputs, rows, columns,
    FUNCTION: tl.constexpr, GATED: tl.constexpr, K: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
):  # fmt: skip
    """Entry point of an activation's backward kernel.

    outputs[0] is the gradient of x, or of the gate, cast as FIRST says. A gated function writes the
    gradient of u to outputs[1], cast as SECOND says.
    """
    COLUMNS: tl.constexpr = FIRST.columns
    down, start, beyond = _run_of_program(columns, FIRST)
    scale, greatest = _known_scale(outputs[0], FIRST), _no_magnitudes(FIRST)
    if GATED:
        scale_of_up, greatest_of_up = _known_scale(outputs[1], SECOND), greatest
    # Elements outside were loaded as zero, and so are their gradients.
    for first in range(start, beyond, COLUMNS):
        at = _piece_at(rows, columns, down, first, FIRST)
        x = _input(inputs[0], scales[0], at, K)
        h = tl.load(gy + at.place, mask=at.mask, other=0.0).to(tl.float32)
        if GATED:
            # The gradient of u comes first: u is loaded only after it is stored, which keeps fewer
            # values in registers.
            values = (h * _activation(x, FUNCTION)).to(outputs[1].y.dtype.element_ty)
            if outputs[1].maxima is not None:
                greatest_of_up = _larger(greatest_of_up, values, SECOND)
            _store_values(values, scale_of_up, outputs[1], at, SECOND)
            h *= _input(inputs[1], scales[1], at, K)
        values = (h * _slope(x, FUNCTION)).to(outputs[0].y.dtype.element_ty)
        if outputs[0].maxima is not None:
            greatest = _larger(greatest, values, FIRST)
        _store_values(values, scale, outputs[0], at, FIRST)
    if outputs[0].maxima is not None:
        _store_maximum(greatest, outputs[0], FIRST)
    if GATED and outputs[1].maxima is not None:
        _store_maximum(greatest_of_up, outputs[1], SECOND)


@triton.jit
def norm_backward(
    inputs,
    statistics,
    h,
    dx,
    sums,
    rows,
    columns,
    PLUS: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Entry point of a norm's backward kernel.

        dx = r (w h - n mean(w h n) [- mean(w h)]),  n = (x - mean) r

    The term in brackets and the mean exist only for layer-norm.

    x, h, dx  [rows, columns]
    sums      (for w, for b or None) [PARTS, columns] float32
    PLUS      number that is added to the weight
    WIDTH     a power of two >= columns
    """
    x, weight = inputs[0], inputs[1]
    means, rates = statistics
    part = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH).to(tl.int64)
    inside = column < columns
    w = PLUS + tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
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
    # Partial sums are stored, not added by atomics, whose order would change the bits from run to
    # run.
    tl.store(sums[0] + part * columns + column, of_weight, mask=inside)
    if means is not None:
        tl.store(sums[1] + part * columns + column, of_bias, mask=inside)
