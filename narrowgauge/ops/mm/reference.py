"""The definition of mm: decode, multiply in a float type that holds the operands exactly, sum in float32.

When each operand has one scale per row (or one in all), the scales leave the sum:

    out[m, n] = s_lhs[m] * s_rhs[n] * sum over k of v_lhs[m, k] * v_rhs[n, k]

and the GEMM runs on the bare values v. Otherwise the scales are multiplied in first; powers of two lose nothing by it.

The GEMM's type is bfloat16 where the device is fast at it: E4M3, E5M2, INT8 and smaller values, and their products with powers
of two, are exact there. On a CPU without bfloat16 instructions float32 is several times faster, and holds the same values.
A CPU's bfloat16 GEMM sums in float32 but returns bfloat16: one more rounding, of 2**-9, before scales and bias.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.formats import TableFormat
from narrowgauge.ops.quantize.reference import dequantize
from narrowgauge.ops.registry import Device
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast
from narrowgauge.tiles import WHOLE, tile_sizes, times_scale


def compute_dtype(casts: tuple[Cast | None, ...], device: Device) -> torch.dtype:
    """The fastest float type of `device` in which every operand, scales included where needed, is exact."""
    if not device.bf16_gemm:
        return torch.float32
    exact = all(cast is None or _is_exact_in_bf16(cast) for cast in casts)
    return torch.bfloat16 if exact else torch.float32


def _is_exact_in_bf16(cast: Cast) -> bool:
    scales_leave_the_sum = cast.tile[1] == WHOLE
    return not isinstance(cast.format, TableFormat) and (scales_leave_the_sum or cast.scale.power_of_two)


def run(
    lhs: QTensor | Tensor,
    rhs: QTensor | Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accumulate: bool,
) -> Tensor:
    """See `ops.mm`. fast_accumulate has no effect: the sum is always float32."""
    with torch.autocast(lhs.device.type, enabled=False):
        if _scales_leave_the_sum(lhs) and _scales_leave_the_sum(rhs):
            out = _float_mm(_values(lhs), _values(rhs))
            out = _times_scales(out, lhs, rhs)
        else:
            out = _float_mm(_scaled_values(lhs), _scaled_values(rhs))
        if bias is not None:
            # Added before leaving float32: rounding first and adding after differs between eager and compiled code.
            out = out + bias.to(torch.float32)
        return out.to(out_dtype)


def _scales_leave_the_sum(operand: QTensor | Tensor) -> bool:
    return not isinstance(operand, QTensor) or operand.scale.shape[1] <= 1


def _values(operand: QTensor | Tensor) -> Tensor:
    return operand.values() if isinstance(operand, QTensor) else operand


def _scaled_values(operand: QTensor | Tensor) -> Tensor:
    """Values times scales, in the dtype of expanded values if they are expanded (exact, see `compute_dtype`)."""
    if not isinstance(operand, QTensor):
        return operand
    if operand.is_expanded:
        return times_scale(operand.data, operand.full_scale(), operand.cast.tile)
    return dequantize(operand)


def _float_mm(lhs: Tensor, rhs: Tensor) -> Tensor:
    """float32 result of a GEMM in the wider of the operands' types; a CPU without bfloat16 units computes in float32."""
    dtype = torch.promote_types(lhs.dtype, rhs.dtype)
    if lhs.device.type == "cuda" and dtype in (torch.bfloat16, torch.float16):
        return torch.mm(lhs.to(dtype), rhs.to(dtype).T, out_dtype=torch.float32)
    if lhs.device.type == "cpu" and dtype in (torch.bfloat16, torch.float16) and not _cpu_is_fast_at(dtype):
        dtype = torch.float32
    return torch.mm(lhs.to(dtype), rhs.to(dtype).T).to(torch.float32)


@torch.compiler.assume_constant_result
def _cpu_is_fast_at(dtype: torch.dtype) -> bool:
    return (
        dtype == torch.bfloat16
        and torch.backends.mkldnn.is_available()
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def _times_scales(out: Tensor, lhs: QTensor | Tensor, rhs: QTensor | Tensor) -> Tensor:
    """out [M, N] times s_lhs [M or 1, 1] and s_rhs [1, N or 1]; two scalars are multiplied first, which saves a pass."""
    left, right = _row_scale(lhs), _row_scale(rhs)
    if left is not None and right is not None and left.numel() == right.numel() == 1:
        return out * (left * right)
    out = out if left is None else out * left
    return out if right is None else out * right.T


def _row_scale(operand: QTensor | Tensor) -> Tensor | None:
    """[outer, 1] or [1, 1], or None for a plain tensor."""
    if not isinstance(operand, QTensor):
        return None
    rows = tile_sizes(operand.shape, operand.cast.tile)[0]
    scale = operand.full_scale()
    if scale.shape[1] == 0:  # nothing is contracted, the sum is zero
        return scale.new_ones(1, 1)
    if rows == 1 or scale.shape[0] == 1:
        return scale
    return scale.repeat_interleave(rows, dim=0)[: operand.shape[0]]
