"""Rotary position embedding of queries and keys in one launch. The op's contract: `ops.rotary`.

A program takes one token: cosines and sines are read once for all its heads, HEADS of them at a time.

    y1 = x1 c1 - x2 s1        of the gradient (INVERSE): y1 = x1 c1 + x2 s2
    y2 = x2 c2 + x1 s2                                   y2 = x2 c2 - x1 s1

x1, x2 are the halves of a head; each product is rounded to y's type before they are added, as by operations one after the other.
"""

import triton
import triton.language as tl

from narrowgauge.ops.triton.elements import negated


@triton.jit
def _turn(
    x,
    y,
    heads,
    of_x,
    of_y,
    c1,
    c2,
    s1,
    s2,
    HALF: tl.constexpr,
    INVERSE: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """All heads of a token, `of_x` and `of_y` elements apart; c and s float32 [WIDTH]."""
    place = tl.arange(0, WIDTH)
    for start in range(0, heads, HEADS):
        head = (start + tl.arange(0, HEADS)).to(tl.int64)
        mask = (head < heads)[:, None] & (place < HALF)[None, :]
        here = head[:, None] * of_x + place[None, :]
        x1 = tl.load(x + here, mask=mask, other=0.0).to(tl.float32)
        x2 = tl.load(x + here + HALF, mask=mask, other=0.0).to(tl.float32)
        if INVERSE:
            with_y1, with_y2 = x2 * s2[None, :], negated(x1 * s1[None, :])
        else:
            with_y1, with_y2 = negated(x2) * s1[None, :], x1 * s2[None, :]
        kind = y.dtype.element_ty
        y1 = (x1 * c1[None, :]).to(kind).to(tl.float32) + with_y1.to(kind).to(tl.float32)
        y2 = (x2 * c2[None, :]).to(kind).to(tl.float32) + with_y2.to(kind).to(tl.float32)
        there = head[:, None] * of_y + place[None, :]
        tl.store(y + there, y1.to(kind), mask=mask)
        tl.store(y + there + HALF, y2.to(kind), mask=mask)


@triton.jit
def rotary(
    q,
    k,
    q_out,
    k_out,
    cos,
    sin,
    tokens,
    q_heads,
    k_heads,
    q_batch,
    q_head,
    q_token,
    k_batch,
    k_head,
    k_token,
    q_out_batch,
    q_out_head,
    q_out_token,
    k_out_batch,
    k_out_head,
    k_out_token,
    cos_batch,
    cos_token,
    sin_batch,
    sin_token,
    HALF: tl.constexpr,
    INVERSE: tl.constexpr,
    HEADS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """q [batch, heads, tokens, 2 HALF] and k, each with strides; cos, sin [batch, tokens, 2 HALF]. WIDTH: a power of two >= HALF."""
    program = tl.program_id(0).to(tl.int64)
    batch, token = program // tokens, program % tokens
    place = tl.arange(0, WIDTH)
    inside = place < HALF
    cosines, sines = cos + batch * cos_batch + token * cos_token, sin + batch * sin_batch + token * sin_token
    c1 = tl.load(cosines + place, mask=inside, other=0.0).to(tl.float32)
    c2 = tl.load(cosines + HALF + place, mask=inside, other=0.0).to(tl.float32)
    s1 = tl.load(sines + place, mask=inside, other=0.0).to(tl.float32)
    s2 = tl.load(sines + HALF + place, mask=inside, other=0.0).to(tl.float32)
    _turn(
        q + batch * q_batch + token * q_token, q_out + batch * q_out_batch + token * q_out_token, q_heads, q_head, q_out_head,
        c1, c2, s1, s2, HALF, INVERSE, HEADS, WIDTH,
    )  # fmt: skip
    _turn(
        k + batch * k_batch + token * k_token, k_out + batch * k_out_batch + token * k_out_token, k_heads, k_head, k_out_head,
        c1, c2, s1, s2, HALF, INVERSE, HEADS, WIDTH,
    )  # fmt: skip
