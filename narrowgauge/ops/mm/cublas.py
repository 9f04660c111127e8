"""torch's low-precision GEMMs: FP8 (tensors, rows, blocks of 128), MX, NVFP4 and integers.

    native         _scaled_mm     FP8, one scale per tensor or row; compute capability 8.9
    native-block   scaled_mm      E4M3, 1x128 by 128x128, 128x128 by 1x128 and 1x128 by 1x128;
                                  only 9.0, CUDA 12.9
    native-mx      scaled_mm      MXFP8: tiles of 32, E8M0 scales; NVFP4: tiles of 16, E4M3 scales
                                  and one float32; 10.0, CUDA 12.8
                                  MXFP4: only 10.x (MSLK), result in bfloat16
    native-int8    _int_mm        integers, one scale per tensor or row; 8.0, and CPUs with VNNI

All GEMMs take lhs row-major [M, K] and rhs column-major, i.e. our row-major rhs [N, K] as a
transposed view. Of FP8 with one scale per tensor, 10.x takes every layout (`takes_every_layout`).

Alignment: all axes multiples of 16 (integers: 8, and M above 16). Blocks: K a multiple of 128, and
the outer axis too in 128x128 tiles. MX: K a multiple of 32, so that rows start at 16 bytes even
with two codes per byte. Smaller tensors are padded with zeros, which change no result, and the
result is cut. Padding copies. torch 2.13 refuses other shapes of blocks, or drops the remainder
(ScaledBlas.cpp, _check_deepseek_support).

Blocks and MX have no fast accumulation. Layout of their scales (cuBLAS 12.9, "Block scaling factors
layout"), for R rows and C tiles along the contracted axis:

    outer_major     1x128 tiles    [R, C] with strides [1, R]: neighbouring rows are adjacent
    padded_to_four  128x128 tiles  [C4, R/128] with strides [1, C4], C4 = C rounded up to 4 n
    swizzled        1x32 and 1x16  one byte each, flat: `scaling.swizzled`. Casts of ours write it
                                   themselves from 10.0 on (`QTensor.units`)

The epilogue adds the bias in float32 before the only rounding, if the result is bfloat16 and torch
passes the bias on: native, native-block, and native-mx except for MXFP4 and headroom. torch accepts
only a bfloat16 bias, and none for a float32 result.

Square tiles (16x16, 32x32) repeat their scale for each row, which changes no number. The factor
that all tiles of a tensor share is float32: the NVFP4 kernel takes it as an argument; for MX
(headroom) it multiplies the result.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType, pad
from torch.utils._python_dispatch import _disable_current_modes

from narrowgauge.addresses import dry_run_on, tell_launch, type_of
from narrowgauge.errors import BackendError
from narrowgauge.formats import E4M3
from narrowgauge.ops.chunking import row_chunks
from narrowgauge.ops.mm.definition import times_scales, with_epilogue
from narrowgauge.ops.mm.spec import BLOCK, MX, SQUARE, mx_kind
from narrowgauge.ops.registry import device_facts
from narrowgauge.scaling import SCALE_COLUMNS, swizzled, to_exponents

if TYPE_CHECKING:
    from narrowgauge.qtensor import QTensor

ALIGNMENT = 16
SMALLEST_INT8_ROWS = 32  # torch._int_mm on CUDA needs M > 16
Bias = Tensor | None
_READS_VIEWS: dict[int, bool] = {}  # index of a GPU -> `_reads_views`
LONGEST_INT8_SUM = 2**17  # 127 * 127 * 2**17 < 2**31; longer sums would wrap around


# Enum values as the operator takes them, because reading `.value` at every GEMM is slow.
TENSORWISE, BLOCKWISE1X16, BLOCKWISE1X32 = (
    ScalingType.TensorWise.value,
    ScalingType.BlockWise1x16.value,
    ScalingType.BlockWise1x32.value,
)
BLOCKWISE1X128, BLOCKWISE128X128 = (
    ScalingType.BlockWise1x128.value,
    ScalingType.BlockWise128x128.value,
)
NO_SWIZZLE, SWIZZLE_32_4_4 = SwizzleType.NO_SWIZZLE.value, SwizzleType.SWIZZLE_32_4_4.value


def _on_cuda(lhs: QTensor, rhs: QTensor) -> bool:
    """Return True if the GEMM can add the bias: torch's CPU versions round before they add it."""
    return type_of(lhs.device) == "cuda"


def takes_every_layout(device: torch.device) -> bool:
    """Return True if `_scaled_mm` on this device reads FP8 codes of x.T as a view of those of x.

    cuBLAS does so on 10.x, and on 12.x not (NVIDIA/TransformerEngine, `is_non_tn_fp8_gemm_supported`).
    A device that is present is asked once.
    """
    facts = device_facts(device.type, device.index)
    if facts.type != "cuda" or facts.capability[0] != 10:
        return False
    return facts.index is None or dry_run_on() is not None or _reads_views(facts.index)


def _reads_views(index: int) -> bool:
    """Compare a small product with one of turned memory, once. Raises BackendError in a capture."""
    if index not in _READS_VIEWS:
        if torch.cuda.is_current_stream_capturing():
            raise BackendError(
                f"mm: cuda:{index} was never asked whether it reads transposed codes, and cannot be while a CUDA graph is "
                "captured. Run one step before the capture.",
                code="kernel.unchecked",
            )
        with (
            _disable_current_modes(),
            torch.no_grad(),
            torch.autocast("cuda", enabled=False),
        ):
            _READS_VIEWS[index] = _gives_the_same(torch.device("cuda", index))
    return _READS_VIEWS[index]


def _gives_the_same(device: torch.device) -> bool:
    """Multiply [48, 32] by [64, 32], whole numbers, in all four layouts."""
    numbers = torch.arange(112 * 32, device=device).remainder(9).sub(4).float().to(E4M3.storage)
    a, b = numbers.view(112, 32).split([48, 64])
    one = torch.ones((), device=device)
    try:
        wanted, *found = (
            torch._scaled_mm(left, right.t(), one, one, out_dtype=torch.float32)
            for left in (a, _turned(a)) for right in (b, _turned(b))
        )  # fmt: skip
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # cuBLAS has no such product
        return False
    return all(torch.equal(wanted, each) for each in found)


def _turned(x: Tensor) -> Tensor:
    """The same matrix with contiguous columns."""
    return x.t().contiguous().t()


def _scaled(
    lhs: QTensor, rhs: QTensor, bias: Bias, dtype: torch.dtype, fast_accumulate: bool
) -> Tensor:
    """torch._scaled_mm. With row scales its result is rounded to bfloat16, whatever `dtype` is."""
    by_tensor = lhs.cast.is_per_tensor and rhs.cast.is_per_tensor
    a, b = (
        each if by_tensor and _is_view(each) else aligned(each, ALIGNMENT, ALIGNMENT)
        for each in (lhs.data, rhs.data)
    )
    scale_a, scale_b = lhs.scale, rhs.scale
    if not by_tensor:
        # torch's kernel for row scales returns bfloat16 only; `with_epilogue` converts the result.
        scale_a, scale_b, dtype = _rows(lhs, a.shape[0]), _rows(rhs, b.shape[0]).t(), torch.bfloat16
    return torch._scaled_mm(
        a, b.t(), scale_a=scale_a, scale_b=scale_b, bias=filled(bias, b.shape[0]), out_dtype=dtype, use_fast_accum=fast_accumulate
    )  # fmt: skip


def _is_view(codes: Tensor) -> bool:
    """True if the codes are those of the transposed tensor, and the GEMM reads them so."""
    if codes.stride(0) != 1 or codes.stride(1) == 1 or torch.compiler.is_compiling():
        return False
    return turns_freely(codes) and takes_every_layout(codes.device)


def turns_freely(x: Tensor) -> bool:
    """True if the codes of such a matrix need no padding in either orientation."""
    return not any(size % ALIGNMENT for size in x.shape)


run_scaled = with_epilogue(_scaled, adds=_on_cuda)


def _rows(operand: QTensor, aligned_rows: int) -> Tensor:
    """Return one float32 scale per row, [aligned_rows, 1]; 1 for padding rows."""
    scale, rows = operand.scale, operand.data.shape[0]
    if scale.shape[0] == rows == aligned_rows:
        return scale.contiguous()
    return _filled_up(scale.expand(rows, 1), aligned_rows - rows, 0, 1.0).contiguous()


def _filled_up(scale: Tensor, rows: int, columns: int, value: float = 0.0) -> Tensor:
    """Pad a matrix of scales with rows and columns."""
    # torch's pad copies even if there is nothing to pad (torch 2.11 and 2.13).
    return pad(scale, (0, columns, 0, rows), value=value) if rows or columns else scale


@with_epilogue
def run_int8(
    lhs: QTensor, rhs: QTensor, bias: Bias, dtype: torch.dtype, fast_accumulate: bool
) -> Tensor:
    """torch._int_mm, which has no epilogue: exact int32 sums of up to 2**17 products.

    The parts of longer sums and the scales are float32.
    """
    m, n = lhs.shape[0], rhs.shape[0]
    rows = SMALLEST_INT8_ROWS if m <= ALIGNMENT else ALIGNMENT
    a, b = (
        aligned(lhs.one_to_a_byte(), rows, ALIGNMENT),
        aligned(rhs.one_to_a_byte(), ALIGNMENT, ALIGNMENT),
    )
    parts = zip(a.split(LONGEST_INT8_SUM, dim=1), b.split(LONGEST_INT8_SUM, dim=1), strict=True)
    sums = [
        torch._int_mm(left.contiguous(), right.contiguous().T)[:m, :n].to(torch.float32)
        for left, right in parts
    ]
    # Bit-identical to the emulation if there is one part.
    return times_scales(sum(sums[1:], start=sums[0]), lhs.scale, rhs.scale)


class Scaled(NamedTuple):
    """An operand of scaled_mm.

    codes     [outer, K], padded
    scales    one or two tensors
    kinds     values of ScalingType, one per scale tensor
    swizzles  values of SwizzleType, one per scale tensor
    """

    codes: Tensor
    scales: list[Tensor]
    kinds: list[int]
    swizzles: list[int]


def _block(
    lhs: QTensor, rhs: QTensor, bias: Bias, dtype: torch.dtype, fast_accumulate: bool
) -> Tensor:
    """GEMM of E4M3 in blocks of 128."""
    return scaled_mm(_in_blocks(lhs), _in_blocks(rhs), bias, dtype)


run_block = with_epilogue(_block, adds=_on_cuda)


def _in_blocks(operand: QTensor) -> Scaled:
    """Arrange an operand in blocks; see the module for the layouts of the scales.

    Scales from the Triton casts have this layout already. Other scales, and padded ones, are
    copied.
    """
    scale = operand.scale
    outer, inner = scale.shape
    if operand.cast.tile == SQUARE:
        padded_to_four = _filled_up(scale, 0, -inner % SCALE_COLUMNS).contiguous().t()
        return Scaled(aligned(operand.data, BLOCK, BLOCK), [padded_to_four], [BLOCKWISE128X128], [])
    codes = aligned(operand.data, ALIGNMENT, BLOCK)
    # Comparing strides is cheaper for the host than making a view.
    if outer != codes.shape[0] or scale.stride() != (1, outer):
        scale = _filled_up(scale.t(), 0, codes.shape[0] - outer).contiguous().t()
    return Scaled(codes, [scale], [BLOCKWISE1X128], [])


def _mx(
    lhs: QTensor, rhs: QTensor, bias: Bias, dtype: torch.dtype, fast_accumulate: bool
) -> Tensor:
    """MX and NVFP4 GEMM.

    MXFP4 results leave the kernel in bfloat16. Others leave it in `dtype`, or in float32 if
    headroom multiplies them.
    """
    kind, wanted = mx_kind(lhs.cast), dtype
    headroom = _headroom(lhs, rhs)
    if headroom or kind == "mxfp4":
        dtype = torch.bfloat16 if kind == "mxfp4" else torch.float32
    out = scaled_mm(mx_operand(lhs), mx_operand(rhs), bias, dtype)
    slices = row_chunks(out) if headroom else []
    if len(slices) > 1 and out.dtype == wanted:
        for each in slices:
            out[each] = _times(out[each], headroom)
        return out
    return _times(out, headroom)


def _times(out: Tensor, factors: list[Tensor]) -> Tensor:
    """Multiply in float32, if there are factors."""
    for factor in factors:
        out = out.to(torch.float32) * factor
    return out


def _headroom(lhs: QTensor, rhs: QTensor) -> list[Tensor]:
    """Return the factors of whole tensors that multiply the result.

    NVFP4 passes them to the kernel instead.
    """
    return [
        q.global_scale
        for q in (lhs, rhs)
        if q.global_scale is not None and mx_kind(q.cast) != "nvfp4"
    ]


run_mx = with_epilogue(
    _mx,
    adds=lambda lhs, rhs: (
        _on_cuda(lhs, rhs) and mx_kind(lhs.cast) != "mxfp4" and not _headroom(lhs, rhs)
    ),
)


def mx_operand(operand: QTensor) -> Scaled:
    """Arrange an MX or NVFP4 operand for scaled_mm.

    Codes of E2M1 are packed in pairs. The scales of tiles are expanded to one per row and swizzled;
    NVFP4 adds the tensor's scale.
    """
    columns = MX // operand.cast.format.codes_per_byte if operand.is_packed else MX
    codes = aligned(operand.data, ALIGNMENT, columns)
    codes = codes.view(torch.float4_e2m1fn_x2) if operand.is_packed else codes
    units = operand.units
    if not operand.cast.scale.two_level:
        units = swizzled(to_e8m0(_by_row(operand))) if units is None else units
        return Scaled(codes, [units.view(torch.float8_e8m0fnu)], [BLOCKWISE1X32], [SWIZZLE_32_4_4])
    assert operand.global_scale is not None
    if units is None:
        units = swizzled(E4M3.encode(_by_row(operand).contiguous()))
    scales = [units.view(torch.float8_e4m3fn), operand.global_scale.reshape(1)]
    kinds = [BLOCKWISE1X16, TENSORWISE]
    return Scaled(codes, scales, kinds, [SWIZZLE_32_4_4, NO_SWIZZLE])


def _by_row(operand: QTensor) -> Tensor:
    """Scales with a row for each row of the operand."""
    rows = operand.cast.tile[0]
    if rows == 1:
        return operand.scale
    return operand.scale.repeat_interleave(rows, dim=0)[: operand.shape[0]]


def aligned(data: Tensor, rows: int, columns: int) -> Tensor:
    """Return data as a contiguous matrix, padded with zeros to multiples of (rows, columns)."""
    outer, inner = data.shape
    if not outer % rows and not inner % columns:
        return data.contiguous()
    fill = (0, -inner % columns, 0, -outer % rows)
    # Viewed as bytes: the code of zero is 0 in all formats, and the result has the dtype of the
    # codes.
    return pad(data.contiguous().view(torch.uint8), fill).view(data.dtype)


def filled(bias: Bias, columns: int) -> Bias:
    """Pad bias [N] with zeros up to `columns`."""
    return (
        bias
        if bias is None
        else pad(bias.contiguous(), (0, columns - len(bias)))
        if len(bias) < columns
        else bias
    )


def scaled_mm(lhs: Scaled, rhs: Scaled, bias: Bias, dtype: torch.dtype) -> Tensor:
    """Call the operator of torch.nn.functional.scaled_mm.

    Before torch 2.13 the function itself causes a graph break under torch.compile. Compiled code
    calls `narrowgauge::scaled_mm` instead. Inductor of torch 2.13 lowers the operator to
    `_scaled_mm`, which expects other shapes for the scales of blocks of 128, and fails at run time.
    """
    is_compiling = torch.compiler.is_compiling()
    # Torch 2.13 counts packed MXFP4 codes of fake tensors wrongly.
    if not is_compiling and dry_run_on() is not None:
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
    # The binding takes a third of the time of the operator overload.
    out: Tensor = torch._scaled_mm_v2(lhs, rhs.t(), *rest)
    return out


torch.library.define(
    "narrowgauge::scaled_mm",
    "(Tensor lhs, Tensor rhs, Tensor[] lhs_scales, int[] lhs_kinds, int[] lhs_swizzles, "
    "Tensor[] rhs_scales, int[] rhs_kinds, int[] rhs_swizzles, Tensor? bias, ScalarType dtype) -> Tensor",
)
torch.library.impl("narrowgauge::scaled_mm", "CompositeExplicitAutograd", _scaled_mm)
torch.library.register_fake(
    "narrowgauge::scaled_mm",
    lambda lhs, rhs, *rest: lhs.new_empty((lhs.shape[0], rhs.shape[0]), dtype=rest[-1]),
)


def to_e8m0(scale: Tensor) -> Tensor:
    """Convert float32 scales to float8_e8m0fnu of the same shape: the exponent bits.

    Scales are powers of two, 2**-126 to 2**127, or NaN.
    """
    return to_exponents(scale).view(torch.float8_e8m0fnu)
