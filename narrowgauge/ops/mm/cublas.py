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

Square tiles (16x16, 32x32) repeat their scale for each row, which changes no number. The factor that all tiles of a tensor share is
float32: NVFP4 hands it to the kernel, of MX (headroom) it multiplies the result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, pad

from narrowgauge.formats import E2M1, E4M3, E5M2, IntFormat
from narrowgauge.ops.mm.definition import times_scales
from narrowgauge.ops.mm.spec import EXPANDED, NO_E5M2_PAIR, TWO_SCALES, MmSpec
from narrowgauge.ops.registry import Refusal
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast
from narrowgauge.scaling import WHOLE

ALIGNMENT = 16
SMALLEST_INT8_ROWS = 32  # torch._int_mm on CUDA needs M > 16
LONGEST_INT8_SUM = 2**17  # 127 * 127 * 2**17 < 2**31; longer sums would wrap around
BLOCK = 128
VECTOR, SQUARE = (1, BLOCK), (BLOCK, BLOCK)
MX, NV = 32, 16
_ROW_OR_TENSOR = ((WHOLE, WHOLE), (1, WHOLE))

NOT_FP8 = Refusal("operands", "needs two FP8 operands")
NOT_BY_ROW = Refusal("operands", "needs two operands with one scale per tensor or row")
NOT_IN_BLOCKS = Refusal("operands", "needs two FP8 operands in tiles of 1x128 or 128x128")
NOT_MX = Refusal("operands", "needs two operands of MXFP8, MXFP4 or NVFP4")
NOT_INTEGERS = Refusal("operands", "needs two integer operands")


# --- FP8, one scale per tensor or row ---


def refuse_scaled(spec: MmSpec) -> Refusal | None:
    """FP8 on compute capability 8.9 and above, with one scale per tensor or row; on 8.9 rows need E4M3 in both (CUTLASS)."""
    if any(cast is None or cast.format not in (E4M3, E5M2) for cast in spec.casts):
        return NOT_FP8
    if any(cast is not None and cast.tile not in _ROW_OR_TENSOR for cast in spec.casts):
        return NOT_BY_ROW
    if (refusal := refuse_without_units(spec)) is not None:
        return refusal
    by_rows = any(cast is not None and cast.tile != (WHOLE, WHOLE) for cast in spec.casts)
    if by_rows and spec.device.capability < (9, 0) and any(cast and cast.format == E5M2 for cast in spec.casts):
        return Refusal("capability", f"compute capability {spec.capability}, row scales of E5M2 need 9.0")
    return None


def refuse_without_units(spec: MmSpec) -> Refusal | None:
    """What every product of two FP8 operands asks for, whatever their tiles."""
    if all(cast is not None and cast.format == E5M2 for cast in spec.casts):
        return NO_E5M2_PAIR
    if spec.expanded:
        return EXPANDED
    if any(cast is not None and cast.has_global_scale for cast in spec.casts):
        return TWO_SCALES
    if spec.device.type != "cuda":
        return Refusal("device", f"{spec.device.type} has no FP8 units")
    if spec.device.capability < (8, 9):
        return Refusal("capability", f"compute capability {spec.capability}, FP8 needs 8.9")
    return None


def run_scaled(
    lhs: QTensor, rhs: QTensor, bias: Tensor | None, out_dtype: torch.dtype, fast_accumulate: bool
) -> Tensor:
    """torch._scaled_mm. With row scales its result comes rounded to bfloat16; a bias is added in float32."""
    if (empty := empty_product(lhs, rhs, bias, out_dtype)) is not None:
        return empty
    row_wise = WHOLE not in (lhs.cast.tile[0], rhs.cast.tile[0]) or lhs.cast.tile != rhs.cast.tile
    a, b = aligned(lhs.data, ALIGNMENT, ALIGNMENT), aligned(rhs.data, ALIGNMENT, ALIGNMENT)
    if row_wise:
        scale_a, scale_b = _rows(lhs, len(a)), _rows(rhs, len(b)).T
    else:
        scale_a, scale_b = lhs.scale.reshape(()), rhs.scale.reshape(())
    wanted = torch.bfloat16 if row_wise else _result_dtype(bias, out_dtype)
    out = torch._scaled_mm(a, b.T, scale_a=scale_a, scale_b=scale_b, out_dtype=wanted, use_fast_accum=fast_accumulate)
    return _finished(out, lhs, rhs, bias, out_dtype)


def _rows(operand: QTensor, aligned_rows: int) -> Tensor:
    """One float32 scale per row, [aligned_rows, 1]; rows that were filled up get 1."""
    scale = operand.scale.expand(operand.shape[0], 1)
    return pad(scale, (0, 0, 0, aligned_rows - len(scale)), value=1.0).contiguous()


# --- FP8 in blocks of 128 ---


def refuse_block(spec: MmSpec) -> Refusal | None:
    """E4M3 in blocks of 128 on compute capability 9, torch built for CUDA 12.9 or later."""
    if any(
        cast is None or cast.tile not in (VECTOR, SQUARE) or not cast.format.storage.is_floating_point
        for cast in spec.casts
    ):
        return NOT_IN_BLOCKS
    if any(cast is not None and cast.format != E4M3 for cast in spec.casts):
        return Refusal("format", "takes E4M3 alone in tiles of 128")
    if (refusal := refuse_without_units(spec)) is not None:
        return refusal
    if spec.device.capability[0] != 9:
        return Refusal("capability", f"compute capability {spec.capability}, cuBLAS has blocks of 128 on 9.0 alone")
    if spec.device.cuda < (12, 9):
        return Refusal("toolchain", f"torch was built for CUDA {_cuda(spec)}, blocks of 128 need 12.9")
    if all(cast is not None and cast.tile == SQUARE for cast in spec.casts):
        return Refusal("tile", "128x128 by 128x128 does not exist in cuBLAS")
    return None


def run_block(lhs: QTensor, rhs: QTensor, bias: Tensor | None, out_dtype: torch.dtype, fast_accumulate: bool) -> Tensor:
    """The result leaves the kernel in float32, or in bfloat16 if that is all that is wanted."""
    if (empty := empty_product(lhs, rhs, bias, out_dtype)) is not None:
        return empty
    (a, scale_a, how_a), (b, scale_b, how_b) = _block_operand(lhs), _block_operand(rhs)
    out = scaled_mm(a, b.T, [scale_a], [how_a], [scale_b], [how_b], output_dtype=_result_dtype(bias, out_dtype))
    return _finished(out, lhs, rhs, bias, out_dtype)


def _block_operand(operand: QTensor) -> tuple[Tensor, Tensor, ScalingType]:
    """Codes filled up, scales in their layout, and its name."""
    if operand.cast.tile == SQUARE:
        codes = aligned(operand.data, BLOCK, BLOCK)
        return codes, padded_to_four(operand.scale), ScalingType.BlockWise128x128
    codes = aligned(operand.data, ALIGNMENT, BLOCK)
    return codes, outer_major(operand.scale, codes.shape[0]), ScalingType.BlockWise1x128


# --- MX and NVFP4 ---


def mx_kind(cast: Cast | None) -> str | None:
    """ "mxfp8", "mxfp4" or "nvfp4", or None for a cast that is none of them."""
    if cast is None or cast.tile[0] not in (1, cast.tile[1]):
        return None
    narrow = "mxfp4" if cast.format == E2M1 else "mxfp8" if cast.format in (E4M3, E5M2) else None
    if cast.tile[1] == MX and cast.scale.power_of_two:
        return narrow
    return "nvfp4" if cast.tile[1] == NV and cast.scale.two_level and narrow == "mxfp4" else None


def refuse_mx(spec: MmSpec) -> Refusal | None:
    """Both operands of one kind, on compute capability 10.0 and above, torch built for CUDA 12.8 or later."""
    lhs, rhs = map(mx_kind, spec.casts)
    if lhs is None or lhs != rhs:
        return NOT_MX
    if all(cast is not None and cast.format == E5M2 for cast in spec.casts):
        return NO_E5M2_PAIR
    if spec.expanded:
        return EXPANDED
    units = "MX" if lhs == "mxfp8" else "FP4"
    if spec.device.type != "cuda":
        return Refusal("device", f"{spec.device.type} has no {units} units")
    if spec.device.capability < (10, 0):
        return Refusal("capability", f"compute capability {spec.capability}, {units} needs 10.0")
    if lhs == "mxfp4" and spec.device.capability[0] != 10:
        return Refusal("capability", f"compute capability {spec.capability}, torch has MXFP4 on 10.x alone")
    if spec.device.cuda < (12, 8):
        return Refusal("toolchain", f"torch was built for CUDA {_cuda(spec)}, {units} needs 12.8")
    if lhs == "mxfp4" and torch.compiler.is_compiling():  # _check_scaled_mm_sizes_v2
        return Refusal("compiling", "torch 2.13 takes two packed codes for one in the shapes of compiled MXFP4")
    return None


def run_mx(lhs: QTensor, rhs: QTensor, bias: Tensor | None, out_dtype: torch.dtype, fast_accumulate: bool) -> Tensor:
    """MXFP4 leaves its kernel rounded to bfloat16, the others in float32 where it is wanted."""
    if (empty := empty_product(lhs, rhs, bias, out_dtype)) is not None:
        return empty
    kind = mx_kind(lhs.cast)
    shared = [] if kind == "nvfp4" else [q.global_scale for q in (lhs, rhs) if q.global_scale is not None]
    wanted = torch.float32 if shared else _result_dtype(bias, out_dtype)
    levels = 2 if kind == "nvfp4" else 1
    swizzle = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE][:levels]
    how = [ScalingType.BlockWise1x16, ScalingType.TensorWise] if kind == "nvfp4" else [ScalingType.BlockWise1x32]
    out = scaled_mm(
        mx_codes(lhs), mx_codes(rhs).T, mx_scales(lhs), how, mx_scales(rhs), how,
        swizzle_a=swizzle, swizzle_b=swizzle, output_dtype=torch.bfloat16 if kind == "mxfp4" else wanted,
    )  # fmt: skip
    for factor in shared:
        out = out.to(torch.float32) * factor
    return _finished(out, lhs, rhs, bias, out_dtype)


def mx_codes(operand: QTensor) -> Tensor:
    """[outer, K] filled up; two E2M1 codes to an element."""
    if not operand.is_packed:
        return aligned(operand.data, ALIGNMENT, MX)
    return aligned(operand.data, ALIGNMENT, MX // operand.cast.format.codes_per_byte).view(torch.float4_e2m1fn_x2)


def mx_scales(operand: QTensor) -> list[Tensor]:
    """The scales of tiles, one per row, swizzled; and the tensor's, of NVFP4."""
    scale, rows = operand.scale, operand.cast.tile[0]
    if rows > 1:
        scale = scale.repeat_interleave(rows, dim=0)[: operand.shape[0]]
    if not operand.cast.scale.two_level:
        return [swizzled(to_e8m0(scale))]
    assert operand.global_scale is not None
    return [swizzled(E4M3.encode(scale.contiguous())), operand.global_scale.reshape(1)]


# --- integers ---


def refuse_int8(spec: MmSpec) -> Refusal | None:
    """Integers with one scale per tensor or row, where the device multiplies integers faster than floats.

    4-bit integers run as INT8: their codes, and those of a bit-split gradient, are exact there.
    """
    device = spec.device
    if any(cast is None or not isinstance(cast.format, IntFormat) for cast in spec.casts):
        return NOT_INTEGERS
    if any(cast is not None and cast.tile not in _ROW_OR_TENSOR for cast in spec.casts):
        return Refusal("tile", "the integer GEMM takes one scale per tensor or per row")
    if spec.expanded:
        return EXPANDED
    if any(cast is not None and cast.has_global_scale for cast in spec.casts):
        return TWO_SCALES
    if device.type == "cpu" and not device.int8_gemm:
        slow = "this CPU has no VNNI instructions; its integer GEMM is many times slower than float32"
        return Refusal("capability", slow)
    if device.type not in ("cpu", "cuda"):
        return Refusal("device", f"no integer GEMM on {device.type}")
    if device.type == "cuda" and device.capability < (8, 0):
        return Refusal("capability", f"compute capability {spec.capability}, the integer GEMM needs 8.0")
    return None


def run_int8(lhs: QTensor, rhs: QTensor, bias: Tensor | None, out_dtype: torch.dtype, fast_accumulate: bool) -> Tensor:
    """torch._int_mm: exact int32 sums of up to 2**17 products; their sum, scales and bias in float32."""
    if (empty := empty_product(lhs, rhs, bias, out_dtype)) is not None:
        return empty
    m, n = lhs.shape[0], rhs.shape[0]
    rows = SMALLEST_INT8_ROWS if m <= ALIGNMENT else ALIGNMENT
    a, b = aligned(lhs.one_to_a_byte(), rows, ALIGNMENT), aligned(rhs.one_to_a_byte(), ALIGNMENT, ALIGNMENT)
    parts = zip(a.split(LONGEST_INT8_SUM, dim=1), b.split(LONGEST_INT8_SUM, dim=1), strict=True)
    sums = [torch._int_mm(left.contiguous(), right.contiguous().T)[:m, :n].to(torch.float32) for left, right in parts]
    out = times_scales(sum(sums[1:], start=sums[0]), lhs.scale, rhs.scale)  # as the emulation does, to the bit
    return _finished(out, lhs, rhs, bias, out_dtype)


# --- what they share ---


def empty_product(lhs: QTensor, rhs: QTensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor | None:
    """The product where nothing is contracted or nothing comes out, else None."""
    if 0 not in (lhs.shape[0], rhs.shape[0], lhs.shape[1]):
        return None
    out = torch.zeros(lhs.shape[0], rhs.shape[0], device=lhs.device, dtype=out_dtype)
    return out if bias is None else out + bias.to(out_dtype)


def aligned(data: Tensor, rows: int, columns: int) -> Tensor:
    """data as a contiguous matrix, filled up with zeros to multiples of (rows, columns)."""
    fill = (0, -data.shape[1] % columns, 0, -data.shape[0] % rows)
    if not any(fill):
        return data.contiguous()
    return pad(data.contiguous().view(torch.uint8), fill).view(data.dtype)


def _result_dtype(bias: Tensor | None, out_dtype: torch.dtype) -> torch.dtype:
    """Of a kernel's result: bfloat16 if that is all that is wanted; no other type, and no bias to be added first."""
    return torch.bfloat16 if bias is None and out_dtype == torch.bfloat16 else torch.float32


def _finished(out: Tensor, lhs: QTensor, rhs: QTensor, bias: Tensor | None, out_dtype: torch.dtype) -> Tensor:
    """Cut to [M, N]; the bias is added in float32."""
    out = out[: lhs.shape[0], : rhs.shape[0]]
    if bias is not None:
        out = out.to(torch.float32) + bias.to(torch.float32)
    return out.to(out_dtype)


def _cuda(spec: MmSpec) -> str:
    return ".".join(map(str, spec.device.cuda))


def scaled_mm(
    a: Tensor,
    b: Tensor,
    scale_a: list[Tensor],
    how_a: list[ScalingType],
    scale_b: list[Tensor],
    how_b: list[ScalingType],
    *,
    swizzle_a: Any = (),
    swizzle_b: Any = (),
    output_dtype: torch.dtype,
) -> Tensor:
    """torch.nn.functional.scaled_mm by the operator that it calls: torch.compile breaks the graph at the function before 2.13."""
    kinds = [[each.value for each in given] for given in (how_a, swizzle_a, how_b, swizzle_b)]
    return torch.ops.aten._scaled_mm_v2.default(
        a, b, scale_a, kinds[0], kinds[1], scale_b, kinds[2], kinds[3], None, output_dtype
    )


# --- layouts of scales ---

ROWS, COLUMNS, GROUP = 128, 4, 32  # of a swizzled block; rows that lie together in it


def outer_major(scale: Tensor, rows: int) -> Tensor:
    """scale [R, C] float32 -> [rows, C] with strides [1, rows], rows >= R. One copy."""
    return pad(scale.T, (0, rows - scale.shape[0])).contiguous().T


def padded_to_four(scale: Tensor) -> Tensor:
    """scale [R, C] float32, one per 128x128 tile -> [C rounded up to 4, R] with strides [1, C rounded up]. One copy."""
    return pad(scale, (0, -scale.shape[1] % COLUMNS)).contiguous().T


def swizzled(scale: Tensor) -> Tensor:
    """scale [R, C], one byte per element -> flat, R rounded up to 128 times C rounded up to 4, zero where filled up. One copy."""
    bytes_ = pad(scale.view(torch.uint8), (0, -scale.shape[1] % COLUMNS, 0, -scale.shape[0] % ROWS))
    panels, columns = bytes_.shape[0] // ROWS, bytes_.shape[1] // COLUMNS
    blocks = bytes_.view(panels, ROWS // GROUP, GROUP, columns, COLUMNS)
    return blocks.permute(0, 3, 2, 1, 4).reshape(-1).view(scale.dtype)


def to_e8m0(scale: Tensor) -> Tensor:
    """Powers of two, 2**-126 to 2**127, or NaN, float32 -> float8_e8m0fnu of the same shape: the exponent bits as they are."""
    exponents = (scale.contiguous().view(torch.int32) >> 23) & 0xFF  # NaN has 0xFF there, which is E8M0's NaN
    return exponents.to(torch.uint8).view(torch.float8_e8m0fnu)
