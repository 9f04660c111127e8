"""Blocks that share a scale, codes in both orientations from one read: 1 x 128 and 128 x 128, 1 x 32 with power-of-two scales (MX).

1 x 16 and 16 x 16 with scales of two levels (NVFP4) as well: the tensor's largest magnitude comes from a pass ahead of it.

A program takes ROWS x COLUMNS elements, whole blocks of both orientations, and keeps them in registers:

    x [ROWS, COLUMNS] as [ROWS / A, A, COLUMNS / B, B]    one amax, one scale per [ROWS / A, COLUMNS / B]
    x.T in blocks of A x B is x in blocks of B x A         the same with A and B exchanged, then transposed

A square block has the same scales in both orientations; rounded to nearest, the codes of x.T are those of x.
"""

import triton
import triton.language as tl

from narrowgauge.ops.quantize.triton_transpose import load_piece, place_of_program, store_codes
from narrowgauge.ops.triton.elements import encode, magnitude_bits
from narrowgauge.ops.triton.noise import uniform
from narrowgauge.ops.triton.scales import e4m3_scale_of, reciprocal_of, scale_of


@triton.jit
def _block_amax(bits, A: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """bits [ROWS, COLUMNS] -> the largest of each block [ROWS / A, COLUMNS / B]."""
    if B > 1:
        bits = tl.max(tl.reshape(bits, (ROWS, COLUMNS // B, B)), axis=2)
    if A > 1:
        bits = tl.max(tl.reshape(bits, (ROWS // A, A, COLUMNS // B)), axis=1)
    return bits


@triton.jit
def spread(scale, A: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """scale [ROWS / A, COLUMNS / B] -> [ROWS, COLUMNS]."""
    full = tl.broadcast_to(scale[:, None, :, None], (ROWS // A, A, COLUMNS // B, B))
    return tl.reshape(full, (ROWS, COLUMNS))


@triton.jit
def cast_block(values, shared, key, first, second, length, C: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """Of values [ROWS, COLUMNS] (codes, scales [ROWS / A, COLUMNS / B]); the noise is that of place (first, second).

    shared: of two levels, the float32 of the tensor; else unused
    """
    ROWS: tl.constexpr = values.shape[0]
    COLUMNS: tl.constexpr = values.shape[1]
    amax = _block_amax(magnitude_bits(values), A, B, ROWS, COLUMNS)
    scale = e4m3_scale_of(amax, shared, C) if C.two_level else scale_of(amax, C)
    y = values.to(tl.float32) * spread(reciprocal_of(scale, shared, C), A, B, ROWS, COLUMNS)
    noise = uniform(key, first, length, second) if C.stochastic else y
    return encode(y, noise, C), scale


@triton.jit
def cast_blocks(
    x, plain, transposed, shared_out,
    C: tl.constexpr, PARTS: tl.constexpr, A: tl.constexpr, B: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """x, a `Matrix`, in blocks of A x B -> `Orientation` plain; x.T in blocks of A x B -> transposed.

    plain.scales [ceil(rows / A), ceil(columns / B)], transposed.scales [ceil(columns / A), ceil(rows / B)]
    plain.maxima [PARTS] int32 of the whole tensor and shared_out [1] float32: of two levels, else None
    """
    down, across = place_of_program(x.columns, COLUMNS)
    values, row, column = load_piece(x, down, across, ROWS, COLUMNS)
    shared = tl.zeros((1, 1), tl.float32)
    if C.two_level:
        shared = scale_of(tl.max(tl.load(plain.maxima + tl.arange(0, PARTS)), axis=0), C)
        if tl.program_id(0) == 0:
            tl.store(shared_out, shared * C.headroom)
    SAME: tl.constexpr = A == B and not C.stochastic
    if plain.codes is not None or SAME:
        found, scale = cast_block(values, shared, plain.key, row[:, None], column[None, :], x.columns, C, A, B)
        if plain.codes is not None:
            store_block(found, scale, plain, down, across, x.rows, x.columns, C, A, B)
        if transposed.codes is not None and SAME:
            store_block(tl.trans(found), tl.trans(scale), transposed, across, down, x.columns, x.rows, C, A, B)
    if transposed.codes is not None and not SAME:
        found, scale = cast_block(values, shared, transposed.key, column[None, :], row[:, None], x.rows, C, B, A)
        store_block(tl.trans(found), tl.trans(scale), transposed, across, down, x.columns, x.rows, C, A, B)


@triton.jit
def store_block(found, scale, out, down, across, rows, columns, C: tl.constexpr, A: tl.constexpr, B: tl.constexpr):
    """The piece (down, across) of codes [rows, columns] and of scales [ceil(rows / A), ceil(columns / B)] into those of `out`.

    Scales of 1 x 128 lie column by column, see `spec.empty_scales`.
    """
    ROWS: tl.constexpr = found.shape[0]
    COLUMNS: tl.constexpr = found.shape[1]
    store_codes(found, out.codes, down, across, rows, columns, C)
    high, wide = tl.cdiv(rows, A), tl.cdiv(columns, B)
    i = tl.arange(0, ROWS // A) + down * (ROWS // A)
    j = tl.arange(0, COLUMNS // B) + across * (COLUMNS // B)
    place = j[None, :] * high + i[:, None] if A == 1 and B == 128 else i[:, None] * wide + j[None, :]
    tl.store(out.scales + place, scale, mask=(i < high)[:, None] & (j < wide)[None, :])
