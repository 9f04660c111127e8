"""Attention in E4M3, forward, in one launch; `ops.attention` has the contract.

A program computes A.rows queries of one head. It reads the keys in blocks of A.block, whose scales
are constants of a step, and carries the row maximum, the sum of P and y in registers. Both products
of a step start from zero, so no sum of the tensor cores is longer than a head or a block.
"""

# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import triton
import triton.language as tl

from narrowgauge.ops.triton.elements import encode


@triton.jit
def _scores(scores, mask, batch, head, rows, columns, lengths, A: tl.constexpr):
    """Scores [rows, columns] with -inf where nothing is attended to, and the mask's numbers."""
    inside = (rows < lengths[0])[:, None] & (columns < lengths[1])[None, :]
    attends = inside
    if A.is_causal:
        attends = attends & (rows[:, None] >= columns[None, :])
    if A.masked != "":
        place = mask.data + batch * mask.batch + head * mask.head
        place += rows.to(tl.int64)[:, None] * mask.row + columns.to(tl.int64)[None, :] * mask.column
        found = tl.load(place, mask=inside, other=0)
        if A.masked == "bool":
            attends = attends & (found != 0)
        else:
            scores += found.to(tl.float32)
    return tl.where(attends, scores, float("-inf"))


@triton.jit
def fp8_attention(
    q, k, v, mask, out, heads, lengths, widths, scale, C: tl.constexpr, A: tl.constexpr
):
    """Entry point of the kernel.

    q, k     (codes [batch, heads or key heads, tokens, width], scales [batch, heads, blocks])
    v        (codes [batch, key heads, value width, keys], scales)
    mask     an `attention.MaskStrides`, or None
    out      [batch, heads, queries, value width]
    heads    numbers of heads of q and k
    lengths  numbers of queries and keys
    widths   of a head of q and of v
    C        CastConstants of E4M3
    A        attention.Tiles
    """
    queries, keys = lengths
    width, value_width = widths
    tiles = tl.cdiv(queries, A.rows)
    program = tl.program_id(0)
    # Under a causal mask the last queries have most keys: they start first.
    tile = tiles - 1 - program % tiles
    # int64: offsets of large batches exceed 2**31 elements.
    of_head = (program // tiles).to(tl.int64)
    batch, head = of_head // heads[0], of_head % heads[0]
    of_keys = batch * heads[1] + head // (heads[0] // heads[1])
    rows = tile * A.rows + tl.arange(0, A.rows)
    across = tl.arange(0, A.width)
    down = tl.arange(0, A.value_width)
    x = tl.load(
        q[0] + (of_head * queries + rows)[:, None] * width + across[None, :],
        mask=(rows < queries)[:, None] & (across < width)[None, :],
        other=0.0,
    )
    x_scale = tl.load(q[1] + of_head * tl.cdiv(queries, A.block) + tile * A.rows // A.block)
    of_blocks = of_keys * tl.cdiv(keys, A.block)
    # Shapes of tensors: Triton 3.6 and 3.7 take no field of a constant for a length.
    largest = tl.full(rows.shape, float("-inf"), dtype=tl.float32)
    total = tl.zeros(rows.shape, dtype=tl.float32)
    y = tl.zeros((rows.shape[0], down.shape[0]), dtype=tl.float32)
    last = keys
    if A.is_causal:
        last = min(keys, (tile + 1) * A.rows)
    for begin in range(0, last, A.block):
        columns = begin + tl.arange(0, A.block)
        inside = columns < keys
        block = tl.load(
            k[0] + (of_keys * keys + columns)[:, None] * width + across[None, :],
            mask=inside[:, None] & (across < width)[None, :],
            other=0.0,
        )
        scores = tl.dot(x, tl.trans(block), input_precision="ieee")
        scores = scores * (x_scale * tl.load(k[1] + of_blocks + begin // A.block) * scale)
        scores = _scores(scores, mask, batch, head, rows, columns, lengths, A)
        now = tl.maximum(largest, tl.max(scores, 1))
        shift = tl.where(now == float("-inf"), 0.0, now)  # no key so far: exp(-inf) and not NaN
        p = tl.exp(scores - shift[:, None])
        kept = tl.exp(largest - shift)
        codes = encode(p * A.largest, p, C)
        if not C.decoded:
            codes = codes.to(tl.float8e4nv, bitcast=True)
        values = tl.load(
            v[0] + (of_keys * value_width + down)[:, None] * keys + columns[None, :],
            mask=(down < value_width)[:, None] & inside[None, :],
            other=0.0,
        )
        product = tl.dot(codes, tl.trans(values), input_precision="ieee")
        v_scale = tl.load(v[1] + of_blocks + begin // A.block) / A.largest
        y = y * kept[:, None] + product * v_scale
        total = total * kept + tl.sum(p, 1)
        largest = now
    y = tl.where((total == 0.0)[:, None], 0.0, y / total[:, None])
    tl.store(
        out + (of_head * queries + rows)[:, None] * value_width + down[None, :],
        y.to(out.dtype.element_ty),
        mask=(rows < queries)[:, None] & (down < value_width)[None, :],
    )
