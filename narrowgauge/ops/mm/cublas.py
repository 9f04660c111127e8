"""torch's GEMMs for narrow units: FP8 per tensor or row, FP8 in blocks of 128, MX and NVFP4, and integers.

    native         _scaled_mm     FP8, one scale per tensor or row; compute capability 8.9
    native-block   scaled_mm      E4M3, 1x128 by 128x128, 128x128 by 1x128 and 1x128 by 1x128; 9.0 alone, CUDA 12.9
    native-mx      scaled_mm      MXFP8: tiles of 32, E8M0 scales; NVFP4: tiles of 16, E4M3 scales and one float32; 10.0, CUDA 12.8
                                  MXFP4: 10.x alone (MSLK), result in bfloat16
    native-int8    _int_mm        integers, one scale per tensor or row; 8.0, and CPUs with VNNI

All want lhs row-major [M, K] and rhs column-major, which is our rhs [N, K] row-major, transposed by view. The hardware wants axes in
multiples: 16 (integers: 8, and M above 16); of blocks K of 128, an outer axis in 128x128 tiles of 128; of MX K of 32, so that rows begin at
16 bytes also where two codes share one. Smaller tensors are filled up with zeros, which change no product, and the result is cut. Filling
up copies. torch 2.13 refuses other shapes of blocks, or drops the remainder (ScaledBlas.cpp, _check_deepseek_support).

Blocks and MX have no fast accumulation. How they want their scales in memory (cuBLAS 12.9, "Block scaling factors layout"), of R rows
and C tiles along the contracted axis:

    outer_major      1x128 tiles     [R, C] with strides [1, R]: neighbours in memory are the same block of neighbouring rows
    padded_to_four   128x128 tiles   [C4, R/128] with strides [1, C4], C4 = C rounded up to a multiple of 4
    swizzled         1x32 and 1x16   one byte each, flat: blocks of 128 rows and 4 columns, 512 bytes, the blocks of a row panel
                                     one after another; within a block, row r and column c are at (r % 32) * 16 + (r // 32) * 4 + c

A bias is added in the epilogue, in float32 before the only rounding, where the result is bfloat16 and torch hands the bias on: native,
native-block, and native-mx but for MXFP4 and headroom. torch takes it in bfloat16 alone, and none for a float32 result.

Square tiles (16x16, 32x32) repeat their scale for each row, which changes no number. The factor that all tiles of a tensor share is
float32: NVFP4 hands it to the kernel, of MX (headroom) it multiplies the result.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, pad

from narrowgauge.addresses import dry_run_on, tell_launch, type_of
from narrowgauge.formats import E4M3
from narrowgauge.ops.mm.definition import framed, times_scales
from narrowgauge.ops.mm.spec import BLOCK, MX, SQUARE, mx_kind
from narrowgauge.ops.pieces import cuts
from narrowgauge.qtensor import QTensor
from narrowgauge.scaling import to_exponents

ALIGNMENT = 16
SMALLEST_INT8_ROWS = 32  # torch._int_mm on CUDA needs M > 16
ROWS, COLUMNS, GROUP = 128, 4, 32  # of a swizzled block of scales; rows that lie together in it
Bias = Tensor | None
LONGEST_INT8_SUM = 2**17  # 127 * 127 * 2**17 < 2**31; longer sums would wrap around


# What the operator takes; asking an enum for its value at every product is slow.
TENSORWISE, BLOCKWISE1X16, BLOCKWISE1X32 = (
    ScalingType.TensorWise.value,
    ScalingType.BlockWise1x16.value,
    ScalingType.BlockWise1x32.value,
)
BLOCKWISE1X128, BLOCKWISE128X128 = ScalingType.BlockWise1x128.value, ScalingType.BlockWise128x128.value
NO_SWIZZLE, SWIZZLE_32_4_4 = SwizzleType.NO_SWIZZLE.value, SwizzleType.SWIZZLE_32_4_4.value


def _on_cuda(lhs: QTensor, rhs: QTensor) -> bool:
    """Whether a bias goes into the GEMM: torch's CPU versions round before they add it."""
    return type_of(lhs.device) == "cuda"


def _scaled(lhs: QTensor, rhs: QTensor, bias: Bias, dtype: torch.dtype, fast_accumulate: bool) -> Tensor:
    """torch._scaled_mm. With row scales its result comes rounded to bfloat16."""
    a, b = aligned(lhs.data, ALIGNMENT, ALIGNMENT), aligned(rhs.data, ALIGNMENT, ALIGNMENT)
    scale_a, scale_b = lhs.scale, rhs.scale
    if not lhs.cast.is_per_tensor or not rhs.cast.is_per_tensor:
        scale_a, scale_b, dtype = _rows(lhs, a.shape[0]), _rows(rhs, b.shape[0]).t(), torch.bfloat16
    return torch._scaled_mm(
        a, b.t(), scale_a=scale_a, scale_b=scale_b, bias=filled(bias, b.shape[0]), out_dtype=dtype, use_fast_accum=fast_accumulate
    )  # fmt: skip


run_scaled = framed(_scaled, adds=_on_cuda)


def _rows(operand: QTensor, aligned_rows: int) -> Tensor:
    """One float32 scale per row, [aligned_rows, 1]; rows that were filled up get 1."""
    scale, rows = operand.scale, operand.data.shape[0]
    if scale.shape[0] == rows == aligned_rows:
        return scale.contiguous()
    return _filled_up(scale.expand(rows, 1), aligned_rows - rows, 0, 1.0).contiguous()


def _filled_up(scale: Tensor, rows: int, columns: int, value: float = 0.0) -> Tensor:
    """With so many more rows and columns; itself where there are none, which `pad` would copy."""
    return pad(scale, (0, columns, 0, rows), value=value) if rows or columns else scale


@framed
def run_int8(lhs: QTensor, rhs: QTensor, bias: Bias, dtype: torch.dtype, fast_accumulate: bool) -> Tensor:
    """torch._int_mm, which has no epilogue: exact int32 sums of up to 2**17 products; their sum and scales in float32."""
    m, n = lhs.shape[0], rhs.shape[0]
    rows = SMALLEST_INT8_ROWS if m <= ALIGNMENT else ALIGNMENT
    a, b = aligned(lhs.one_to_a_byte(), rows, ALIGNMENT), aligned(rhs.one_to_a_byte(), ALIGNMENT, ALIGNMENT)
    parts = zip(a.split(LONGEST_INT8_SUM, dim=1), b.split(LONGEST_INT8_SUM, dim=1), strict=True)
    sums = [torch._int_mm(left.contiguous(), right.contiguous().T)[:m, :n].to(torch.float32) for left, right in parts]
    return times_scales(sum(sums[1:], start=sums[0]), lhs.scale, rhs.scale)  # of one part the emulation's bits


class Scaled(NamedTuple):
    """An operand of scaled_mm: codes [outer, K], filled up, and its scales, a tensor, a kind and an order in memory of each."""

    codes: Tensor
    scales: list[Tensor]
    kinds: list[int]  # values of ScalingType, and of SwizzleType
    swizzles: list[int]


def _block(lhs: QTensor, rhs: QTensor, bias: Bias, dtype: torch.dtype, fast_accumulate: bool) -> Tensor:
    """Blocks of 128."""
    return scaled_mm(_in_blocks(lhs), _in_blocks(rhs), bias, dtype)


run_block = framed(_block, adds=_on_cuda)


def _in_blocks(operand: QTensor) -> Scaled:
    """See the module for the orders of scales, as the Triton casts leave them; others are copied, and those that are filled up."""
    scale = operand.scale
    outer, inner = scale.shape
    if operand.cast.tile == SQUARE:
        padded_to_four = _filled_up(scale, 0, -inner % COLUMNS).contiguous().t()
        return Scaled(aligned(operand.data, BLOCK, BLOCK), [padded_to_four], [BLOCKWISE128X128], [])
    codes = aligned(operand.data, ALIGNMENT, BLOCK)
    if outer != codes.shape[0] or scale.stride() != (1, outer):  # a view costs the host more than a look at strides
        scale = _filled_up(scale.t(), 0, codes.shape[0] - outer).contiguous().t()
    return Scaled(codes, [scale], [BLOCKWISE1X128], [])


def _mx(lhs: QTensor, rhs: QTensor, bias: Bias, dtype: torch.dtype, fast_accumulate: bool) -> Tensor:
    """MXFP4 leaves its kernel rounded to bfloat16, the others as they are wanted, but in float32 with headroom."""
    kind, wanted = mx_kind(lhs.cast), dtype
    headroom = _headroom(lhs, rhs)
    if headroom or kind == "mxfp4":
        dtype = torch.bfloat16 if kind == "mxfp4" else torch.float32
    out = scaled_mm(mx_operand(lhs), mx_operand(rhs), bias, dtype)
    slices = cuts(out) if headroom else []
    if len(slices) > 1 and out.dtype == wanted:
        for each in slices:
            out[each] = _times(out[each], headroom)
        return out
    return _times(out, headroom)


def _times(out: Tensor, factors: list[Tensor]) -> Tensor:
    """In float32, if there are any."""
    for factor in factors:
        out = out.to(torch.float32) * factor
    return out


def _headroom(lhs: QTensor, rhs: QTensor) -> list[Tensor]:
    """The factors that multiply the result: those of tensors, which NVFP4 hands to the kernel."""
    return [q.global_scale for q in (lhs, rhs) if q.global_scale is not None and mx_kind(q.cast) != "nvfp4"]


run_mx = framed(
    _mx, adds=lambda lhs, rhs: _on_cuda(lhs, rhs) and mx_kind(lhs.cast) != "mxfp4" and not _headroom(lhs, rhs)
)


def mx_operand(operand: QTensor) -> Scaled:
    """Two E2M1 codes to an element; the scales of tiles, one per row, swizzled; and the tensor's, of NVFP4."""
    columns = MX // operand.cast.format.codes_per_byte if operand.is_packed else MX
    codes = aligned(operand.data, ALIGNMENT, columns)
    codes = codes.view(torch.float4_e2m1fn_x2) if operand.is_packed else codes
    scale, rows = operand.scale, operand.cast.tile[0]
    if rows > 1:
        scale = scale.repeat_interleave(rows, dim=0)[: operand.shape[0]]
    if not operand.cast.scale.two_level:
        return Scaled(codes, [swizzled(to_e8m0(scale))], [BLOCKWISE1X32], [SWIZZLE_32_4_4])
    assert operand.global_scale is not None
    scales = [swizzled(E4M3.encode(scale.contiguous())), operand.global_scale.reshape(1)]
    kinds = [BLOCKWISE1X16, TENSORWISE]
    return Scaled(codes, scales, kinds, [SWIZZLE_32_4_4, NO_SWIZZLE])


def aligned(data: Tensor, rows: int, columns: int) -> Tensor:
    """data as a contiguous matrix, filled up with zeros to multiples of (rows, columns)."""
    outer, inner = data.shape
    if not outer % rows and not inner % columns:
        return data.contiguous()
    fill = (0, -inner % columns, 0, -outer % rows)
    return pad(data.contiguous().view(torch.uint8), fill).view(data.dtype)


def filled(bias: Bias, columns: int) -> Bias:
    """bias [N] with zeros up to `columns`."""
    return bias if bias is None else pad(bias.contiguous(), (0, columns - len(bias))) if len(bias) < columns else bias


def scaled_mm(lhs: Scaled, rhs: Scaled, bias: Bias, dtype: torch.dtype) -> Tensor:
    """torch.nn.functional.scaled_mm by the operator that it calls: torch.compile breaks the graph at the function before 2.13.

    Compiled code calls that as `narrowgauge::scaled_mm`: Inductor of torch 2.13 makes a `_scaled_mm` of it, which wants the scales of
    blocks of 128 in other shapes, and fails when it runs.
    """
    is_compiling = torch.compiler.is_compiling()
    if not is_compiling and dry_run_on() is not None:  # torch 2.13 counts packed MXFP4 codes of fake tensors wrong
        found = lhs.codes.new_empty((lhs.codes.shape[0], rhs.codes.shape[0]), dtype=dtype)
        is_mx = lhs.kinds[0] in (BLOCKWISE1X32, BLOCKWISE1X16)
        name = f"{__name__}.scaled_mm_{'mx' if is_mx else 'blocks'}"
        tell_launch(name, [lhs.codes, rhs.codes, found, *lhs.scales, *rhs.scales])
        return found
    call = torch.ops.narrowgauge.scaled_mm.default if is_compiling else _scaled_mm
    bias = filled(bias, rhs.codes.shape[0])
    out: Tensor = call(lhs.codes, rhs.codes, *lhs[1:], *rhs[1:], bias, dtype)
    return out


def _scaled_mm(lhs: Tensor, rhs: Tensor, *rest: Any) -> Tensor:
    out: Tensor = torch._scaled_mm_v2(lhs, rhs.t(), *rest)  # a third of the overload's time
    return out


torch.library.define(
    "narrowgauge::scaled_mm",
    "(Tensor lhs, Tensor rhs, Tensor[] lhs_scales, int[] lhs_kinds, int[] lhs_swizzles, "
    "Tensor[] rhs_scales, int[] rhs_kinds, int[] rhs_swizzles, Tensor? bias, ScalarType dtype) -> Tensor",
)
torch.library.impl("narrowgauge::scaled_mm", "CompositeExplicitAutograd", _scaled_mm)
torch.library.register_fake(
    "narrowgauge::scaled_mm", lambda lhs, rhs, *rest: lhs.new_empty((lhs.shape[0], rhs.shape[0]), dtype=rest[-1])
)


def swizzled(scale: Tensor) -> Tensor:
    """scale [R, C], one byte per element -> flat, R rounded up to 128 times C rounded up to 4, zero where filled up. One copy."""
    bytes_ = pad(scale.view(torch.uint8), (0, -scale.shape[1] % COLUMNS, 0, -scale.shape[0] % ROWS))
    panels, columns = bytes_.shape[0] // ROWS, bytes_.shape[1] // COLUMNS
    blocks = bytes_.view(panels, ROWS // GROUP, GROUP, columns, COLUMNS)
    return blocks.permute(0, 3, 2, 1, 4).reshape(-1).view(scale.dtype)


def to_e8m0(scale: Tensor) -> Tensor:
    """Powers of two, 2**-126 to 2**127, or NaN, float32 -> float8_e8m0fnu of the same shape: the exponent bits as they are."""
    return to_exponents(scale).view(torch.float8_e8m0fnu)
