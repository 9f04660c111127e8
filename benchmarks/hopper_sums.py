"""Products of FP8 as Hopper's tensor cores add them, on a CPU: for studies of fast and split accumulation without a card.

"Tensor cores ... only use the highest 14 bits of each mantissa product for addition, and truncate bits exceeding this range. The
accumulation of addition results into registers also employs 14-bit precision" (DeepSeek-V3, arXiv 2412.19437, 3.3.2), 32 products at a
time. Here, of a group of 32 products p and the sum so far t:

    e = exponent of the largest of |p|, |t|
    t <- truncated to 14 significant bits of ( sum of trunc(p * 2**(13 - e)) + trunc(t * 2**(13 - e)) ) * 2**(e - 13)

    fast     t from the first group to the last                                        use_fast_accum=True
    split    t is added to a float32 and begins anew after each 128 products           use_fast_accum=False

The exponent is that of the product; hardware that aligns by the sum of the operands' exponents keeps up to one bit more. 128 is the
interval of DeepSeek-V3 and of CUTLASS (four instructions of 32); cuBLAS does not tell its own. `bits` other than 14 are for asking what
a longer axis would do to a small model: the error grows with the number of groups.

    with in_place_of_float32(bits=14):
        train(...)      # every product of two FP8 operands with one scale per tensor or row, by its Gemm's fast_accumulate

One thread; about 0.1 ns per product (AMD EPYC with AVX-512), some ten times a float32 product. Not a part of the package.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_int32, c_int64, c_void_p
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from narrowgauge.ops.cpp import build
from narrowgauge.ops.mm import KERNELS
from narrowgauge.ops.mm.definition import times_scales, with_epilogue
from narrowgauge.ops.mm.spec import FP8, ROW_OR_TENSOR, MmSpec
from narrowgauge.ops.registry import Kernel, Refusal
from narrowgauge.qtensor import QTensor

GROUP, PROMOTED, LANES = 32, 128, 64
BITS = 14


def hopper_sums(lhs: Tensor, rhs: Tensor, *, fast: bool, bits: int = BITS) -> Tensor:
    """lhs [M, K] @ rhs [N, K].T -> [M, N] float32, of values of E4M3 or E5M2; see the module. NaN and infinity spoil what they touch."""
    (m, k), n = lhs.shape, rhs.shape[0]
    left = lhs.to(torch.float32).contiguous()
    right = pad(rhs.to(torch.float32).T, (0, -n % LANES)).contiguous()
    out = torch.empty(m, right.shape[1], dtype=torch.float32, device="cpu")
    promote = 0 if fast else PROMOTED
    finite = [torch.nan_to_num(x, nan=0.0, posinf=0.0, neginf=0.0) for x in (left, right)]
    _library()(
        *(x.data_ptr() for x in finite), m, k, right.shape[1], promote, bits - 1, out.data_ptr()
    )
    out = out[:, :n]
    if not (left.isfinite().all() and right.isfinite().all()):
        plain = (left @ right)[:, :n]
        out = torch.where(plain.isfinite(), out, plain)
    return out


@contextmanager
def in_place_of_float32(bits: int = BITS) -> Iterator[None]:
    """Registers the product before all others, for FP8 operands with one scale per tensor or row, on a CPU."""

    @with_epilogue
    def run(
        lhs: QTensor, rhs: QTensor, bias: Tensor | None, dtype: torch.dtype, fast_accumulate: bool
    ) -> Tensor:
        out = hopper_sums(lhs.values(), rhs.values(), fast=fast_accumulate, bits=bits)
        return times_scales(out, lhs.full_scale(), rhs.full_scale())

    kernel = Kernel("hopper-sums", _refuse, run)
    KERNELS.kernels.insert(0, kernel)
    try:
        yield
    finally:
        KERNELS.kernels.remove(kernel)


def _refuse(spec: MmSpec) -> Refusal | None:
    """expanded operands too: where a product is emulated, its operands are made for this kernel, as codes."""
    made_for = all(format in FP8 for format in spec.formats) and all(
        tile in ROW_OR_TENSOR for tile in spec.tiles
    )
    if not made_for or spec.device.type != "cpu":
        return Refusal(
            "operands", "adds two FP8 operands with one scale per tensor or row, on a CPU"
        )
    return None


@cache
def _library() -> Any:
    library = build.library(
        "benchmarks", ("hopper_sums.cpp",), "Hopper's sums", "study them where there is one"
    )
    function = library.hopper_sums
    function.argtypes = (c_void_p, c_void_p, c_int64, c_int64, c_int64, c_int64, c_int32, c_void_p)
    function.restype = None
    return function
