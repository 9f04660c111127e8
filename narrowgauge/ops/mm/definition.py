"""Definition of mm: decode, multiply in an exact float dtype, sum in float32.

The float dtype represents both operands exactly.

If an operand has one scale per row (or one in all), its scales are applied after the sum:

    out[m, n] = s_lhs[m] * s_rhs[n] * sum over k of v_lhs[m, k] * v_rhs[n, k]

and the GEMM runs on the bare values v. Otherwise the scales of the tiles are multiplied in first.
Only the factor that all tiles share (two-level rules, headroom) is then applied after the sum.

Expanded operands are bfloat16 on devices with fast bfloat16 GEMMs. Values of E4M3, E5M2, INT8 and
smaller formats are exact there, also after multiplication by a power of two. So is NVFP4: a value
of 2 significant bits times an e4m3 scale of 4. On a CPU without bfloat16 instructions float32 is
several times faster and represents the same values.

A CPU's bfloat16 GEMM sums in float32 but returns bfloat16. It is used where that is the only
rounding: the result is bfloat16. Each scale must be one number, by which the GEMM multiplies before
it rounds, or a power of two, which may be applied afterwards. Without scales oneDNN also adds a
bias before it rounds; with a bias its results below 2^-126 are zero. All other GEMMs run in
float32, which takes twice as long. Measured on AMD Zen 5 (AVX512-BF16), torch 2.13,
one thread, in milliseconds of CPU time. The error is the relative Frobenius norm against float64,
for normal numbers rounded to bfloat16:

    M = N = K                                       512    1024    2048    error
    bfloat16                                        0.63   5.1     42      1.7e-3 (a)
    bfloat16 twice: the second GEMM computes the
    remainder of the first, addmm(beta=-1)          1.43   11.2    105     2.5e-6
    float32 by oneDNN                               1.31   10.6    86      2e-7 to 6e-7 (b)
    float32 by MKL, i.e. torch.mm                   2.83   22.1    186     1e-7

    (a) rounding of the result    (b) its order of summation

Integers are summed exactly, as integer units do. Partial sums of integers are exact in float32 in
any order while the sum of magnitudes stays below 2**24. That sum is at most max_lhs * max_rhs * K,
so K may be up to 24,455 for a bit-split gradient times INT4, and 1,040 for INT8 times INT8. A
longer axis is split, and the exact parts are added in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge.addresses import type_of
from narrowgauge.formats import FloatFormat, IntFormat, TableFormat
from narrowgauge.ops.registry import Device, device_facts
from narrowgauge.qtensor import FoldedQTensor, QTensor
from narrowgauge.scaling import WHOLE, times_scale

if TYPE_CHECKING:
    from narrowgauge.recipe import Cast

# None in a torch without oneDNN.
_ONEDNN_LINEAR: Any = getattr(torch.ops.mkldnn, "_linear_pointwise", None)


def compute_dtype(casts: tuple[Cast | None, ...], device: Device) -> torch.dtype:
    """Return the fastest float dtype of `device` that represents every operand exactly.

    The operands include the scales that must be multiplied in before the GEMM.
    """
    if not device.bf16_gemm:
        return torch.float32
    # The bfloat16 GEMM would round integer sums, which the definition keeps exact.
    if device.type == "cpu" and all(
        cast is not None and isinstance(cast.format, IntFormat) for cast in casts
    ):
        return torch.float32
    exact = all(cast is None or _is_exact_in_bf16(cast) for cast in casts)
    return torch.bfloat16 if exact else torch.float32


def _is_exact_in_bf16(cast: Cast) -> bool:
    if isinstance(cast.format, TableFormat):
        return False
    scales_leave_the_sum = cast.tile[1] == WHOLE
    # 4 + 4 bits fit into bfloat16's 8.
    fits_beside_e4m3 = isinstance(cast.format, FloatFormat) and cast.format.mantissa < 4
    return (
        scales_leave_the_sum
        or cast.scale.power_of_two
        or (cast.scale.two_level and fits_beside_e4m3)
    )


def run(
    lhs: QTensor | Tensor,
    rhs: QTensor | Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accumulate: bool,
) -> Tensor:
    """See `ops.mm`. fast_accumulate has no effect: the sum is always float32."""
    is_plain = isinstance(lhs, QTensor) and not isinstance(lhs, FoldedQTensor)
    device = (lhs.data if is_plain else lhs).device.type
    # Autocast would round the operands of torch.mm.
    if device != "meta" and torch.is_autocast_enabled(device):
        with torch.autocast(device, enabled=False):
            return run(lhs, rhs, bias, out_dtype, fast_accumulate)
    (left, left_scale), (right, right_scale) = _factored(lhs, rhs), _factored(rhs, lhs)
    if left.dtype == right.dtype == out_dtype == torch.bfloat16:
        is_unscaled = left_scale is right_scale is None and not (_is_folded(lhs) or _is_folded(rhs))
        if type_of(left.device) == "cuda" and is_unscaled and bias is None:
            # Sums in float32 and rounds once, as below, but in one pass.
            return torch.mm(left, right.T)
        if bias is not None and is_unscaled and _takes_bias(left, right, bias):
            return _biased_once(left, right, bias)
        if (
            bias is None
            and _uses_onednn(left)
            and _scales_exactly(lhs, left_scale)
            and _scales_exactly(rhs, right_scale)
        ):
            return _rounded_once(left, right, left_scale, right_scale)
    integers = [
        x.cast.format
        for x in (lhs, rhs)
        if isinstance(x, QTensor) and isinstance(x.cast.format, IntFormat)
    ]
    exact = len(integers) == 2 and left_scale is not None and right_scale is not None
    longest = int((2**24 - 1) // (integers[0].max * integers[1].max)) if exact else None
    out = times_scales(_summed(left, right, longest), left_scale, right_scale, in_place=True)
    # Add the bias before leaving float32: rounding first and adding after differs between eager and
    # compiled code.
    return out.to(out_dtype) if bias is None else _biased(out, bias.to(torch.float32), out_dtype)


def with_epilogue(
    multiply: Callable[[QTensor, QTensor, Tensor | None, torch.dtype, bool], Tensor],
    adds: Callable[[QTensor, QTensor], bool] = lambda lhs, rhs: False,
) -> Callable[..., Tensor]:
    """Wrap a GEMM into the `run` of a kernel.

    The wrapper handles autocast, empty operands, the cut to [M, N], the bias and the last rounding.

    multiply  multiply(lhs, rhs, bias, dtype, fast_accumulate) -> [M, N] or larger. dtype is
              bfloat16 if the result is bfloat16 and no bias follows, else float32; the GEMM may
              return another float dtype. bias is bfloat16 if the GEMM adds it in its epilogue
              before it rounds to bfloat16, else None. A wider bias is rounded to bfloat16 first, as
              torch's Linear does under autocast
    adds      adds(lhs, rhs) is True if the GEMM adds a bias itself; otherwise one elementwise pass
              adds it and rounds
    """

    def run_with_epilogue(
        lhs: QTensor,
        rhs: QTensor,
        bias: Tensor | None,
        out_dtype: torch.dtype,
        fast_accumulate: bool,
    ) -> Tensor:
        device = lhs.data.device.type
        # Autocast would round the operands of a kernel that calls torch.mm.
        if device != "meta" and torch.is_autocast_enabled(device):
            with torch.autocast(device, enabled=False):
                return run_with_epilogue(lhs, rhs, bias, out_dtype, fast_accumulate)
        m, n = lhs.data.shape[0], rhs.data.shape[0]
        if m == 0 or n == 0 or lhs.inner == 0:
            return run(lhs, rhs, bias, out_dtype, fast_accumulate)
        inside = outside = None
        if bias is not None and out_dtype == torch.bfloat16 and adds(lhs, rhs):
            inside = bias.to(torch.bfloat16)
        else:
            outside = bias
        narrow = outside is None and out_dtype == torch.bfloat16
        out = multiply(
            lhs, rhs, inside, torch.bfloat16 if narrow else torch.float32, fast_accumulate
        )
        if out.shape != (m, n):
            out = out[:m, :n]
        if outside is not None:
            return _biased(out, outside, out_dtype)
        return out if out.dtype == out_dtype else out.to(out_dtype)

    return run_with_epilogue


def _biased(out: Tensor, bias: Tensor, dtype: torch.dtype) -> Tensor:
    """Return out + bias, added in float32 and rounded to dtype, in one pass."""
    if torch.compiler.is_compiling():  # the compiler fuses these operations
        return (out.to(torch.float32) + bias.to(torch.float32)).to(dtype)
    return torch.add(
        out, bias, out=torch.empty_like(out, dtype=dtype, memory_format=torch.contiguous_format)
    )


def _is_folded(operand: QTensor | Tensor) -> bool:
    """Return True if scales that would leave the sum are in the values already."""
    return isinstance(operand, FoldedQTensor) and operand.scale.shape[1] <= 1


def _stays_normal(lhs: FoldedQTensor, rhs: FoldedQTensor) -> bool:
    """Return True if no product of two values, and no sum of 2**20, leaves float32's normal range.

    The sum is then the one without scales, times both, bit for bit.
    """
    return lhs.span[0] + rhs.span[0] >= -126 and lhs.span[1] + rhs.span[1] <= 127 - 20


def _factored(operand: QTensor | Tensor, other: QTensor | Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the matrix that enters the GEMM, and the scales that are applied after it.

    The scales are [outer or 1, 1], or None. Expanded values keep their dtype if their product with
    a scale inside the sum is exact, as in every plan of `compute_dtype`. bfloat16 values whose
    scales are not powers of two become float32; only direct callers of `mm` pass them.
    """
    if not isinstance(operand, QTensor):
        return operand, None
    if isinstance(operand, FoldedQTensor):
        leaves_the_sum = operand.scale.shape[1] <= 1
        if not leaves_the_sum or (
            isinstance(other, FoldedQTensor) and _stays_normal(operand, other)
        ):
            whole = operand.global_scale
            return operand.folded, None if whole is None else whole.reshape(1, 1)
    is_values = operand.data.dtype in (torch.float32, torch.bfloat16)
    if operand.scale.shape[1] <= 1:
        return operand.data if is_values else operand.values(), _row_scale(operand)
    exact = is_values and _is_exact_in_bf16(operand.cast)
    values = operand.data if exact else operand.values().to(torch.float32)
    shared = None if operand.global_scale is None else operand.global_scale.reshape(1, 1)
    return times_scale(values, operand.scale, operand.cast.tile), shared


def _summed(lhs: Tensor, rhs: Tensor, longest: int | None) -> Tensor:
    """Return lhs @ rhs.T in float32.

    longest  number of products whose sum is exact; longer sums are split and added in float64.
             None: no limit
    """
    if longest is None or lhs.shape[1] <= longest:
        return _float_mm(lhs, rhs)
    out = torch.zeros(lhs.shape[0], rhs.shape[0], dtype=torch.float64, device=lhs.device)
    for left, right in zip(lhs.split(longest, dim=1), rhs.split(longest, dim=1), strict=True):
        out += _float_mm(left, right)
    return out.to(torch.float32)


def _float_mm(lhs: Tensor, rhs: Tensor) -> Tensor:
    """Return a GEMM's float32 result.

    CUDA computes it in the wider dtype of the operands; other devices have no 16-bit GEMM with
    float32 output.
    """
    dtype = torch.promote_types(lhs.dtype, rhs.dtype)
    if dtype in (torch.bfloat16, torch.float16) and type_of(lhs.device) == "cuda":
        return torch.mm(lhs.to(dtype), rhs.to(dtype).T, out_dtype=torch.float32)
    lhs, rhs = lhs.to(torch.float32), rhs.to(torch.float32)
    (m, k), n = lhs.shape, rhs.shape[0]
    # oneDNN's float32 GEMM is twice as fast as MKL's (torch.mm) on CPUs with bfloat16 instructions.
    # But a call costs 12 us before it multiplies, MKL's 4 us (64 x 64 x 64). Small GEMMs, with up
    # to 2**18 multiplications along at most 128 elements, therefore stay with torch.mm. There both
    # gave identical bits in all of 4,800 random shapes.
    #
    # Two alternatives lost. `torch.backends.mkldnn.matmul.fp32_precision = "bf16"` keeps float32 on
    # CPUs without AMX, and is global, so GEMMs of other threads would be rounded.
    # torch.mm(out_dtype=float32) has no CPU kernel.
    is_small = m >= 16 and n >= 16 and k <= 128 and m * n * k <= 1 << 18
    if is_small or 0 in (m, n, k) or not _uses_onednn(lhs):
        return torch.mm(lhs, rhs.T)
    if _ONEDNN_LINEAR is None:
        return torch.mm(lhs, rhs.T)
    return _ONEDNN_LINEAR(lhs, rhs, None, "none", [], "")


def _uses_onednn(operand: Tensor) -> bool:
    """Return True if oneDNN's GEMMs apply: eager mode, on a CPU with bfloat16 instructions.

    Compiled code multiplies in float32 by torch.mm. Around an opaque operator for the GEMM,
    Inductor (2.13) gave wrong numbers for padded tiles.
    """
    # A fake tensor has no value to read as a factor.
    is_plain = type(operand) in (Tensor, torch.nn.Parameter)
    on_cpu = operand.device.type == "cpu" and not torch.compiler.is_compiling()
    return on_cpu and is_plain and device_facts("cpu", None).bf16_gemm


def _scales_exactly(operand: QTensor | Tensor, scale: Tensor | None) -> bool:
    """Return True if applying the scale adds no rounding to a bfloat16 GEMM.

    One number enters the GEMM as a factor before it rounds; a power of two is exact afterwards.
    """
    if scale is None or scale.numel() == 1:
        return True
    return (
        isinstance(operand, QTensor)
        and operand.cast.scale.power_of_two
        and operand.global_scale is None
    )


def _rounded_once(
    lhs: Tensor, rhs: Tensor, lhs_scale: Tensor | None, rhs_scale: Tensor | None
) -> Tensor:
    """Return the bfloat16 GEMM by oneDNN, times scales that `_scales_exactly` accepts."""
    scales = (lhs_scale, rhs_scale)
    numbers = [scale for scale in scales if scale is not None and scale.numel() == 1]
    if numbers:
        # alpha is multiplied in float32, before the only rounding. The bias of addmm is ignored
        # with beta=0.
        factor = numbers[0] if len(numbers) == 1 else numbers[0] * numbers[1]
        out = torch.addmm(lhs.new_empty(1), lhs, rhs.T, beta=0, alpha=factor.item())
    else:
        out = torch.mm(lhs, rhs.T)
    return times_scales(
        out,
        *(
            None if scale is None or scale.numel() == 1 else scale.to(torch.bfloat16)
            for scale in scales
        ),
    )


def _takes_bias(lhs: Tensor, rhs: Tensor, bias: Tensor) -> bool:
    """Return True if `_biased_once` applies."""
    has_form = lhs.numel() > 0 and rhs.numel() > 0 and bias.dtype in (torch.float32, torch.bfloat16)
    return has_form and _uses_onednn(lhs) and onednn_adds_bias()


@cache
def onednn_adds_bias() -> bool:
    """True if oneDNN has the bfloat16 linear on this CPU. With AVX2 alone it makes none."""
    one = torch.ones(1, 1, dtype=torch.bfloat16)
    try:
        _ONEDNN_LINEAR(one, one, torch.ones(1), "none", [], "")
    except (RuntimeError, TypeError):  # a TypeError of None: a torch without oneDNN
        return False
    return True


def _biased_once(lhs: Tensor, rhs: Tensor, bias: Tensor) -> Tensor:
    """Return the bfloat16 GEMM by oneDNN plus bias, float32 or bfloat16, rounded once.

    torch.addmm rounds the product first where it multiplies by alpha or beta.
    """
    # oneDNN reads a bias as if it were contiguous (torch 2.13).
    return _ONEDNN_LINEAR(lhs, rhs, bias.contiguous(), "none", [], "")


def times_scales(
    out: Tensor, lhs: Tensor | None, rhs: Tensor | None, *, in_place: bool = False
) -> Tensor:
    """Multiply out [M, N] by lhs [M or 1, 1] and rhs [N or 1, 1].

    Two scalars are multiplied with each other first, which saves a pass.
    """
    times = torch.Tensor.mul_ if in_place else torch.mul
    if lhs is not None and rhs is not None and lhs.numel() == rhs.numel() == 1:
        return times(out, lhs * rhs)
    if lhs is not None:
        out = times(out, lhs)
    return out if rhs is None else times(out, rhs.T)


def _row_scale(operand: QTensor) -> Tensor:
    """Return one scale per row [outer, 1], or [1, 1]."""
    scale, rows = operand.scale, operand.cast.tile[0]
    if operand.global_scale is not None:
        scale = operand.full_scale()
    if scale.numel() == 0:  # K is 0, or the result is empty
        return scale.new_ones(1, 1)
    one_each = rows == 1 or scale.shape[0] == 1
    return scale if one_each else scale.repeat_interleave(rows, dim=0)[: operand.shape[0]]
