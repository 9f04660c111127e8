"""INT4 products on a CPU with AVX2 and without VNNI, as C++ (ops/cpp/gemm.h): exact integer sums, twice as fast as float32 and more.

The same numbers as the reference, to the bit. One operand must be INT4, the other INT4 or INT4X2: their products, added in
pairs, stay within 16 bits; those of INT8 do not.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.formats import INT4, INT4X2
from narrowgauge.ops.mm.spec import EXPANDED, TWO_SCALES, MmSpec
from narrowgauge.ops.registry import Refusal
from narrowgauge.qtensor import QTensor
from narrowgauge.scaling import WHOLE

LONGEST_SUM = (2**31 - 1) // (14 * 98)  # of products within 32 bits


def refuse(spec: MmSpec) -> Refusal | None:
    """INT4 times INT4 or times a bit-split gradient, with one scale per tensor or row."""
    casts = (spec.lhs, spec.rhs)
    formats = [None if cast is None else cast.format for cast in casts]
    if INT4 not in formats or any(format not in (INT4, INT4X2) for format in formats):
        return Refusal("operands", "needs two operands of INT4, one of which may be a bit-split gradient")
    if any(cast is not None and cast.tile not in ((WHOLE, WHOLE), (1, WHOLE)) for cast in casts):
        return Refusal("tile", "takes one scale per tensor or per row")
    if spec.expanded:
        return EXPANDED
    if any(cast is not None and cast.has_global_scale for cast in casts):
        return TWO_SCALES
    from narrowgauge.ops.cpp import int4 as cpp

    if (refusal := cpp.refuse(spec.device.type)) is not None:
        return refusal
    return None if cpp.has_gemm() else Refusal("capability", "this CPU has no AVX2 instructions")


def run(lhs: QTensor, rhs: QTensor, bias: Tensor | None, out_dtype: torch.dtype, fast_accumulate: bool) -> Tensor:
    """Codes of INT4 may come packed, or one to a byte (see `nn.straight_through`)."""
    from narrowgauge.ops.cpp import int4 as cpp

    m, n = lhs.shape[0], rhs.shape[0]
    if 0 in (m, n, lhs.shape[1]):
        out = torch.zeros(m, n, device="cpu")
    else:
        # The left operand is INT4 in the forward product and the right one in the others; of two INT4 either serves.
        unsigned_left = lhs.cast.format != INT4X2
        largest = int(max(INT4X2.max if INT4X2 in (lhs.cast.format, rhs.cast.format) else INT4.max, INT4.max))
        left, right = lhs.one_to_a_byte(), rhs.one_to_a_byte()
        starts = range(0, lhs.shape[1], LONGEST_SUM)
        scales = (lhs.scale, rhs.scale)
        if len(starts) == 1:
            out = cpp.gemm(left, right, *scales, unsigned_left, largest)
        else:
            one = torch.ones(1, 1, device="cpu")
            total = torch.zeros(m, n, dtype=torch.float64, device="cpu")
            for start in starts:
                stop = start + LONGEST_SUM
                total += cpp.gemm(left[:, start:stop], right[:, start:stop], one, one, unsigned_left, largest)
            shared = lhs.scale.numel() == rhs.scale.numel() == 1
            out = total.to(torch.float32)
            out = out * (lhs.scale * rhs.scale) if shared else out * lhs.scale * rhs.scale.T
    if bias is not None:
        out = out + bias.to(torch.float32)
    return out.to(out_dtype)
