"""MXFP8, MXFP4 and NVFP4 in the tensor cores of Blackwell, by way of torch.nn.functional.scaled_mm (ScaledBlas.cpp, torch 2.13).

    mxfp8   FP8 in tiles of 32, E8M0 scales        cuBLAS, CUDA 12.8
    nvfp4   E2M1 in tiles of 16, E4M3 scales and one float32 for the tensor        cuBLAS, CUDA 12.8
    mxfp4   E2M1 in tiles of 32, E8M0 scales       MSLK, compute capability 10 alone, result in bfloat16

Scales are swizzled (layouts.py). Square tiles (16x16, 32x32) repeat their scale for each row, which changes no number. The factor
that all tiles of a tensor share is float32: NVFP4 hands it to the kernel, of MX (headroom) it multiplies the result.
K is filled up to a multiple of 32, so that rows begin at 16 bytes also where two codes share one.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from narrowgauge.formats import E2M1, E4M3, E5M2
from narrowgauge.ops.mm.cublas import ALIGNMENT, EXPANDED, aligned, dotted, empty_product, in_float32, scaled_mm
from narrowgauge.ops.mm.spec import MmSpec
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast

MX, NV = 32, 16
NO_SUCH_TILES = "needs two operands of MXFP8, MXFP4 or NVFP4"


def kind(cast: Cast | None) -> str | None:
    """ "mxfp8", "mxfp4" or "nvfp4", or None for a cast that is none of them."""
    if cast is None or cast.tile[0] not in (1, cast.tile[1]):
        return None
    narrow = "mxfp4" if cast.format == E2M1 else "mxfp8" if cast.format in (E4M3, E5M2) else None
    if cast.tile[1] == MX and cast.scale.power_of_two:
        return narrow
    return "nvfp4" if cast.tile[1] == NV and cast.scale.two_level and narrow == "mxfp4" else None


def refuse(spec: MmSpec) -> str | None:
    """Both operands of one kind, on compute capability 10.0 and above, torch built for CUDA 12.8 or later."""
    lhs, rhs = kind(spec.lhs), kind(spec.rhs)
    if lhs is None or lhs != rhs:
        return NO_SUCH_TILES
    if all(cast is not None and cast.format == E5M2 for cast in (spec.lhs, spec.rhs)):
        return "e5m2 x e5m2 does not exist in hardware"
    if spec.expanded:
        return EXPANDED
    units = "MX" if lhs == "mxfp8" else "FP4"
    if spec.device.type != "cuda":
        return f"{spec.device.type} has no {units} units"
    if spec.device.capability < (10, 0):
        return f"compute capability {dotted(spec)}, {units} needs 10.0"
    if lhs == "mxfp4" and spec.device.capability[0] != 10:
        return f"compute capability {dotted(spec)}, torch has MXFP4 on 10.x alone"
    if spec.device.cuda < (12, 8):
        return f"torch was built for CUDA {'.'.join(map(str, spec.device.cuda))}, {units} needs 12.8"
    if lhs == "mxfp4" and torch.compiler.is_compiling():
        return "torch 2.13 takes two packed codes for one in the shapes of compiled MXFP4"  # _check_scaled_mm_sizes_v2
    return None


def run(lhs: QTensor, rhs: QTensor, bias: Tensor | None, out_dtype: torch.dtype, fast_accumulate: bool) -> Tensor:
    """fast_accumulate has no effect. MXFP4 leaves its kernel rounded to bfloat16, the others in float32 where it is wanted."""
    m, n = lhs.shape[0], rhs.shape[0]
    if 0 in (m, n, lhs.shape[1]):
        return empty_product(m, n, lhs.device, bias, out_dtype)
    which = kind(lhs.cast)
    shared = [] if which == "nvfp4" else [q.global_scale for q in (lhs, rhs) if q.global_scale is not None]
    wide = which != "mxfp4" and (bool(shared) or in_float32(bias, out_dtype))
    levels = 2 if which == "nvfp4" else 1
    swizzle = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE][:levels]
    how = [ScalingType.BlockWise1x16, ScalingType.TensorWise] if which == "nvfp4" else [ScalingType.BlockWise1x32]
    out = scaled_mm(
        _codes(lhs), _codes(rhs).T, _scales(lhs), how, _scales(rhs), how,
        swizzle_a=swizzle, swizzle_b=swizzle, output_dtype=torch.float32 if wide else torch.bfloat16,
    )[:m, :n]  # fmt: skip
    for factor in shared:
        out = out.to(torch.float32) * factor
    if bias is not None:
        out = out.to(torch.float32) + bias.to(torch.float32)
    return out.to(out_dtype)


def _codes(operand: QTensor) -> Tensor:
    if not operand.is_packed:
        return aligned(operand.data, ALIGNMENT, MX)
    packed = aligned(operand.data, ALIGNMENT, MX // operand.cast.format.codes_per_byte)
    return packed.view(torch.float4_e2m1fn_x2)


def _scales(operand: QTensor) -> list[Tensor]:
    """The scales of tiles, one per row, swizzled; and the tensor's, of NVFP4."""
    from narrowgauge.ops.mm.layouts import swizzled, to_e8m0

    scale, rows = operand.scale, operand.cast.tile[0]
    if rows > 1:
        scale = scale.repeat_interleave(rows, dim=0)[: operand.shape[0]]
    if not operand.cast.scale.two_level:
        return [swizzled(to_e8m0(scale))]
    assert operand.global_scale is not None
    return [swizzled(E4M3.encode(scale.contiguous())), operand.global_scale.reshape(1)]
