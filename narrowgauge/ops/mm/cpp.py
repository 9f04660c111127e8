"""INT4 products on a CPU with AVX2 and without VNNI, as C++ (ops/cpp/gemm.h): exact integer sums, twice as fast as float32 and more.

The same numbers as the reference, to the bit. One operand must be INT4, the other INT4 or INT4X2: their products, added in
pairs, stay within 16 bits; those of INT8 do not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.formats import INT4, INT4X2
from narrowgauge.ops.mm.definition import framed, times_scales
from narrowgauge.ops.mm.spec import MmSpec
from narrowgauge.ops.registry import Refusal
from narrowgauge.qtensor import QTensor

LONGEST_SUM = (2**31 - 1) // (14 * 98)  # of products within 32 bits
EXACT_SUM = (2**24 - 1) // (7 * 98)  # and within float32, in which the parts of a longer one come


def refuse(spec: MmSpec) -> Refusal | None:
    """Why this machine has no such product, or None."""
    from narrowgauge.ops.cpp import int4 as cpp

    if (refusal := cpp.refuse(spec.device.type)) is not None:
        return refusal
    return None if cpp.has_gemm() else Refusal("capability", "this CPU has no AVX2 instructions")


@framed
def run(lhs: QTensor, rhs: QTensor, bias: Tensor | None, dtype: torch.dtype, fast_accumulate: bool) -> Tensor:
    """Codes of INT4 may come packed, or one to a byte (see `nn.straight_through`)."""
    from narrowgauge.ops.cpp import int4 as cpp

    # The left operand is INT4 in the forward product and the right one in the others; of two INT4 either serves.
    unsigned_left = lhs.cast.format != INT4X2
    largest = int(max(INT4.max, lhs.cast.format.max, rhs.cast.format.max))
    left, right = lhs.one_to_a_byte(), rhs.one_to_a_byte()
    if lhs.shape[1] <= LONGEST_SUM:
        return cpp.gemm(left, right, lhs.scale, rhs.scale, unsigned_left, largest)
    one = torch.ones(1, 1, device="cpu")
    total = torch.zeros(lhs.shape[0], rhs.shape[0], dtype=torch.float64, device="cpu")
    for parts in zip(left.split(EXACT_SUM, dim=1), right.split(EXACT_SUM, dim=1), strict=True):
        total += cpp.gemm(*parts, one, one, unsigned_left, largest)
    return times_scales(total.to(torch.float32), lhs.scale, rhs.scale)
