"""Rotary position embedding of queries and keys in one launch; `ops.rotary` has the contract.

A program processes one token: it reads the cosines and sines once for all heads, HEADS heads at a
time.

    y1 = x1 c1 - x2 s1        gradient (INVERSE): y1 = x1 c1 + x2 s2
    y2 = x2 c2 + x1 s2                            y2 = x2 c2 - x1 s1

x1 and x2 are the halves of a head. Each product is rounded to y's dtype before the sum, as separate
operations would round.
"""

from __future__ import annotations

import triton
import triton.language as tl

from narrowgauge.ops.triton.elements import negated


@triton.jit
def _halves(x, batch, head, token, place, mask, HALF: tl.constexpr):
    """Load both halves of a head of the `rotary.Strided` x, float32 in the shape of mask."""
    first = x.data + batch * x.batch + token * x.token + head * x.head + place
    x1 = tl.load(first, mask=mask, other=0.0).to(tl.float32)
    return x1, tl.load(first + HALF, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def rotary(
    inputs, outputs, angles, heads, tokens,
    HALF: tl.constexpr, INVERSE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """Entry point of the kernel.

    inputs, outputs  (q, k), each a `rotary.Strided`
    angles           (cos, sin), each a `rotary.Strided`
    heads            numbers of heads of q and k
    WIDTH            a power of two >= HALF
    """
    # int64: offsets of large batches exceed 2**31 elements.
    program = tl.program_id(0).to(tl.int64)
    batch, token = program // tokens, program % tokens
    place = tl.arange(0, WIDTH)[None, :]
    inside = place < HALF
    c1, c2 = _halves(angles[0], batch, 0, token, place, inside, HALF)
    s1, s2 = _halves(angles[1], batch, 0, token, place, inside, HALF)
    for each in tl.static_range(2):
        y = outputs[each]
        kind = y.data.dtype.element_ty
        for start in range(0, heads[each], HEADS):
            head = (start + tl.arange(0, HEADS)).to(tl.int64)[:, None]
            mask = (head < heads[each]) & inside
            x1, x2 = _halves(inputs[each], batch, head, token, place, mask, HALF)
            if INVERSE:
                with_y1, with_y2 = x2 * s2, negated(x1 * s1)
            else:
                with_y1, with_y2 = negated(x2) * s1, x1 * s2
            # The conversions round each product to y's dtype, see the module. They must not be
            # merged.
            y1 = (x1 * c1).to(kind).to(tl.float32) + with_y1.to(kind).to(tl.float32)
            y2 = (x2 * c2).to(kind).to(tl.float32) + with_y2.to(kind).to(tl.float32)
            first = y.data + batch * y.batch + token * y.token + head * y.head + place
            tl.store(first, y1.to(kind), mask=mask)
            tl.store(first + HALF, y2.to(kind), mask=mask)
