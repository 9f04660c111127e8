"""Cast to nearest and correct the scales (EDEN, eden.py), in one read of the rotated x.

A program holds ROWS rows of one block, [ROWS, BLOCK], as tiles [ROWS, BLOCK / TILE, TILE]. Under
two-level rules an earlier pass computes the largest magnitude of the tensor.

Sums are float64 in the order of `scaling.halved_sum`, which makes the result bit-identical to the
definition. GPUs of compute capability 12.0 add float64 at a 64th of the rate of float32.
"""

import triton
import triton.language as tl

from narrowgauge.ops.quantize.triton_block import store_block
from narrowgauge.ops.quantize.triton_transpose import load_piece, place_of_program
from narrowgauge.ops.triton.elements import decode, encode, magnitude_bits, round_stochastically
from narrowgauge.ops.triton.noise import uniform
from narrowgauge.ops.triton.scales import e4m3_scale_of, reciprocal_of, scale_of


@triton.jit
def _halved_sum(values, A: tl.constexpr, B: tl.constexpr, N: tl.constexpr):
    """Sum values [A, B, N] over the last axis -> [A, B]; N is a power of two of at most 1,024.

    The later half is added to the earlier one until one is left.
    """
    if N >= 1024:
        values = tl.sum(tl.reshape(values, (A, B, 2, 512)), axis=2)
    if N >= 512:
        values = tl.sum(tl.reshape(values, (A, B, 2, 256)), axis=2)
    if N >= 256:
        values = tl.sum(tl.reshape(values, (A, B, 2, 128)), axis=2)
    if N >= 128:
        values = tl.sum(tl.reshape(values, (A, B, 2, 64)), axis=2)
    if N >= 64:
        values = tl.sum(tl.reshape(values, (A, B, 2, 32)), axis=2)
    if N >= 32:
        values = tl.sum(tl.reshape(values, (A, B, 2, 16)), axis=2)
    if N >= 16:
        values = tl.sum(tl.reshape(values, (A, B, 2, 8)), axis=2)
    if N >= 8:
        values = tl.sum(tl.reshape(values, (A, B, 2, 4)), axis=2)
    if N >= 4:
        values = tl.sum(tl.reshape(values, (A, B, 2, 2)), axis=2)
    if N >= 2:
        values = tl.sum(tl.reshape(values, (A, B, 2, 1)), axis=2)
    return tl.reshape(values, (A, B))


@triton.jit
def _rounded(tiles, amax, shared, factor: tl.constexpr, C: tl.constexpr):
    """Return (scales [A, B], codes and decoded values [A, B, N]) for `factor` times the amax of each tile."""
    if C.two_level:
        scale = e4m3_scale_of(amax, shared, C, factor)
        whole = scale * shared
    else:
        scale = scale_of(amax, C)
        whole = scale
    ratio = tiles * reciprocal_of(scale, shared, C)[:, :, None]
    found = encode(ratio, ratio, C)
    values = found if C.decoded else decode(found, C)
    return scale, found, values * whole[:, :, None]


@triton.jit
def _error(tiles, values, A: tl.constexpr, B: tl.constexpr, N: tl.constexpr):
    """Squared error of each tile, float64 [A, B]. Subnormal differences count as zero."""
    off = tiles - values
    off = tl.where(tl.abs(off) < 2.0**-126, 0.0, off).to(tl.float64)
    return _halved_sum(off * off, A, B, N)


@triton.jit
def cast_eden(
    x, out, shared_out,
    C: tl.constexpr, OF_SCALES: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Entry point of the kernel.

    x              a `Matrix`, rotated
    out            an `Orientation`; out.maxima [PARTS] int32 of the whole tensor under two-level rules
    shared_out     [1] float32, the scale of the tensor under two-level rules, else None
    OF_SCALES      constants of E4M3, to which scales are rounded stochastically
    FIRST, SECOND  factors of amax; 0 for SECOND: there is one candidate
    """
    TILES: tl.constexpr = BLOCK // TILE
    down, across = place_of_program(x.columns, BLOCK)
    loaded, row, _ = load_piece(x, down, across, ROWS, BLOCK)
    tiles = tl.reshape(loaded.to(tl.float32), (ROWS, TILES, TILE))
    shared = tl.zeros((1, 1), tl.float32)
    if C.two_level:
        largest = tl.max(tl.load(out.maxima + tl.arange(0, PARTS)), axis=0)
        shared += scale_of(largest, C)
        if tl.program_id(0) == 0:
            tl.store(shared_out, scale_of(largest, C))
    amax = tl.max(magnitude_bits(tiles), axis=2)
    scale, found, values = _rounded(tiles, amax, shared, FIRST, C)
    if SECOND > 0:
        other_scale, other, other_values = _rounded(tiles, amax, shared, SECOND, C)
        is_better = _error(tiles, other_values, ROWS, TILES, TILE) < _error(
            tiles, values, ROWS, TILES, TILE
        )
        scale = tl.where(is_better, other_scale, scale)
        found = tl.where(is_better[:, :, None], other, found)
        values = tl.where(is_better[:, :, None], other_values, values)
    wide = tiles.to(tl.float64)
    of_tiles = _halved_sum(wide * wide, ROWS, TILES, TILE)
    along_tiles = _halved_sum(wide * values.to(tl.float64), ROWS, TILES, TILE)
    squares = _halved_sum(tl.reshape(of_tiles, (ROWS, 1, TILES)), ROWS, 1, TILES)
    along = _halved_sum(tl.reshape(along_tiles, (ROWS, 1, TILES)), ROWS, 1, TILES)
    correction = tl.where(along > 0, squares / along, 1.0).to(tl.float32)
    wanted = scale * correction
    if C.two_level:
        tile = (tl.arange(0, TILES) + across * TILES)[None, :]
        noise = uniform(out.key, row[:, None], tl.cdiv(x.columns, TILE), tile)
        wanted = round_stochastically(wanted, noise, OF_SCALES)
    else:
        wanted = tl.where(wanted < 2.0**C.lowest_exponent, 2.0**C.lowest_exponent, wanted)
        wanted = tl.where(wanted > 2.0**126, 2.0**126, wanted)
    codes = tl.reshape(found, (ROWS, BLOCK))
    store_block(codes, wanted, out, down, across, x.rows, x.columns, C, 1, TILE)
