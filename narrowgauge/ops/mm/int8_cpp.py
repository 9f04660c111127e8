"""INT8 GEMM in C++ on a CPU's integer units (ops/cpp/int8.cpp), with exact sums and all scales in its epilogue.

    form          instructions            products per instruction
    avx512-vnni   vpdpbusd, 512 bits      64
    avx-vnni      vpdpbusd, 256 bits      32
    avx2          vpmaddwd, 256 bits      16, of codes that are widened to 16 bits
    vnni-256      vpdpbusd, 256 bits      32, on CPUs of avx512-vnni; for tests and comparisons
    dotprod       sdot, 128 bits (Arm)    16; run under emulation alone, no speed is known

The form is chosen at run time. Results are bit-identical to the definition's, whatever the form and the number of threads.
Operands may be INT8, INT4 or INT4X2, and may lie in memory in any order. Speed: docs/cpu.md.

The right operand is packed into panels, and the left one too if its contracted axis is not contiguous or the form widens it.
Panels of at most CHUNK bytes are packed at a time, into memory that each calling thread reuses: fresh memory costs as much as
the packing.
"""

from __future__ import annotations

import threading
from ctypes import c_int32, c_int64, c_void_p
from functools import cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowgauge.errors import BackendError
from narrowgauge.formats import INT4, INT4X2
from narrowgauge.ops.cpp import Library, parts
from narrowgauge.ops.mm import cpp, definition
from narrowgauge.ops.mm.definition import times_scales, with_epilogue
from narrowgauge.ops.registry import Refusal, constant_while_compiling

if TYPE_CHECKING:
    from narrowgauge.ops.mm.spec import MmSpec
    from narrowgauge.qtensor import QTensor

_P, _L, _I = c_void_p, c_int64, c_int32
LIBRARY = Library(
    ("int8.cpp", "int8_pack.h", "int8_tile.h"),
    "the kernels of INT8 products",
    {
        "int8_pack": (_P, _L, _L, _L, _L, _L, _I, _I, _P),
        "int8_multiply": (
            *(_P, _L, _P, _L, _L, _P, _L, _L, _L, _L, _L, _I, _I),
            *(_P, _I, _P, _I, _P, _I, _P, _L),
        ),
    },
)
# These must match int8.cpp and int8_tile.h.
FORMS = {"avx2": 0, "avx-vnni": 1, "vnni-256": 2, "avx512-vnni": 3, "dotprod": 4}
INSTRUCTIONS = {
    "avx2": "AVX2", "avx-vnni": "AVX-VNNI", "vnni-256": "VNNI at 256 bits",
    "avx512-vnni": "VNNI at 512 bits", "dotprod": "Arm dot products",
}  # fmt: skip
FASTEST = ("avx512-vnni", "avx-vnni", "dotprod", "avx2")
NO_UNITS = "this CPU has no VNNI, AVX2 or Arm dot product instructions"
TILE, LEFT_WIDTH, WORD = 6, 48, 4  # rows of a tile and of a left panel; bytes of a row in one step
OUTPUTS = {torch.float32: 0, torch.bfloat16: 1, torch.int32: 2}
LONGEST_SUM = (2**31 - 1) // 128**2  # products whose sum fits into 32 bits
CHUNK = 4 << 20


def refuse(spec: MmSpec) -> Refusal | None:
    """Return the reason why this machine cannot run the GEMM, or why another kernel is faster.

    `NEEDS` has refused all devices but the CPU.
    """
    if missing := _missing():
        return Refusal("toolchain", missing)
    if not _has_units():
        return Refusal("capability", NO_UNITS)
    # `mm.cpp` takes one INT4 operand, and another of at most 98 in magnitude. Measured on Zen 4.
    has_int4 = INT4 in spec.formats and {*spec.formats} <= {INT4, INT4X2}
    if has_int4 and not spec.device.int8_gemm and cpp.refuse(spec) is None:
        return Refusal("slower", "without VNNI, the INT4 kernel is 1.6 times as fast")
    return None


@constant_while_compiling
def _missing() -> str:
    return LIBRARY.missing


@constant_while_compiling
def _has_units() -> bool:
    return fastest() is not None


def instructions() -> str:
    """Return the instructions of the form that is used, for `describe`."""
    return INSTRUCTIONS[fastest() or "avx2"]


@cache
def forms() -> tuple[str, ...]:
    """Return the forms that this processor can run."""
    found = LIBRARY.loaded.narrowgauge_int8_forms()
    return tuple(form for form, number in FORMS.items() if found >> number & 1)


@cache
def fastest() -> str | None:
    """Return the form that is used unless a caller names one, or None.

    ATEN_CPU_CAPABILITY, which holds torch to older instructions, does so here.
    """
    held = torch.backends.cpu.get_cpu_capability()
    usable = () if held == "DEFAULT" and "avx2" in forms() else forms()
    if not held.startswith("AVX512"):
        usable = tuple(form for form in usable if form != "avx512-vnni")
    return next((form for form in FASTEST if form in usable), None)


def run(
    lhs: QTensor,
    rhs: QTensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    fast_accumulate: bool,
    form: str | None = None,
) -> Tensor:
    """See `ops.mm`. form: one of `forms()`; None: the fastest."""
    # Few Python calls: a small Linear spends as long in them as in its products.
    left, right = lhs.data, rhs.data
    if left.dtype != torch.int8 or right.dtype != torch.int8:
        left, right = lhs.one_to_a_byte(), rhs.one_to_a_byte()
    if left.shape[0] == 0 or right.shape[0] == 0 or lhs.inner == 0:
        return definition.run(lhs, rhs, bias, out_dtype, fast_accumulate)
    if lhs.inner > LONGEST_SUM:
        return _run_long(lhs, rhs, bias, out_dtype, fast_accumulate)
    if torch.compiler.is_compiling():
        opaque: Tensor = torch.ops.narrowgauge.int8_mm(
            left, right, lhs.scale, rhs.scale, bias, out_dtype
        )
        return opaque
    return _scaled(left, right, lhs.scale, rhs.scale, bias, out_dtype, form)


def _scaled(
    left: Tensor,
    right: Tensor,
    left_scale: Tensor,
    right_scale: Tensor,
    bias: Tensor | None,
    out_dtype: torch.dtype,
    form: str | None = None,
) -> Tensor:
    """Return the product of two matrices of codes, which are not empty."""
    dtype = torch.bfloat16 if out_dtype == torch.bfloat16 else torch.float32
    out = torch.empty(left.shape[0], right.shape[0], dtype=dtype, device="cpu")
    multiply(left, right, out, left_scale, right_scale, bias, form)
    return out if dtype == out_dtype else out.to(out_dtype)


# torch.compile cannot look into calls of C++, so compiled code has one opaque operator.
torch.library.define(
    "narrowgauge::int8_mm",
    "(Tensor lhs, Tensor rhs, Tensor lhs_scale, Tensor rhs_scale, Tensor? bias, ScalarType out_dtype) -> Tensor",
)
torch.library.impl("narrowgauge::int8_mm", "CPU", _scaled)
torch.library.register_fake(
    "narrowgauge::int8_mm",
    lambda lhs, rhs, *rest: lhs.new_empty((lhs.shape[0], rhs.shape[0]), dtype=rest[-1]),
)


@with_epilogue
def _run_long(
    lhs: QTensor, rhs: QTensor, bias: Tensor | None, dtype: torch.dtype, fast_accumulate: bool
) -> Tensor:
    """Add the exact parts of a longer sum in float64, as the definition does."""
    total = torch.zeros(lhs.shape[0], rhs.shape[0], dtype=torch.float64, device="cpu")
    sums = torch.empty_like(total, dtype=torch.int32)
    parts = (x.one_to_a_byte().split(LONGEST_SUM, dim=1) for x in (lhs, rhs))
    for left, right in zip(*parts, strict=True):
        multiply(left, right, sums)
        total += sums
    return times_scales(total.to(torch.float32), lhs.scale, rhs.scale)


def multiply(
    left: Tensor,
    right: Tensor,
    out: Tensor,
    left_scale: Tensor | None = None,
    right_scale: Tensor | None = None,
    bias: Tensor | None = None,
    form: str | None = None,
) -> None:
    """Write left [M, K] @ right [N, K].T times both scales, plus bias [N], into out [M, N].

    left, right  int8 codes, any strides; K at least 1 and at most LONGEST_SUM
    out          float32 or bfloat16 with scales, or int32 without; its rows are contiguous
    scales       float32, [M or 1, 1] and [N or 1, 1]
    form         one of `forms()`; None: the fastest
    """
    form = form or fastest() or "avx2"
    if form not in forms():
        raise BackendError(
            f"mm: this processor cannot run the INT8 form {form!r}. It has: {', '.join(forms()) or 'none'}.",
            code="mm.form",
        )
    (m, inner), n, number = left.shape, right.shape[0], FORMS[form]
    row_stride, stride = left.stride()
    if row_stride != 1 and stride != 1:
        left = left.contiguous()
        row_stride, stride = inner, 1
    if 1 not in right.stride():
        right = right.contiguous()
    left_rows = right_rows = False
    if left_scale is not None and right_scale is not None:
        left_scale, right_scale = left_scale.contiguous(), right_scale.contiguous()
        left_rows, right_rows = left_scale.numel() > 1, right_scale.numel() > 1
    if bias is not None:
        bias = bias.to(torch.float32).contiguous()
    epilogue = (
        left_scale,
        left_rows,
        right_scale,
        right_rows,
        bias,
        OUTPUTS[out.dtype],
        out,
        out.stride(0),
    )
    # Chunks of whole panels.
    row_bytes = -(-inner // (2 if form == "avx2" else 4)) * WORD
    width, packs_left = 64 if form == "avx512-vnni" else 16, form == "avx2" or stride != 1
    rows = max(CHUNK // (row_bytes * LEFT_WIDTH), 1) * LEFT_WIDTH if packs_left else m
    columns = max(CHUNK // (row_bytes * width), 1) * width
    for i in range(0, m, rows):
        height, words = min(rows, m - i), left
        if packs_left:
            words, row_stride = _packed(left, i, height, LEFT_WIDTH, number, row_bytes, "left"), -1
        for j in range(0, n, columns):
            across = min(columns, n - j)
            panels, count, of_columns = (
                _panels(across, width, row_bytes, "right"),
                -(-across // width),
                False,
            )
            units, codes = -(-height // TILE), (right, *right.stride())
            work = height * across * max(inner // 64, 1)
            shares = parts(work)
            if shares > 1 and _divides(count, shares):
                units, of_columns = count, True  # each thread packs its own panels
            elif shares > 1:
                codes = None, 0, 0
                panels = _packed(right, j, across, width, number, row_bytes, "right")
                if units < 4 * shares and count > units:
                    units, of_columns = count, True  # few rows: threads share the panels
            LIBRARY.call(
                "int8_multiply", units, work, words, row_stride, *codes, panels, i, j, height, across, inner,
                number, of_columns, *epilogue,
            )  # fmt: skip


def _divides(panels: int, shares: int) -> bool:
    """Return True if the largest of so many equal shares is at most an eighth above the average."""
    return 8 * -(-panels // shares) * shares <= 9 * panels


_MEMORY = threading.local()


def _packed(
    x: Tensor, start: int, rows: int, width: int, form: int, row_bytes: int, side: str
) -> Tensor:
    """Pack rows of x [outer, K] int8 into panels of `width` (int8_pack.h), in memory of this thread."""
    panels, count = _panels(rows, width, row_bytes, side), -(-rows // width)
    inner, strides = x.shape[1], x.stride()
    # A byte takes 0.07 ns, so threads pay from a megabyte on.
    LIBRARY.call(
        "int8_pack", count, rows * inner // 8, x, start, rows, inner, *strides, form, side == "right", panels
    )  # fmt: skip
    return panels


def _panels(rows: int, width: int, row_bytes: int, side: str) -> Tensor:
    """Memory of this thread for so many rows in panels of `width`."""
    size, panels = -(-rows // width) * width * row_bytes, getattr(_MEMORY, side, None)
    if panels is None or panels.numel() < size:
        panels = torch.empty(size, dtype=torch.uint8, device="cpu")
        if type(panels) is Tensor:  # and not fake, in a count of memory
            setattr(_MEMORY, side, panels)
    return panels
