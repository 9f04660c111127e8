"""INT4 GEMM on tensor cores of compute capability 8.x: twice INT8's rate, half its bytes.

The kernel is CUDA C++ (int4_units.cu describes its tiling and layouts), compiled by NVRTC, because
Triton has no 4-bit type for `dot`. Its epilogue applies scales, bias and the only rounding. Sums
are exact, so results are bit-identical to native-int8 and to the definition. Only speed decides
between the two kernels, and `slower` measures it. Codes that are stored one per byte are packed
first.

A bit-split gradient (INT4X2) has two digits and would take two INT4 GEMMs, which cost as much as
one INT8 GEMM. Hopper and later have no INT4 units: ptxas multiplies s4 as s8 there. torch.compile
sees one opaque operator, `narrowgauge::int4_mm`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from narrowgauge.addresses import address, dry_run_on, tell_launch
from narrowgauge.formats import INT4
from narrowgauge.ops import nvrtc
from narrowgauge.ops.mm import cublas, definition
from narrowgauge.ops.registry import Refusal, constant_while_compiling
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast

if TYPE_CHECKING:
    from narrowgauge.ops.mm.spec import MmSpec

SOURCE = nvrtc.CudaSource("narrowgauge.ops.mm", "int4_units.cu")
ROWS, THREADS = 128, 128  # per program; must match int4_units.cu
ALIGNMENT = 16  # bytes of a row per asynchronous copy
PACKING_THREADS = 256
LONGEST_SUM = (2**31 - 1) // 7**2
MEASURED, WARM, TIMED = 4096, 3, 9  # M = N = K of the timed GEMMs; number of warm-up and timed runs

Bias = Tensor | None


def refuse(spec: MmSpec) -> Refusal | None:
    """Refuse if NVRTC is not installed."""
    missing = "" if dry_run_on() is not None else nvrtc.unavailable()
    return Refusal("toolchain", missing) if missing else None


def run(
    lhs: QTensor, rhs: QTensor, bias: Bias, out_dtype: torch.dtype, fast_accumulate: bool
) -> Tensor:
    """See `ops.mm`. The result is rounded once, to out_dtype; float16 is rounded from float32."""
    if 0 in (lhs.shape[0], rhs.shape[0], lhs.shape[1]) or lhs.shape[1] > LONGEST_SUM:
        return definition.run(lhs, rhs, bias, out_dtype, fast_accumulate)
    call = torch.ops.narrowgauge.int4_mm if torch.compiler.is_compiling() else launch
    narrow = out_dtype == torch.bfloat16
    out: Tensor = call(
        lhs.data, lhs.scale, rhs.data, rhs.scale, bias, torch.bfloat16 if narrow else torch.float32
    )
    return out.to(out_dtype)


def launch(
    lhs: Tensor,
    lhs_scale: Tensor,
    rhs: Tensor,
    rhs_scale: Tensor,
    bias: Bias,
    out_dtype: torch.dtype,
) -> Tensor:
    """Launch the kernel.

    lhs, rhs              [M, K], [N, K] int8, or uint8 [..., ceil(K / 2)] with two codes per byte
    lhs_scale, rhs_scale  [M or 1, 1], [N or 1, 1]
    ->                    [M, N] of out_dtype
    """
    m, n = len(lhs), len(rhs)
    out = torch.empty(m, n, dtype=out_dtype, device=lhs.device)
    left, right = packed(lhs), packed(rhs)
    scales = lhs_scale.contiguous(), rhs_scale.contiguous()
    added = None if bias is None else bias.to(torch.float32).contiguous()
    if dry_run_on() is not None:
        tell_launch("narrowgauge.ops.mm.int4_units.int4_mm", [left, right, *scales, out])
        return out
    SOURCE.launch(
        "int4_mm", -(-m // ROWS) * -(-n // ROWS), THREADS, lhs.device, left, right, *scales, added, out, m, n, left.shape[1],
        *(int(scale.numel() == 1) for scale in scales), int(out_dtype == torch.bfloat16),
    )  # fmt: skip
    return out


def packed(codes: Tensor) -> Tensor:
    """Pack codes two per byte: uint8 [rows, a multiple of 16], padded with zeros.

    codes  int8 [rows, K], or uint8 with two codes per byte
    """
    if codes.dtype == torch.uint8:
        made = cublas.aligned(codes, 1, ALIGNMENT)
        # cp.async copies 16 aligned bytes; a view may start at any address.
        return made if address(made) % ALIGNMENT == 0 else made.clone()
    codes = codes.contiguous()
    if address(codes) % 8:  # the kernel reads 8 codes at once
        codes = codes.clone()
    rows, inner = codes.shape
    made = torch.empty(
        rows, -(-inner // (2 * ALIGNMENT)) * ALIGNMENT, dtype=torch.uint8, device=codes.device
    )
    words = made.shape[1] // 4
    if dry_run_on() is not None:
        tell_launch("narrowgauge.ops.mm.int4_units.pack_int4", [codes, made])
        return made
    programs = -(-rows * words // PACKING_THREADS)
    SOURCE.launch(
        "pack_int4", programs, PACKING_THREADS, codes.device, codes, made, rows, inner, words
    )
    return made


@constant_while_compiling
def slower(device_type: str, index: int | None) -> str | None:
    """Return a clause that says why INT8 units are preferred for INT4 GEMMs on this device.

    None if this kernel was measured to be faster there.
    """
    if index is None or device_type != "cuda":
        return "it is taken only where it was measured to be faster than native-int8, and this device is not here to measure"
    return _slower(index)


@cache
def _slower(index: int) -> str | None:
    """Time one GEMM by each kernel, as layers call them: codes one per byte, bfloat16 output.

    It takes about 20 ms and 130 MiB, once per process.
    """
    device = torch.device("cuda", index)
    with _disable_current_modes():
        ours, theirs = (_milliseconds(multiply, device) for multiply in (run, cublas.run_int8))
    size = f"{MEASURED} x {MEASURED} x {MEASURED}"
    return (
        None
        if ours < theirs
        else f"{size} takes it {ours:.3g} ms on {device}, native-int8 {theirs:.3g}"
    )


def _milliseconds(multiply: Callable[..., Tensor], device: torch.device) -> float:
    """Return the median duration of GEMMs of random codes."""
    cast, scale = Cast(format=INT4), torch.ones(1, 1, device=device)
    generator = torch.Generator(device).manual_seed(0)
    lhs, rhs = (
        QTensor(
            data=torch.randint(-7, 8, (MEASURED, MEASURED), dtype=torch.int8, device=device, generator=generator),
            scale=scale, cast=cast, inner=MEASURED,
        )
        for _ in range(2)
    )  # fmt: skip
    elapsed = []
    with torch.no_grad(), torch.cuda.device(device):
        for _ in range(WARM + TIMED):
            started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            started.record()
            multiply(lhs, rhs, None, torch.bfloat16, False)
            ended.record()
            ended.synchronize()
            elapsed.append(started.elapsed_time(ended))
    return statistics.median(elapsed[WARM:])


torch.library.define(
    "narrowgauge::int4_mm",
    "(Tensor lhs, Tensor lhs_scale, Tensor rhs, Tensor rhs_scale, Tensor? bias, ScalarType out_dtype) -> Tensor",
)
torch.library.impl("narrowgauge::int4_mm", "CUDA", launch)
torch.library.register_fake(
    "narrowgauge::int4_mm",
    lambda lhs, _, rhs, *rest: lhs.new_empty((lhs.shape[0], rhs.shape[0]), dtype=rest[-1]),
)
