"""Blocks that share a scale, codes in both orientations from one read: 1 x 128 and 128 x 128, 1 x 32 with power-of-two scales (MX).

1 x 16 and 16 x 16 with scales of two levels (NVFP4) as well: the tensor's largest magnitude comes from a pass ahead of it.

A program takes ROWS x COLUMNS elements, whole blocks of both orientations, and keeps them in registers:

    x [ROWS, COLUMNS] as [ROWS / A, A, COLUMNS / B, B]    one amax, one scale per [ROWS / A, COLUMNS / B]
    x.T in blocks of A x B is x in blocks of B x A         the same with A and B exchanged, then transposed

A square block has the same scales in both orientations; rounded to nearest, the codes of x.T are those of x.
"""

import triton
import triton.language as tl

from narrowgauge.ops.quantize.triton_transpose import place_of_program, store_codes
from narrowgauge.ops.triton.elements import encode, magnitude_bits
from narrowgauge.ops.triton.noise import uniform
from narrowgauge.ops.triton.scales import divided, divisor, e4m3_scale_of, reciprocal_of, scale_of, shared_scale_of


@triton.jit
def _block_amax(bits, A: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """bits [ROWS, COLUMNS] -> the largest of each block [ROWS / A, COLUMNS / B]."""
    if B > 1:
        bits = tl.max(tl.reshape(bits, (ROWS, COLUMNS // B, B)), axis=2)
    if A > 1:
        bits = tl.max(tl.reshape(bits, (ROWS // A, A, COLUMNS // B)), axis=1)
    return bits


@triton.jit
def _spread(scale, A: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """scale [ROWS / A, COLUMNS / B] -> [ROWS, COLUMNS]."""
    full = tl.broadcast_to(scale[:, None, :, None], (ROWS // A, A, COLUMNS // B, B))
    return tl.reshape(full, (ROWS, COLUMNS))


@triton.jit
def _cast(
    values,
    shared,
    key,
    first,
    second,
    length,
    C: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """(codes [ROWS, COLUMNS], scales [ROWS / A, COLUMNS / B]); the noise is that of place (first, second).

    shared: of two levels, the float32 of the tensor; else unused
    """
    amax = _block_amax(magnitude_bits(values), A, B, ROWS, COLUMNS)
    if C.two_level:
        scale = e4m3_scale_of(amax, shared, C)
        by = (reciprocal_of(scale, shared, C),)
    else:
        scale = scale_of(amax, C)
        by = divisor(scale, C)
    if C.corrects and not C.multiplies:
        by = (
            _spread(by[0], A, B, ROWS, COLUMNS),
            _spread(by[1], A, B, ROWS, COLUMNS),
            _spread(by[2], A, B, ROWS, COLUMNS),
        )
    else:
        by = (_spread(by[0], A, B, ROWS, COLUMNS),)
    y = divided(values.to(tl.float32), by, C)
    noise = uniform(key, first, length, second) if C.stochastic else y
    return encode(y, noise, C), scale


@triton.jit
def cast_blocks(
    x,
    codes,
    turned,
    scales,
    turned_scales,
    maxima,
    shared_out,
    key,
    turned_key,
    rows,
    columns,
    stride,
    C: tl.constexpr,
    PARTS: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
    WANTS_CODES: tl.constexpr,
    WANTS_TURNED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """x [rows, columns] in blocks of A x B -> codes and scales; x.T in blocks of A x B -> turned and turned_scales.

    scales [ceil(rows / A), ceil(columns / B)], turned_scales [ceil(columns / A), ceil(rows / B)]; what is not wanted may be None
    maxima [PARTS] int32 of the whole tensor and shared_out [1] float32: of two levels, else None
    """
    down, across = place_of_program(columns, COLUMNS)
    row = down * ROWS + tl.arange(0, ROWS)
    column = across * COLUMNS + tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (column < columns)[None, :]
    values = tl.load(x + row[:, None] * stride + column[None, :], mask=mask, other=0.0)
    shared = tl.zeros((1, 1), tl.float32)
    if C.two_level:
        shared = shared_scale_of(tl.max(tl.load(maxima + tl.arange(0, PARTS)), axis=0), C)
        if tl.program_id(0) == 0:
            tl.store(shared_out, shared * C.headroom)
    SAME: tl.constexpr = A == B and not C.stochastic
    if WANTS_CODES or SAME:
        found, scale = _cast(values, shared, key, row[:, None], column[None, :], columns, C, A, B, ROWS, COLUMNS)
        if WANTS_CODES:
            store_codes(found, codes, row, column, rows, columns, C, ROWS, COLUMNS)
            _store_scales(scale, scales, rows, columns, down, across, A, B, ROWS, COLUMNS)
        if WANTS_TURNED and SAME:
            store_codes(tl.trans(found), turned, column, row, columns, rows, C, COLUMNS, ROWS)
            _store_scales(tl.trans(scale), turned_scales, columns, rows, across, down, A, B, COLUMNS, ROWS)
    if WANTS_TURNED and not SAME:
        found, scale = _cast(values, shared, turned_key, column[None, :], row[:, None], rows, C, B, A, ROWS, COLUMNS)
        store_codes(tl.trans(found), turned, column, row, columns, rows, C, COLUMNS, ROWS)
        _store_scales(tl.trans(scale), turned_scales, columns, rows, across, down, A, B, COLUMNS, ROWS)


@triton.jit
def _store_scales(
    scale,
    scales,
    rows,
    columns,
    down,
    across,
    A: tl.constexpr,
    B: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """scale [ROWS / A, COLUMNS / B] of the piece (down, across) into scales [ceil(rows / A), ceil(columns / B)]."""
    high, wide = tl.cdiv(rows, A), tl.cdiv(columns, B)
    i = down * (ROWS // A) + tl.arange(0, ROWS // A)
    j = across * (COLUMNS // B) + tl.arange(0, COLUMNS // B)
    tl.store(scales + i[:, None] * wide + j[None, :], scale, mask=(i < high)[:, None] & (j < wide)[None, :])
