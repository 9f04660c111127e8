"""Does 8-bit AdamW run at the speed of memory, and beside its peers? 2**27 float32 weights in matrices of a Transformer.

Counted are the bytes that no kernel can avoid: weight and gradient read, weight written, both states read and written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import narrowgauge as ng
from benchmarks.gpu.bench import Bench

BASELINE = "torch-fused"


def main(bench: Bench) -> None:
    if not bench.has_time("adamw"):
        return
    matrices, rows, columns = bench.size(8, 2), bench.size(4096, 64), bench.size(4096, 128)
    count = matrices * rows * columns
    builds = {name: _build(bench, make, matrices, rows, columns) for name, make in _contenders(bench).items()}
    work = {name: (count * (12.0 + 2 * (8.0 if "8bit" not in name else 2.0)), "copy") for name in builds}
    facts = {"parameters": count, "mode": "eager"}
    bench.compare("adamw", builds, BASELINE, work=work, facts=facts)


def _contenders(bench: Bench) -> dict[str, Callable[[Any], Any]]:
    def bitsandbytes(parameters: Any) -> Any:
        from bitsandbytes.optim import AdamW8bit

        return AdamW8bit(parameters, lr=1e-4)

    def torchao(parameters: Any) -> Any:
        from torchao.optim import AdamW8bit

        return AdamW8bit(parameters, lr=1e-4)

    found = {
        BASELINE: lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, fused=True),
        "narrowgauge-8bit": lambda parameters: ng.optim.AdamW(parameters, lr=1e-4, states="8bit", backend="torch"),
    }
    if bench.device.type == "cuda":  # torchao's compiles for minutes on a CPU
        found |= {"bitsandbytes-8bit": bitsandbytes, "torchao-8bit": torchao}
    return found


def _build(bench: Bench, make: Callable[[Any], Any], matrices: int, rows: int, columns: int) -> Any:
    def build() -> Any:
        weights = [torch.nn.Parameter(torch.randn(rows, columns, device=bench.device)) for _ in range(matrices)]
        for weight in weights:
            weight.grad = torch.randn_like(weight)
        return make(weights).step

    return build
