"""From which size on does each recipe pay? One square Linear at 16,384 tokens, forward and backward with all casts, against BF16.

A line of the picture for each recipe, torchao's beside them (benchmarks/gpu/picture.py).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from benchmarks.gpu.bench import SETS, Bench, rotating
from benchmarks.gpu.models import converted

CONTENDERS = (
    "bf16",
    "fp8-delayed",
    "fp8-current",
    "fp8-row",
    "fp8-block",
    "int8",
    "torchao-tensorwise",
    "torchao-rowwise",
)
WIDTHS = (4096, 1024, 16_384, 2048, 8192)  # what a budget leaves out is not an end


def main(bench: Bench) -> None:
    tokens = bench.size(16_384, 64)
    for width in (32, 64) if bench.dry else WIDTHS:
        if not bench.has_time(f"growth {width}"):
            continue
        builds = {
            name: _build(bench, name, tokens, width) for name in CONTENDERS if bench.has_peer(name)
        }
        flop = 6.0 * tokens * width * width
        work = {
            name: (flop, "fp8" if "fp8" in name or "torchao" in name else "bf16") for name in builds
        }
        facts = {"tokens": tokens, "inputs": width, "outputs": width, "mode": "eager"}
        bench.compare("growth", builds, "bf16", work=work, facts=facts, sample_s=0.01)


def _build(bench: Bench, contender: str, tokens: int, width: int) -> Any:
    def build() -> Any:
        linear = nn.Linear(width, width, bias=False, device=bench.device, dtype=torch.bfloat16)
        model = converted(nn.Sequential(linear), contender, bench, tokens)
        sets = [
            [
                torch.randn(
                    tokens, width, device=bench.device, dtype=torch.bfloat16, requires_grad=needs
                )
                for needs in (True, False)
            ]
            for _ in range(SETS)
        ]

        def step(pair: list[torch.Tensor]) -> None:
            x, gy = pair
            model(x).backward(gy)
            x.grad = None
            for parameter in model.parameters():
                parameter.grad = None

        return rotating(step, sets)

    return build
