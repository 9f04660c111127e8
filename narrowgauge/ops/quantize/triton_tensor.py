"""One scale per tensor, codes in the order of the input: the largest magnitude first, then the cast; or both in one pass.

    amax          PARTS programs walk over the tensor, each BLOCK elements at a time, and leave a maximum each
    cast          a program per BLOCK elements reads the maxima, which the caches hold, and casts
    cast_delayed  PARTS programs cast by the scale of earlier steps and leave the maxima of this one        (delayed scaling)
    settle        after cast_delayed: the window's state, the scale; and the cast itself if no earlier step gave one

x is read as n elements in the order of memory, so the caller gives dense memory. A tensor that fits in the second-level cache
(50 MB on Hopper) is read from memory once. Two 4-bit codes lie in a byte: then each row of x has an even length.
"""

import triton
import triton.language as tl

from narrowgauge.ops.triton.elements import encode, magnitude_bits, pack
from narrowgauge.ops.triton.noise import uniform
from narrowgauge.ops.triton.scales import divided, divisor, scale_of

IN_USE = tl.constexpr(0)  # the places of `AmaxBuffers.live`
SEEN = tl.constexpr(1)
NONFINITE = tl.constexpr(2)


@triton.jit
def amax(x, maxima, n, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """maxima [PARTS] int32: the bits of the largest magnitude that each program saw."""
    part = tl.program_id(0)
    largest = tl.zeros((BLOCK,), tl.int32)
    for start in range(part.to(tl.int64) * BLOCK, n, PARTS * BLOCK):
        index = start + tl.arange(0, BLOCK)
        largest = tl.maximum(largest, magnitude_bits(tl.load(x + index, mask=index < n, other=0.0)))
    tl.store(maxima + part, tl.max(largest, axis=0))


@triton.jit
def _cast_block(values, codes, start, n, scale, key, C: tl.constexpr, BLOCK: tl.constexpr):
    """Casts the BLOCK elements `values` that begin at `start`."""
    index = start + tl.arange(0, BLOCK)
    y = divided(values.to(tl.float32), divisor(scale, C), C)
    noise = uniform(key, index, 1, tl.zeros_like(index)) if C.stochastic else y
    found = encode(y, noise, C)
    if C.packed:
        place = start // 2 + tl.arange(0, BLOCK // 2)
        tl.store(codes + place, tl.reshape(pack(found, 1, BLOCK), (BLOCK // 2,)), mask=place < n // 2)
    else:
        tl.store(codes + index, found, mask=index < n)


@triton.jit
def cast(x, codes, maxima, scale_out, key, n, C: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """codes [n] uint8, or [n / 2] where C.packed; scale_out [1] float32, from the largest of maxima [PARTS]."""
    start = tl.program_id(0).to(tl.int64) * BLOCK
    index = start + tl.arange(0, BLOCK)
    values = tl.load(x + index, mask=index < n, other=0.0)
    scale = scale_of(tl.max(tl.load(maxima + tl.arange(0, PARTS)), axis=0), C)
    if tl.program_id(0) == 0:
        tl.store(scale_out, scale)
    _cast_block(values, codes, start, n, scale, key, C, BLOCK)


@triton.jit
def cast_delayed(x, codes, maxima, live, key, n, C: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """codes by the scale of live[IN_USE], if that is above zero; maxima [PARTS] int32 of x in any case."""
    part = tl.program_id(0)
    in_use = tl.load(live + IN_USE)
    scale = scale_of(in_use.to(tl.int32, bitcast=True), C)
    largest = tl.zeros((BLOCK,), tl.int32)
    for start in range(part.to(tl.int64) * BLOCK, n, PARTS * BLOCK):
        index = start + tl.arange(0, BLOCK)
        values = tl.load(x + index, mask=index < n, other=0.0)
        largest = tl.maximum(largest, magnitude_bits(values))
        if in_use > 0:
            _cast_block(values, codes, start, n, scale, key, C, BLOCK)
    tl.store(maxima + part, tl.max(largest, axis=0))


@triton.jit
def settled(state, is_first, RECORDS: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr):
    """(scale, live[IN_USE]) once state.maxima is whole: amax as `update_amax` chooses it; the first program writes both and live."""
    live = state.live
    in_use = tl.load(live + IN_USE)
    own_bits = tl.max(tl.load(state.maxima + tl.arange(0, PARTS)), axis=0)
    own = own_bits.to(tl.float32, bitcast=True)
    finite = own_bits < 0x7F800000
    amax = tl.where(finite & (in_use > 0), in_use, own)
    scale = scale_of(amax.to(tl.int32, bitcast=True), C)
    if is_first:
        tl.store(state.amax, amax)
        tl.store(state.scale, scale)
        if RECORDS:  # nobody else reads these two
            seen = tl.load(live + SEEN)
            tl.store(live + SEEN, tl.where(finite, tl.maximum(seen, own), seen))
            tl.store(live + NONFINITE, tl.where(finite, tl.load(live + NONFINITE), 1.0))
    return scale, in_use


@triton.jit
def settle(x, codes, state, key, n, RECORDS: tl.constexpr, C: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """After cast_delayed: state.scale and state.amax, as `update_amax` chooses it, and state.live as it updates it.

    Casts only where no earlier step gave a scale. An amax that is not finite makes the scale NaN; the codes stay as they are,
    since that scale makes NaN of all of them.
    """
    part = tl.program_id(0)
    scale, in_use = settled(state, part == 0, RECORDS, C, PARTS)
    if in_use <= 0:
        for start in range(part.to(tl.int64) * BLOCK, n, PARTS * BLOCK):
            index = start + tl.arange(0, BLOCK)
            values = tl.load(x + index, mask=index < n, other=0.0)
            _cast_block(values, codes, start, n, scale, key, C, BLOCK)
