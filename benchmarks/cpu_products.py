"""How fast are the three products of a Linear in INT8 on this CPU, beside torch's bfloat16, float32 and INT8 products.

    python -m benchmarks.cpu_products                       one thread, processor time
    ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 python -m benchmarks.cpu_products
                                                            the same on AVX2 alone, beside float32

Products of x [T, K], w [N, K] and grad_output [T, N], with one scale per row of either operand and a bfloat16 result:

    output        x by w                            rows of both are contiguous
    grad_input    grad_output by columns of w       the contracted axis of w is strided
    grad_weight   columns of both                   the contracted axis of both is strided

Cases: each form of `native-int8-cpp`, packing, scales and rounding included; its tiles with their epilogue alone, on packed
operands; torch.mm in bfloat16 and in float32; torch._int_mm, without scales. GOP/s count a multiplication and an addition. The
peak of each form's instruction is measured by a loop on registers (cpu_peak.cpp) in the same rounds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from ctypes import c_int32
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness import RESULTS, measure, processor_clock, record, rows, table
from narrowgauge.ops.cpp import Library
from narrowgauge.ops.mm import int8_cpp
from narrowgauge.ops.registry import device_facts

SIZES = ((512, 384, 1024), (1024, 1024, 1024), (1024, 1024, 2816), (1024, 2048, 5376))
PEAK = Library(("cpu_peak.cpp",), "loops on registers", {"peak": (c_int32,)}, package="benchmarks")
PASSES, SUMS = 200_000, 12
# Multiplications and additions of one instruction on a register, and its number in cpu_peak.cpp.
UNITS = {"avx512-vnni": (128, 3), "vnni-256": (64, 2), "avx2": (32, 0), "fp32": (16, 1)}


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.cpu_products", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--rounds", type=int, default=12, help="even")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--forms", nargs="*", default=[], help="default: the one that is chosen here"
    )
    parser.add_argument("--quick", action="store_true", help="two rounds of a small size")
    parser.add_argument("--note", default="", help="kept with the results")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    fastest = int8_cpp.fastest() if not int8_cpp.LIBRARY.missing else None
    if fastest is None:
        parser.exit(1, "cpu_products: this CPU has no form of native-int8-cpp, or no compiler.\n")
    forms, found = options.forms or [fastest], []
    rounds = 2 if options.quick else options.rounds
    for size in ((64, 48, 80),) if options.quick else SIZES:
        for name, operands in products(*size).items():
            found += timed(name, size, operands, forms, rounds)
    if not options.quick:
        record(
            "cpu_products",
            [row | {"note": options.note} for row in found],
            RESULTS / "cpu_products.jsonl",
        )


def products(tokens: int, inner: int, outer: int) -> dict[str, tuple[Tensor, Tensor]]:
    """{product: its operands as codes}, views of the same three matrices."""
    x, w, grad = (
        torch.randint(-127, 128, shape, dtype=torch.int8)
        for shape in ((tokens, inner), (outer, inner), (tokens, outer))
    )
    return {"output": (x, w), "grad_input": (grad, w.T), "grad_weight": (grad.T, x.T)}


def timed(
    name: str, size: tuple[int, int, int], operands: tuple[Tensor, Tensor], forms: list[str], rounds: int
) -> list[dict[str, Any]]:  # fmt: skip
    """Rows of one product, and of the peaks beside it."""
    left, right = operands
    facts = device_facts("cpu", None)
    cases: dict[str, Callable[[], object]] = {}
    for form in forms:
        cases[form] = whole(left, right, form)
        cases[f"{form}, tiles"] = tiles(left, right, form)
    dtypes = {"bf16": torch.bfloat16} if facts.bf16_gemm else {}
    for case, dtype in (dtypes | {"fp32": torch.float32}).items():
        a, b = left.to(dtype), right.to(dtype)
        cases[case] = lambda a=a, b=b: torch.mm(a, b.T)  # type: ignore[misc]
    if facts.int8_gemm:
        cases["torch._int_mm"] = lambda: torch._int_mm(left, right.T)
    work = dict.fromkeys(cases, (2.0 * size[0] * size[1] * size[2], "OP"))
    for unit in (*forms, "fp32"):
        if unit in UNITS and not PEAK.missing:
            per_instruction, number = UNITS[unit]
            # The third argument keeps a single thread.
            cases[f"{unit}, peak"] = lambda number=number: PEAK.call("peak", PASSES, 0, number)  # type: ignore[misc]
            work[f"{unit}, peak"] = (float(PASSES * SUMS * per_instruction), "OP")
    baseline = "bf16" if "bf16" in cases else "fp32"
    timings = measure(cases, rounds=rounds, warmup=2, clock=processor_clock)
    print(f"{name}, T, K, N = {size}")
    print(table(timings, baseline=baseline, work=work), end="\n\n")
    lines = rows(timings, baseline=baseline)
    for line in lines:
        line |= {"product": name, "tokens": size[0], "inner": size[1], "outer": size[2]}
        line["ops_per_s"] = work[line["case"]][0] / line["median_s"]
    return lines


def whole(left: Tensor, right: Tensor, form: str) -> Callable[[], Tensor]:
    """The product as the kernel computes it, without the QTensors around it."""
    scales = scale_of(left), scale_of(right)

    def run() -> Tensor:
        out = torch.empty(left.shape[0], right.shape[0], dtype=torch.bfloat16)
        int8_cpp.multiply(left, right, out, *scales, form=form)
        return out

    return run


def scale_of(codes: Tensor) -> Tensor:
    return torch.full((codes.shape[0], 1), 0.01)


def tiles(left: Tensor, right: Tensor, form: str) -> Callable[[], None]:
    """Multiply operands that are packed already."""
    (m, inner), n, number = left.shape, right.shape[0], int8_cpp.FORMS[form]
    row_bytes = -(-inner // (2 if form == "avx2" else 4)) * int8_cpp.WORD
    words, stride = left, left.stride(0)
    if form == "avx2" or left.stride(1) != 1:
        packed = int8_cpp._packed(left, 0, m, int8_cpp.LEFT_WIDTH, number, row_bytes, "left")
        words, stride = packed.clone(), -1
    width = 64 if form == "avx512-vnni" else 16
    panels = int8_cpp._packed(right, 0, n, width, number, row_bytes, "right").clone()
    scales = (scale_of(left), True, scale_of(right), True, None, int8_cpp.OUTPUTS[torch.bfloat16])
    out = torch.empty(m, n, dtype=torch.bfloat16)
    given = (words, stride, None, 0, 0, panels, 0, 0, m, n, inner, number, False, *scales, out, n)
    return lambda: int8_cpp.LIBRARY.call(
        "int8_multiply", -(-m // int8_cpp.TILE), m * n * max(inner // 64, 1), *given
    )


if __name__ == "__main__":
    main()
