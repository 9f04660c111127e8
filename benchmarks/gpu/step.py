"""How much faster is a whole training step, and how much memory does it take? A Llama of 8B-shaped layers, equal batch.

Forward, loss, backward and torch's fused AdamW on bfloat16 weights, the same for all contenders; eager and compiled, each against
BF16 in the same mode. Compiled first, and BF16 compiled once: compiling takes most of the budget, and it is the figure. Attention has no
mask: transformers, which cannot look at positions while torch.compile traces, would make a dense one. "-fused": norms and SwiGLU cast what
they compute. "-liger": BF16 with liger-kernel's norm and SwiGLU, whose loss and rotary embedding stay PyTorch's, as in all others.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import narrowgauge as ng
from benchmarks.gpu.alone import compared
from benchmarks.gpu.bench import SETS, Bench
from benchmarks.gpu.models import converted, llama
from narrowgauge.conversion.measure import compiled_alone
from narrowgauge.train.attention import use_attention_of_whole_rows

LAYERS, SEQUENCE, ROWS = 4, 4096, 2
CONTENDERS: dict[str, tuple[str, ...]] = {
    "compiled": ("torchao-tensorwise", "fp8-delayed", "fp8-current", "fp8-block"),  # `auto` would compile each candidate for each shape
    "eager": (
        "fp8-delayed", "fp8-delayed-fused", "fp8-current", "fp8-current-fused", "fp8-block", "auto",
        "torchao-tensorwise", "bf16-liger",
    ),
}  # fmt: skip


def main(bench: Bench) -> None:
    facts = {"layers": bench.size(LAYERS, 1), "tokens": bench.size(ROWS * SEQUENCE, 32)}
    for mode in bench.modes:
        if bench.dry and mode == "compiled" and bench.device.type != "cuda":
            continue
        present = bench.present(CONTENDERS[mode])

        def build(name: str, mode: str = mode) -> Callable[[], None]:
            return _step(bench, name, mode)

        compared(bench, "step", present, build, facts | {"mode": mode}, keeps=mode == "compiled")


def _step(bench: Bench, name: str, mode: str) -> Callable[[], None]:
    rows, length = ROWS, bench.size(SEQUENCE, 16)
    model = llama(bench, LAYERS)
    if not use_attention_of_whole_rows(model, {"input_ids": torch.zeros(rows, length)}):
        raise RuntimeError(
            "transformers would make a dense mask: its attention is not the one that has none."
        )
    model = converted(model, name, bench, rows * length)
    forward: Any = compiled_alone(model) if mode == "compiled" else model
    return training_step(bench, model, forward, rows, length)


def training_step(
    bench: Bench, model: Any, forward: Any, rows: int, length: int
) -> Callable[[], None]:
    """A step on the next of some sets of random tokens, which are also what is predicted."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=bench.device.type == "cuda")
    vocabulary = model.config.vocab_size
    batches = [torch.randint(vocabulary, (rows, length), device=bench.device) for _ in range(SETS)]
    turn = iter(range(10**9))

    def step() -> None:
        ids = batches[next(turn) % SETS]
        forward(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        ng.advance(model)
        optimizer.zero_grad()

    return step
