"""cpu_mm: lhs [M, K] @ rhs [N, K].T on a CPU that multiplies bfloat16, by oneDNN. Not under torch.compile.

    out_dtype bfloat16   operands bfloat16; the float32 sum times `factor`, one number, rounded to bfloat16
    out_dtype float32    operands float32; factor None

What was measured there (AMD Zen 5, AVX512-BF16, torch 2.13, one thread, milliseconds of CPU time; error: of normal numbers rounded
to bfloat16, against float64, relative Frobenius norm):

    M = N = K                                       512    1024    2048    error
    bfloat16                                        0.63   5.1     42      1.7e-3, the rounding of the result
    bfloat16 twice, the second time of what is left
    of the sum after the first: addmm(beta=-1)      1.43   11.2    105     2.5e-6
    float32 by oneDNN                               1.31   10.6    86      2e-7 to 6e-7, its order of summation
    float32 by MKL, which is torch.mm               2.83   22.1    186     1e-7

`torch.backends.mkldnn.matmul.fp32_precision = "bf16"` is no third way. It sends float32 to oneDNN, which keeps float32 there for
want of AMX, and it is global: products of other threads would be rounded. torch.mm(out_dtype=float32) has no kernel for the CPU.

A call of oneDNN costs 12 us before it multiplies, one of MKL 4 (64 x 64 x 64). So the smallest float32 products are left to torch.mm:
those of up to 2**18 numbers multiplied, along at most 128 of them, where both gave the same bits in all of 4,800 random shapes.
"""

from __future__ import annotations

import torch
from torch import Tensor


def cpu_mm(lhs: Tensor, rhs: Tensor, factor: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """See the module. Not for torch.compile, which cannot read the factor."""
    if out_dtype == torch.bfloat16:
        if factor is None:
            return torch.mm(lhs, rhs.T)
        return torch.addmm(lhs.new_empty(1), lhs, rhs.T, beta=0, alpha=factor.item())
    (m, k), n = lhs.shape, rhs.shape[0]
    linear = getattr(torch.ops.mkldnn, "_linear_pointwise", None)
    is_small = m >= 16 and n >= 16 and k <= 128 and m * n * k <= 1 << 18
    if linear is None or is_small or 0 in (m, n, k):
        return torch.mm(lhs, rhs.T)
    return linear(lhs, rhs, None, "none", [], "")
