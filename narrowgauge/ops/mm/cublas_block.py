"""cuBLAS' FP8 GEMM with one scale per 128 elements (Hopper, CUDA 12.9), by way of torch.nn.functional.scaled_mm.

    out[m, n] = sum over blocks b of s_lhs[m, b] * s_rhs[n, b] * (sum over k in b of v_lhs[m, k] * v_rhs[n, k])

1x128 by 128x128, 128x128 by 1x128 and 1x128 by 1x128, E4M3 alone. Partial sums are promoted to float32 after each block, so
there is no fast accumulation. torch refuses everything but compute capability 9 (ScaledBlas.cpp, _check_deepseek_support).

K is filled up to a multiple of 128, an outer axis in 1x128 tiles to 16, in 128x128 tiles to 128: the shapes for which kernel and
torch's shape functions agree (those of 2.13 divide by 128 and drop the remainder). Filling up copies; multiples of 128 do not.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import ScalingType

from narrowgauge.formats import E4M3
from narrowgauge.ops.mm.cublas import (
    ALIGNMENT,
    aligned,
    dotted,
    empty_product,
    in_float32,
    refuse_without_units,
    scaled_mm,
)
from narrowgauge.ops.mm.spec import MmSpec
from narrowgauge.qtensor import QTensor

BLOCK = 128
VECTOR, SQUARE = (1, BLOCK), (BLOCK, BLOCK)
NOT_IN_BLOCKS = "needs two FP8 operands in tiles of 1x128 or 128x128"


def refuse(spec: MmSpec) -> str | None:
    """E4M3 in blocks of 128 on compute capability 9, torch built for CUDA 12.9 or later."""
    casts = (spec.lhs, spec.rhs)
    if any(cast is None or cast.format != E4M3 or cast.tile not in (VECTOR, SQUARE) for cast in casts):
        return NOT_IN_BLOCKS if not _other_formats(spec) else "takes E4M3 alone in tiles of 128"
    if (reason := refuse_without_units(spec)) is not None:
        return reason
    if spec.device.capability[0] != 9:
        return f"compute capability {dotted(spec)}, cuBLAS has blocks of 128 on 9.0 alone"
    if spec.device.cuda < (12, 9):
        return f"torch was built for CUDA {'.'.join(map(str, spec.device.cuda))}, blocks of 128 need 12.9"
    if all(cast is not None and cast.tile == SQUARE for cast in casts):
        return "128x128 by 128x128 does not exist in cuBLAS"
    return None


def _other_formats(spec: MmSpec) -> bool:
    """Whether the tiles would do, but an operand is E5M2."""
    casts = (spec.lhs, spec.rhs)
    return all(
        cast is not None and cast.tile in (VECTOR, SQUARE) and cast.format.storage.is_floating_point for cast in casts
    )


def run(lhs: QTensor, rhs: QTensor, bias: Tensor | None, out_dtype: torch.dtype, fast_accumulate: bool) -> Tensor:
    """fast_accumulate has no effect. The result leaves the kernel in float32, or in bfloat16 if that is all that is wanted."""
    m, n = lhs.shape[0], rhs.shape[0]
    if 0 in (m, n, lhs.shape[1]):
        return empty_product(m, n, lhs.device, bias, out_dtype)
    a, scale_a, how_a = _arranged(lhs)
    b, scale_b, how_b = _arranged(rhs)
    out = scaled_mm(
        a, b.T, scale_a, how_a, scale_b, how_b,
        output_dtype=torch.float32 if in_float32(bias, out_dtype) else torch.bfloat16,
    )[:m, :n]  # fmt: skip
    if bias is not None:
        out = out + bias.to(torch.float32)
    return out.to(out_dtype)


def _arranged(operand: QTensor) -> tuple[Tensor, Tensor, ScalingType]:
    """Codes filled up, scales in their layout, and its name."""
    from narrowgauge.ops.mm.layouts import outer_major, padded_to_four

    if operand.cast.tile == SQUARE:
        codes = aligned(operand.data, BLOCK, BLOCK)
        return codes, padded_to_four(operand.scale), ScalingType.BlockWise128x128
    codes = aligned(operand.data, ALIGNMENT, BLOCK)
    return codes, outer_major(operand.scale, codes.shape[0]), ScalingType.BlockWise1x128
