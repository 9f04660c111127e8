"""Cast blocks that share a scale, in both orientations from one read.

Blocks may be 1 x 128, 128 x 128, or 1 x 32 with power-of-two scales (MX). For 1 x 16 and 16 x 16
with two-level scales (NVFP4), an earlier pass computes the tensor's largest magnitude.

A program holds ROWS x COLUMNS elements in registers, whole blocks of both orientations:

    x in blocks of A x B    viewed as [ROWS / A, A, COLUMNS / B, B]; amax and scale are
                            [ROWS / A, COLUMNS / B]
    x.T in blocks of A x B  x in blocks of B x A, i.e. the same with A and B exchanged, transposed

A square block has the same scales in both orientations. Rounded to nearest, the codes of x.T are
then the transposed codes of x.
"""

import triton
import triton.language as tl

from narrowgauge.ops.quantize.triton_transpose import load_piece, place_of_program, store_codes
from narrowgauge.ops.triton.elements import encode, magnitude_bits
from narrowgauge.ops.triton.noise import uniform
from narrowgauge.ops.triton.scales import e4m3_scale_of, reciprocal_of, scale_of


@triton.jit
def _block_amax(bits, A: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Reduce bits [ROWS, COLUMNS] to the largest of each block [ROWS / A, COLUMNS / B]."""
    if B > 1:
        bits = tl.max(tl.reshape(bits, (ROWS, COLUMNS // B, B)), axis=2)
    if A > 1:
        bits = tl.max(tl.reshape(bits, (ROWS // A, A, COLUMNS // B)), axis=1)
    return bits


@triton.jit
def spread(scale, A: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Expand scale [ROWS / A, COLUMNS / B] to [ROWS, COLUMNS]."""
    full = tl.broadcast_to(scale[:, None, :, None], (ROWS // A, A, COLUMNS // B, B))
    return tl.reshape(full, (ROWS, COLUMNS))


@triton.jit
def cast_block(
    values, shared, key, first, second, length, C: tl.constexpr, A: tl.constexpr, B: tl.constexpr
):
    """Return (codes, scales [ROWS / A, COLUMNS / B]) of values [ROWS, COLUMNS].

    shared         two-level rules: the float32 scale of the tensor; else unused
    first, second  element indices for the noise
    length         row length for the noise
    """
    ROWS: tl.constexpr = values.shape[0]
    COLUMNS: tl.constexpr = values.shape[1]
    amax = _block_amax(magnitude_bits(values), A, B, ROWS, COLUMNS)
    scale = e4m3_scale_of(amax, shared, C) if C.two_level else scale_of(amax, C)
    y = values.to(tl.float32) * spread(reciprocal_of(scale, shared, C), A, B, ROWS, COLUMNS)
    noise = uniform(key, first, length, second) if C.stochastic else y
    return encode(y, noise, C), scale


@triton.jit
def shared_scale(maxima, out, C: tl.constexpr, PARTS: tl.constexpr):
    """Return the scale of a tensor before headroom under two-level rules, else zeros.

    maxima  [PARTS] int32 of the whole tensor under two-level rules, else None
    out     [1] float32, receives the scale under two-level rules, else None
    """
    shared = tl.zeros((1, 1), tl.float32)
    if C.two_level:
        shared = scale_of(tl.max(tl.load(maxima + tl.arange(0, PARTS)), axis=0), C)
        # All programs compute the same value; one stores it.
        if tl.program_id(0) == 0:
            tl.store(out, shared * C.headroom)
    return shared


@triton.jit
def cast_blocks(
    x, plain, transposed, shared_out,
    C: tl.constexpr, PARTS: tl.constexpr, A: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Cast x in blocks of A x B, and x.T in blocks of A x B.

    x                  a `Matrix`
    plain, transposed  `Orientation`s of x and of x.T
    plain.scales       [ceil(rows / A), ceil(columns / B)]
    transposed.scales  [ceil(columns / A), ceil(rows / B)]
    plain.maxima       [PARTS] int32 of the whole tensor under two-level rules, else None
    shared_out         [1] float32, the scale of the tensor under two-level rules, else None
    """
    down, across = place_of_program(x.columns, COLUMNS)
    values, row, column = load_piece(x, down, across, ROWS, COLUMNS)
    shared = shared_scale(plain.maxima, shared_out, C, PARTS)
    # Stochastic rounding draws other noise for x.T, so its codes differ.
    SAME: tl.constexpr = A == B and not C.stochastic
    if plain.codes is not None or SAME:
        found, scale = cast_block(
            values, shared, plain.key, row[:, None], column[None, :], x.columns, C, A, B
        )
        if plain.codes is not None:
            store_block(found, scale, plain, down, across, x.rows, x.columns, C, A, B)
        if transposed.codes is not None and SAME:
            store_block(
                tl.trans(found),
                tl.trans(scale),
                transposed,
                across,
                down,
                x.columns,
                x.rows,
                C,
                A,
                B,
            )
    if transposed.codes is not None and not SAME:
        found, scale = cast_block(
            values, shared, transposed.key, column[None, :], row[:, None], x.rows, C, B, A
        )
        store_block(
            tl.trans(found), tl.trans(scale), transposed, across, down, x.columns, x.rows, C, A, B
        )


@triton.jit
def unit_codes(scale, C: tl.constexpr):
    """Return the bytes of scales: E4M3 of numbers that it has, or the exponent of powers of two."""
    bits = scale.to(tl.int32, bitcast=True)
    if C.two_level:
        exponent = (bits >> 23) - 120  # E4M3's bias is 7, float32's 127
        normal = (exponent << 3) | ((bits >> 20) & 7)
        # Below 2^-6 a code counts steps of 2^-9.
        code = tl.where(exponent >= 1, normal, (scale * 512.0).to(tl.int32))
        code = tl.where(scale != scale, 0x7F, code)
    else:
        code = (bits >> 23) & 0xFF  # 0xFF is NaN in both
    return code.to(tl.uint8)


@triton.jit
def store_block(
    found,
    scale,
    out,
    down,
    across,
    rows,
    columns,
    C: tl.constexpr,
    A: tl.constexpr,
    B: tl.constexpr,
):
    """Store piece (down, across) of codes and scales.

    codes are [rows, columns], scales [ceil(rows / A), ceil(columns / B)]. Scales of 1 x 128 are
    stored column by column, see `spec.empty_scales`; with `out.units` they are stored there alone.
    """
    ROWS: tl.constexpr = found.shape[0]
    COLUMNS: tl.constexpr = found.shape[1]
    store_codes(found, out.codes, down, across, rows, columns, C)
    # cuBLAS reads scales of 1 x 128 with neighbouring rows adjacent, see ops/mm/cublas.py.
    high, wide = tl.cdiv(rows, A), tl.cdiv(columns, B)
    i = tl.arange(0, ROWS // A) + down * (ROWS // A)
    j = tl.arange(0, COLUMNS // B) + across * (COLUMNS // B)
    if out.units is None:
        place = (
            j[None, :] * high + i[:, None]
            if A == 1 and B == 128
            else i[:, None] * wide + j[None, :]
        )
        tl.store(out.scales + place, scale, mask=(i < high)[:, None] & (j < wide)[None, :])
    else:
        # A byte for each row, in cuBLAS' blocks of 128 rows and 4 columns: `scaling.swizzled`.
        row = tl.arange(0, ROWS) + down * ROWS
        block = (row // 128)[:, None] * ((wide + 3) // 4) + (j // 4)[None, :]
        within = (row % 32 * 16 + row % 128 // 32 * 4)[:, None] + (j % 4)[None, :]
        every = spread(unit_codes(scale, C), A, 1, ROWS, COLUMNS // B)
        kept = (row < rows)[:, None] & (j < wide)[None, :]
        tl.store(out.units + block * 512 + within, every, mask=kept)
