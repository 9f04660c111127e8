"""What can the layer of `layer.py` reach without any cast? Its 12 products, each by itself, operands quantized beforehand.

Every Linear [K -> N] has three: output [T, K] x [N, K], grad_input [T, N] x [K, N], grad_weight [N, T] x [K, T]. Random numbers; BF16 by
torch.mm; FP8 by torch._scaled_mm as cuBLAS has it: "tensor fast" and "tensor split" have one scale per tensor, and sums in the tensor
core's accumulator or promoted to float32; "row" one per row; "block" 1 x 128 by 128 x 128 (grad_weight 1 x 128 by 1 x 128), by narrowgauge.

Together with the copy rate, which every line holds, this is the goal of the layer: 1.05 x (products + least bytes / copy rate).
cuBLASLt's workspace is read once in a process (CUBLASLT_WORKSPACE_SIZE, KiB), and each line says it as `workspace_mib`: run it once with
1024 and once with 32768.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

import narrowgauge as ng
from benchmarks.gpu.bench import Bench, Build
from narrowgauge import recipes
from narrowgauge.ops.mm import mm

SHAPES = (
    (4096, 12_288),
    (4096, 4096),
    (4096, 16_384),
    (16_384, 4096),
)  # (K, N) of the Linears, 15,872 tokens
TOKENS = 15_872
KINDS = ("bf16", "tensor fast", "tensor split", "row", "block")
DEFAULT_KIB = 1024  # torch's own, on every card of today


def workspace_mib() -> float:
    """Of this process, as torch reads it."""
    text = os.environ.get("CUBLASLT_WORKSPACE_SIZE", "")
    return (int(text) if text.isdecimal() else DEFAULT_KIB) / 1024


def products(tokens: int, k: int, n: int) -> dict[str, tuple[int, int, int]]:
    """Product -> (M, N, K)."""
    return {"output": (tokens, n, k), "grad_input": (tokens, k, n), "grad_weight": (n, k, tokens)}


def main(bench: Bench) -> None:
    tokens = bench.size(TOKENS, 128)
    # Largest first: what a budget leaves out is small.
    for k, n in sorted(SHAPES, key=lambda shape: -shape[0] * shape[1]):
        k, n = bench.size(k, k // 64), bench.size(n, n // 64)
        for product, (rows, columns, depth) in products(tokens, k, n).items():
            if not bench.has_time(f"gemms, {product} {k} -> {n}"):
                continue
            kinds = [
                kind for kind in KINDS if bench.device.type == "cuda" or kind in ("bf16", "block")
            ]
            builds = {
                kind: built(bench.device, kind, product, rows, columns, depth) for kind in kinds
            }
            flop = 2.0 * rows * columns * depth
            work = {kind: (flop, "bf16" if kind == "bf16" else "fp8") for kind in kinds}
            facts = {
                "product": product,
                "m": rows,
                "n": columns,
                "k": depth,
                "workspace_mib": workspace_mib(),
            }
            bench.compare("gemms", builds, "bf16", work=work, facts=facts, sample_s=0.01)


def built(
    device: torch.device, kind: str, product: str, rows: int, columns: int, depth: int
) -> Build:
    """Both operands with the contracted axis last."""

    def random(outer: int) -> torch.Tensor:
        return torch.randn(outer, depth, device=device, dtype=torch.bfloat16)

    def build() -> Callable[[], object]:
        lhs, rhs = random(rows), random(columns)
        if kind == "bf16":
            return lambda: torch.mm(lhs, rhs.T)
        if kind == "block":
            gemm = getattr(recipes.get("fp8-block"), product)
            codes = ng.quantize(lhs, gemm.lhs), ng.quantize(rhs, gemm.rhs)
            return lambda: mm(*codes, out_dtype=torch.bfloat16)
        return _scaled(lhs, rhs, by_row=kind == "row", fast=kind != "tensor split")

    return build


def _scaled(lhs: torch.Tensor, rhs: torch.Tensor, by_row: bool, fast: bool) -> Callable[[], Any]:
    a, b = lhs.to(torch.float8_e4m3fn), rhs.to(torch.float8_e4m3fn)
    shapes = ((len(a), 1), (1, len(b))) if by_row else ((), ())
    scales = [torch.ones(shape, device=lhs.device) for shape in shapes]
    return lambda: torch._scaled_mm(a, b.T, *scales, out_dtype=torch.bfloat16, use_fast_accum=fast)
