"""Products of two INT4 operands on the INT4 tensor cores of compute capability 8.x: twice the rate of INT8, half of its bytes.

The kernel is CUDA C++ (int4_units.cu, its tiling and layouts there), compiled by NVRTC: Triton has no type of 4 bits for `dot`. Scales,
bias and the one rounding are its epilogue. Sums are exact, so that its numbers are those of native-int8 and the definition, to the bit:
which of the two computes is a matter of time alone, and `slower` measures it. Codes that come one to a byte are packed first.

A bit-split gradient (INT4X2) has two digits, and would be two INT4 products: what one INT8 product takes. Hopper and later have no INT4
units; ptxas multiplies s4 as s8 there. While torch.compile traces it is one opaque operator, `narrowgauge::int4_mm`.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from narrowgauge.addresses import address, dry_run_on, tell_launch
from narrowgauge.formats import INT4
from narrowgauge.ops import nvrtc
from narrowgauge.ops.mm import cublas, definition
from narrowgauge.ops.mm.spec import MmSpec
from narrowgauge.ops.registry import Refusal, constant_while_compiling
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast

SOURCE = nvrtc.Source("narrowgauge.ops.mm", "int4_units.cu")
ROWS, THREADS = 128, 128  # of a program, as there
ALIGNMENT = 16  # bytes of a row that one asynchronous copy takes
PACKING_THREADS = 256
LONGEST_SUM = (2**31 - 1) // 7**2
MEASURED, WARM, TIMED = 4096, 3, 9  # M = N = K of the products that are timed, and how often

Bias = Tensor | None


def refuse(spec: MmSpec) -> Refusal | None:
    """NVRTC has to be installed."""
    missing = "" if dry_run_on() is not None else nvrtc.unavailable()
    return Refusal("toolchain", missing) if missing else None


def run(lhs: QTensor, rhs: QTensor, bias: Bias, out_dtype: torch.dtype, fast_accumulate: bool) -> Tensor:
    """One rounding, to out_dtype (of float16: from float32)."""
    if 0 in (lhs.shape[0], rhs.shape[0], lhs.shape[1]) or lhs.shape[1] > LONGEST_SUM:
        return definition.run(lhs, rhs, bias, out_dtype, fast_accumulate)
    call = torch.ops.narrowgauge.int4_mm if torch.compiler.is_compiling() else launch
    narrow = out_dtype == torch.bfloat16
    out: Tensor = call(lhs.data, lhs.scale, rhs.data, rhs.scale, bias, torch.bfloat16 if narrow else torch.float32)
    return out.to(out_dtype)


def launch(
    lhs: Tensor, lhs_scale: Tensor, rhs: Tensor, rhs_scale: Tensor, bias: Bias, out_dtype: torch.dtype
) -> Tensor:
    """lhs [M, K] int8 or [M, ceil(K / 2)] uint8, two to a byte; rhs [N, ...] alike; scales [M or 1, 1], [N or 1, 1] -> [M, N]."""
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
    """Codes [rows, K] int8, or uint8 of two each -> two to a byte, uint8 [rows, a multiple of 16], zero behind the last."""
    if codes.dtype == torch.uint8:
        made = cublas.aligned(codes, 1, ALIGNMENT)
        return made if address(made) % ALIGNMENT == 0 else made.clone()
    codes = codes.contiguous()
    if address(codes) % 8:  # the kernel reads 8 codes at once
        codes = codes.clone()
    rows, inner = codes.shape
    made = torch.empty(rows, -(-inner // (2 * ALIGNMENT)) * ALIGNMENT, dtype=torch.uint8, device=codes.device)
    words = made.shape[1] // 4
    if dry_run_on() is not None:
        tell_launch("narrowgauge.ops.mm.int4_units.pack_int4", [codes, made])
        return made
    programs = -(-rows * words // PACKING_THREADS)
    SOURCE.launch("pack_int4", programs, PACKING_THREADS, codes.device, codes, made, rows, inner, words)
    return made


@constant_while_compiling
def slower(device_type: str, index: int | None) -> str | None:
    """Why INT8 units are taken for INT4 products on this device, a clause; None: it was measured that this kernel is faster there."""
    if index is None or device_type != "cuda":
        return "it is taken only where it was measured to be faster than native-int8, and this device is not here to measure"
    return _slower(index)


@cache
def _slower(index: int) -> str | None:
    """One product of each kernel as layers call them, codes one to a byte and bfloat16 out; about 20 ms and 130 MiB, once per process."""
    device = torch.device("cuda", index)
    with _disable_current_modes():
        ours, theirs = (_milliseconds(multiply, device) for multiply in (run, cublas.run_int8))
    size = f"{MEASURED} x {MEASURED} x {MEASURED}"
    return None if ours < theirs else f"{size} takes it {ours:.3g} ms on {device}, native-int8 {theirs:.3g}"


def _milliseconds(multiply: Callable[..., Tensor], device: torch.device) -> float:
    """The median of some products of random codes."""
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
    "narrowgauge::int4_mm", lambda lhs, _, rhs, *rest: lhs.new_empty((lhs.shape[0], rhs.shape[0]), dtype=rest[-1])
)
