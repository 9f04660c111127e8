"""What do CUDA graphs gain where launches bound a step? A Llama of 124 million parameters, its step eager and as graphs.

Hidden 768, 12 layers, sequences of 1024; a step is one micro-batch, or four smaller ones whose weights are cast once. All contenders
clip the gradient and read loss and norm in each step, as a training run does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import narrowgauge as ng
from benchmarks.gpu.alone import compared
from benchmarks.gpu.bench import SETS, Bench
from benchmarks.gpu.models import converted, small_llama
from narrowgauge.cuda_graphs import WARMUP, GraphedStep

LENGTH = 1024
MICRO_BATCHES = {1: 8, 4: 2}  # how many -> sequences of each
CONTENDERS = (
    "bf16-graph",
    "fp8-current-fused",
    "fp8-current-fused-graph",
    "fp8-delayed-fused-graph",
)


def main(bench: Bench) -> None:
    contenders = [
        name for name in CONTENDERS if bench.device.type == "cuda" or not name.endswith("-graph")
    ]
    if len(contenders) < len(CONTENDERS):
        print(f"graphs: {bench.device} knows no CUDA graphs; only the steps beside them run.")
    for micro_batches, rows in MICRO_BATCHES.items():
        facts = {
            "micro_batches": micro_batches,
            "tokens": micro_batches * bench.size(rows * LENGTH, 32),
            "mode": "eager",
        }

        def build(
            name: str, micro_batches: int = micro_batches, rows: int = rows
        ) -> Callable[[], None]:
            return _step(bench, name, micro_batches, bench.size(rows, 2))

        compared(bench, "graphs", contenders, build, facts)


def _step(bench: Bench, name: str, micro_batches: int, rows: int) -> Callable[[], None]:
    length = bench.size(LENGTH, 16)
    model = converted(small_llama(bench), name.removesuffix("-graph"), bench, rows * length)
    optimizer: Any = ng.optim.AdamW(
        model.parameters(), lr=1e-5, states="8bit", master="bf16-remainder"
    )
    shape = (SETS * micro_batches, rows, length)
    batches = torch.randint(model.config.vocab_size, shape, device=bench.device).split(
        micro_batches
    )
    turn = iter(range(10**9))

    def backward(input_ids: torch.Tensor) -> Any:
        loss = model(input_ids=input_ids, labels=input_ids).loss / micro_batches
        loss.backward()
        return loss

    if name.endswith("-graph"):
        graphed = GraphedStep(model, optimizer, backward, clip=1.0)

        def step() -> None:
            for ids in batches[next(turn) % SETS]:
                graphed.accumulate({"input_ids": ids})
            graphed.readings().tolist()
            graphed.update()

        for _ in range(WARMUP + 2):
            step()  # captured
        return step

    def launched() -> None:
        loss = torch.zeros((), device=bench.device)
        for ids in batches[next(turn) % SETS]:
            loss += backward(ids).detach()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        torch.stack((loss, norm)).tolist()
        optimizer.step()
        ng.advance(model)
        optimizer.zero_grad()

    return launched
