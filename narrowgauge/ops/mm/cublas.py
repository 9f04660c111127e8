"""torch's kernels for narrow units: the scaled FP8 GEMM of NVIDIA's tensor cores, and the integer GEMM.

Layout wanted by both: lhs row-major [M, K], rhs column-major, which is our rhs [N, K] row-major, transposed by view. The
hardware wants M, N and K in multiples of 16 (integer: 8, and M above 16); smaller tensors are filled up with zeros, which
change no product, and the result is cut.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from narrowgauge.formats import E4M3, E5M2, IntFormat
from narrowgauge.ops.mm.definition import times_scales
from narrowgauge.ops.mm.spec import MmSpec
from narrowgauge.qtensor import QTensor
from narrowgauge.scaling import WHOLE

ALIGNMENT = 16
SMALLEST_INT8_ROWS = 32  # torch._int_mm on CUDA needs M > 16
LONGEST_INT8_SUM = 2**17  # 127 * 127 * 2**17 < 2**31; longer sums would wrap around
_ROW_OR_TENSOR = ((WHOLE, WHOLE), (1, WHOLE))
EXPANDED = "takes codes, but an operand is expanded to floats"
TWO_SCALES = "takes one scale, but a cast has a second one for the tensor (headroom)"


def refuse_scaled(spec: MmSpec) -> str | None:
    """FP8 on compute capability 8.9 and above, with one scale per tensor or row; on 8.9 rows need E4M3 in both (CUTLASS)."""
    casts = (spec.lhs, spec.rhs)
    if any(cast is None or cast.format not in (E4M3, E5M2) for cast in casts):
        return "needs two FP8 operands"
    if any(cast is not None and cast.tile not in _ROW_OR_TENSOR for cast in casts):
        return "needs two operands with one scale per tensor or row"
    if (reason := refuse_without_units(spec)) is not None:
        return reason
    by_rows = any(cast is not None and cast.tile != (WHOLE, WHOLE) for cast in casts)
    if by_rows and spec.device.capability < (9, 0) and any(cast is not None and cast.format == E5M2 for cast in casts):
        return f"compute capability {dotted(spec)}, row scales of E5M2 need 9.0"
    return None


def refuse_without_units(spec: MmSpec) -> str | None:
    """What every product of two FP8 operands asks for, whatever their tiles."""
    casts = (spec.lhs, spec.rhs)
    if all(cast is not None and cast.format == E5M2 for cast in casts):
        return "e5m2 x e5m2 does not exist in hardware"
    if spec.expanded:
        return EXPANDED
    if any(cast is not None and cast.has_global_scale for cast in casts):
        return TWO_SCALES
    if spec.device.type != "cuda":
        return f"{spec.device.type} has no FP8 units"
    if spec.device.capability < (8, 9):
        return f"compute capability {dotted(spec)}, FP8 needs 8.9"
    return None


def run_scaled(
    lhs: QTensor, rhs: QTensor, bias: Tensor | None, out_dtype: torch.dtype, fast_accumulate: bool
) -> Tensor:
    """torch._scaled_mm. With row scales its result comes rounded to bfloat16; a bias is added in float32."""
    m, n = lhs.shape[0], rhs.shape[0]
    if 0 in (m, n, lhs.shape[1]):
        return empty_product(m, n, lhs.device, bias, out_dtype)
    row_wise = WHOLE not in (lhs.cast.tile[0], rhs.cast.tile[0]) or lhs.cast.tile != rhs.cast.tile
    gemm_dtype = torch.float32 if in_float32(bias, out_dtype) and not row_wise else torch.bfloat16
    a, b = aligned(lhs.data, ALIGNMENT, ALIGNMENT), aligned(rhs.data, ALIGNMENT, ALIGNMENT)
    scale_a, scale_b = lhs.scale, rhs.scale
    if row_wise:
        scale_a = _rows(scale_a, m, a.shape[0])
        scale_b = _rows(scale_b, n, b.shape[0]).T
    else:
        scale_a, scale_b = scale_a.reshape(()), scale_b.reshape(())
    out = torch._scaled_mm(
        a, b.T, scale_a=scale_a, scale_b=scale_b, out_dtype=gemm_dtype, use_fast_accum=fast_accumulate
    )[:m, :n]
    if bias is not None:
        out = out.to(torch.float32) + bias.to(torch.float32)
    return out.to(out_dtype)


def refuse_int8(spec: MmSpec) -> str | None:
    """Integers with one scale per tensor or row, where the device multiplies integers faster than floats.

    4-bit integers run as INT8: their codes, and those of a bit-split gradient, are exact there.
    """
    casts = (spec.lhs, spec.rhs)
    if any(cast is None or not isinstance(cast.format, IntFormat) for cast in casts):
        return "needs two integer operands"
    if any(cast is not None and cast.tile not in _ROW_OR_TENSOR for cast in casts):
        return "the integer GEMM takes one scale per tensor or per row"
    if spec.expanded:
        return EXPANDED
    if any(cast is not None and cast.has_global_scale for cast in casts):
        return TWO_SCALES
    if spec.device.type == "cpu" and not spec.device.int8_gemm:
        return "this CPU has no VNNI instructions; its integer GEMM is many times slower than float32"
    if spec.device.type not in ("cpu", "cuda"):
        return f"no integer GEMM on {spec.device.type}"
    if spec.device.type == "cuda" and spec.device.capability < (8, 0):
        return f"compute capability {dotted(spec)}, the integer GEMM needs 8.0"
    return None


def run_int8(lhs: QTensor, rhs: QTensor, bias: Tensor | None, out_dtype: torch.dtype, fast_accumulate: bool) -> Tensor:
    """torch._int_mm: exact int32 sums of up to 2**17 products; their sum, scales and bias in float32."""
    m, n = lhs.shape[0], rhs.shape[0]
    if 0 in (m, n, lhs.shape[1]):
        return empty_product(m, n, lhs.device, bias, out_dtype)
    rows = SMALLEST_INT8_ROWS if m <= ALIGNMENT else ALIGNMENT
    a, b = aligned(_one_to_a_byte(lhs), rows, ALIGNMENT), aligned(_one_to_a_byte(rhs), ALIGNMENT, ALIGNMENT)
    parts = zip(a.split(LONGEST_INT8_SUM, dim=1), b.split(LONGEST_INT8_SUM, dim=1), strict=True)
    sums = [torch._int_mm(left.contiguous(), right.contiguous().T)[:m, :n].to(torch.float32) for left, right in parts]
    out = times_scales(sum(sums[1:], start=sums[0]), lhs.scale, rhs.scale)  # as the emulation does, to the bit
    if bias is not None:
        out = out + bias.to(torch.float32)
    return out.to(out_dtype)


def _one_to_a_byte(operand: QTensor) -> Tensor:
    return operand.cast.format.unpack(operand.data, operand.inner) if operand.is_packed else operand.data


def in_float32(bias: Tensor | None, out_dtype: torch.dtype) -> bool:
    """Whether a kernel's result must be float32: it is rounded to another type, or a bias is added first."""
    return bias is not None or out_dtype != torch.bfloat16


def dotted(spec: MmSpec) -> str:
    return ".".join(str(part) for part in spec.device.capability)


def aligned(data: Tensor, rows: int, columns: int) -> Tensor:
    """data as a contiguous matrix, filled up with zeros to multiples of (rows, columns)."""
    fill = (0, -data.shape[1] % columns, 0, -data.shape[0] % rows)
    if not any(fill):
        return data.contiguous()
    dtype = data.dtype
    return torch.nn.functional.pad(data.contiguous().view(torch.uint8), fill).view(dtype)


def _rows(scale: Tensor, rows: int, aligned_rows: int) -> Tensor:
    """One float32 scale per row, [aligned_rows, 1]; rows that were filled up get 1."""
    scale = scale.expand(rows, 1)
    return torch.nn.functional.pad(scale, (0, 0, 0, aligned_rows - rows), value=1.0).contiguous()


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | list[Tensor],
    how_a: Any,
    scale_b: Tensor | list[Tensor],
    how_b: Any,
    *,
    swizzle_a: Any = None,
    swizzle_b: Any = None,
    output_dtype: torch.dtype,
) -> Tensor:
    """torch.nn.functional.scaled_mm by the operator that it calls: torch.compile breaks the graph at the function before 2.13."""
    return torch.ops.aten._scaled_mm_v2.default(
        a, b, _listed(scale_a), _numbers(how_a), _numbers(swizzle_a), _listed(scale_b), _numbers(how_b), _numbers(swizzle_b),
        None, output_dtype,
    )  # fmt: skip


def _listed(given: Any) -> list[Any]:
    return [] if given is None else given if isinstance(given, list) else [given]


def _numbers(given: Any) -> list[int]:
    """Of ScalingTypes or SwizzleTypes, one or several or none."""
    return [each.value for each in _listed(given)]


def empty_product(m: int, n: int, device: torch.device, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    out = torch.zeros(m, n, device=device, dtype=out_dtype)
    return out if bias is None else out + bias.to(out_dtype)
