"""INT4 GEMM in C++ on a CPU with AVX2 (ops/cpp/gemm.h), with exact integer sums.

It is 1.7 (width 384) to 2.3 times (2048) as fast as MKL's float32 GEMM on a Zen 3 core
(decisions/cpu.md). Results are bit-identical to the reference. One operand must be INT4 and the other
INT4 or INT4X2: a sum of two of their products fits into 16 bits, a sum of two INT8 products does
not.
"""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowgauge.formats import INT4, INT4X2
from narrowgauge.ops.cpp import int4
from narrowgauge.ops.mm.definition import times_scales, with_epilogue
from narrowgauge.ops.registry import Refusal

if TYPE_CHECKING:
    from narrowgauge.ops.mm.spec import MmSpec
    from narrowgauge.qtensor import QTensor

LEFT, RIGHT, DEPTH, OFFSET = 6, 16, 4, 7  # must match gemm.h
LONGEST_SUM = (2**31 - 1) // (14 * 98)  # products whose sum fits into 32 bits
# Products whose sum is exact in float32, the output dtype of the parts of a longer sum.
EXACT_SUM = (2**24 - 1) // (7 * 98)


def refuse(spec: MmSpec) -> Refusal | None:
    """Return the reason why this machine cannot run the GEMM, or None."""
    if (refusal := int4.refuse(spec.device.type)) is not None:
        return refusal
    return None if has_gemm() else Refusal("capability", "this CPU has no AVX2 instructions")


@with_epilogue
def run(
    lhs: QTensor, rhs: QTensor, bias: Tensor | None, dtype: torch.dtype, fast_accumulate: bool
) -> Tensor:
    """See `ops.mm`. INT4 codes may be packed, or one per byte (see `nn.straight_through`)."""
    # INT4 is the left operand in the forward GEMM and the right one in the two backward GEMMs. If
    # both are INT4, either works.
    unsigned_left = lhs.cast.format != INT4X2
    largest = int(max(INT4.max, lhs.cast.format.max, rhs.cast.format.max))
    left, right = lhs.one_to_a_byte(), rhs.one_to_a_byte()
    if lhs.inner <= LONGEST_SUM:
        return gemm(left, right, lhs.scale, rhs.scale, unsigned_left, largest)
    one = torch.ones(1, 1, device="cpu")
    # The exact parts are added in float64, as in the definition.
    total = torch.zeros(lhs.shape[0], rhs.shape[0], dtype=torch.float64, device="cpu")
    for parts in zip(left.split(EXACT_SUM, dim=1), right.split(EXACT_SUM, dim=1), strict=True):
        total += gemm(*parts, one, one, unsigned_left, largest)
    return times_scales(total.to(torch.float32), lhs.scale, rhs.scale)


@cache
def has_gemm() -> bool:
    """Return True if this CPU has the GEMM, which is written for AVX2."""
    return bool(int4.LIBRARY.loaded.narrowgauge_has_gemm())


def gemm(
    left: Tensor,
    right: Tensor,
    left_scale: Tensor,
    right_scale: Tensor,
    unsigned_left: bool,
    largest: int,
) -> Tensor:
    """Return left [M, K] @ right [N, K].T times both scales, float32 [M, N].

    left, right    int8 codes, any strides
    left_scale     [M or 1, 1]
    right_scale    [N or 1, 1]
    unsigned_left  True if the INT4 operand (codes within +-7) is the left one, else it is the right
                   one
    largest        largest magnitude in the other operand, at most 98
    """
    (m, inner), n = left.shape, len(right)
    out = torch.empty(m, n, dtype=torch.float32, device="cpu")
    a = _panels(left, LEFT, OFFSET if unsigned_left else 0)
    b = _panels(right, RIGHT, 0 if unsigned_left else OFFSET)
    # Number of maddubs results (pairs of products) that fit into 16 bits, see gemm.h.
    steps = (2**15 - 1) // (2 * 2 * OFFSET * largest)
    of_rows = left_scale.to(torch.float32).contiguous()
    of_columns = right_scale.to(torch.float32).contiguous()
    scales = (of_rows, of_rows.numel() > 1, of_columns, of_columns.numel() > 1)
    work, sizes = out.numel() * max(inner // 64, 1), (m, n, inner, unsigned_left, steps)
    int4.LIBRARY.call("gemm", -(-m // LEFT), work, a, b, *sizes, *scales, out)
    return out


def _panels(x: Tensor, width: int, offset: int) -> Tensor:
    """Pack x [rows, K] int8 into the panels of gemm.h."""
    rows, inner = x.shape
    count = -(-rows // width)
    panels = torch.empty(count * width * -(-inner // DEPTH) * DEPTH, dtype=torch.int8, device="cpu")
    sizes = (rows, inner, *x.stride(), width, offset)
    int4.LIBRARY.call("pack", count, x.numel(), x, *sizes, panels)
    return panels
