"""Rotary position embedding of queries and keys in one launch. The op's contract: `ops.rotary`.

A program takes one token: cosines and sines are read once for all its heads, HEADS of them at a time.

    y1 = x1 c1 - x2 s1        of the gradient (INVERSE): y1 = x1 c1 + x2 s2
    y2 = x2 c2 + x1 s2                                   y2 = x2 c2 - x1 s1

x1, x2 are the halves of a head; each product is rounded to y's type before they are added, as by operations one after the other.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from narrowgauge.ops.triton.elements import negated


class Strided(NamedTuple):
    """data [batch, heads, tokens, 2 HALF] with its strides in elements; of angles, [batch, tokens, 2 HALF], head is 0."""

    data: Any
    batch: Any
    head: Any
    token: Any


@triton.jit
def _line(x, batch, token):
    return x.data + batch * x.batch + token * x.token


@triton.jit
def _angles(of, batch, token, HALF: tl.constexpr, WIDTH: tl.constexpr):
    """Both halves, float32 [WIDTH]."""
    place = tl.arange(0, WIDTH)
    line, inside = _line(of, batch, token), place < HALF
    first = tl.load(line + place, mask=inside, other=0.0).to(tl.float32)
    return first, tl.load(line + HALF + place, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _embed(
    x, y, heads, cosines, sines, HALF: tl.constexpr, INVERSE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr
):
    """All heads of a token; x and y: (pointer to the first, elements between two), cosines and sines: of `_angles`."""
    place = tl.arange(0, WIDTH)
    c1, c2 = cosines
    s1, s2 = sines
    kind = y[0].dtype.element_ty
    for start in range(0, heads, HEADS):
        head = (start + tl.arange(0, HEADS)).to(tl.int64)
        mask = (head < heads)[:, None] & (place < HALF)[None, :]
        here = x[0] + head[:, None] * x[1] + place[None, :]
        x1 = tl.load(here, mask=mask, other=0.0).to(tl.float32)
        x2 = tl.load(here + HALF, mask=mask, other=0.0).to(tl.float32)
        if INVERSE:
            with_y1, with_y2 = x2 * s2[None, :], negated(x1 * s1[None, :])
        else:
            with_y1, with_y2 = negated(x2) * s1[None, :], x1 * s2[None, :]
        y1 = (x1 * c1[None, :]).to(kind).to(tl.float32) + with_y1.to(kind).to(tl.float32)
        y2 = (x2 * c2[None, :]).to(kind).to(tl.float32) + with_y2.to(kind).to(tl.float32)
        there = y[0] + head[:, None] * y[1] + place[None, :]
        tl.store(there, y1.to(kind), mask=mask)
        tl.store(there + HALF, y2.to(kind), mask=mask)


@triton.jit
def rotary(
    inputs, outputs, angles, heads, tokens,
    HALF: tl.constexpr, INVERSE: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """inputs, outputs: (q, k), angles: (cos, sin), all `Strided`; heads: numbers of q's and k's. WIDTH: a power of two >= HALF."""
    program = tl.program_id(0).to(tl.int64)
    batch, token = program // tokens, program % tokens
    cosines, sines = _angles(angles[0], batch, token, HALF, WIDTH), _angles(angles[1], batch, token, HALF, WIDTH)
    for each in tl.static_range(2):
        x, y = inputs[each], outputs[each]
        given, written = (_line(x, batch, token), x.head), (_line(y, batch, token), y.head)
        _embed(given, written, heads[each], cosines, sines, HALF, INVERSE, HEADS, WIDTH)
