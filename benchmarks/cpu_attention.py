"""Attention in bfloat16 on a CPU beside torch's: forward, and forward with backward, with errors against float64.

    python -m benchmarks.cpu_attention            one thread by processor time, two by the clock on the wall
    python -m benchmarks.cpu_attention --quick    two rounds, nothing recorded: to see that it works

Cases: causal self-attention of language models, padded batches of an encoder (BERT: half of the tokens are padding in the mean),
and pictures of 197 patches (ViT). Operands lie in memory as a model has them, [batch, tokens, heads, width]. torch's is
F.scaled_dot_product_attention, whose kernel on a CPU is flash attention.

    gflops     of the two products (with backward: seven) of what is not masked, per second
    errors     root mean square of the differences from float64, as a share of that of the result
"""

from __future__ import annotations

import argparse
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.harness import RESULTS, host_clock, measure, processor_clock, record, rows, table
from narrowgauge.nn.attention16 import attention16
from narrowgauge.ops.attention16 import KERNELS, Attention16Spec

OURS, TORCH = "native-cpp", "torch"
RESULTS_FILE = RESULTS / "cpu_attention.jsonl"


@dataclass(frozen=True)
class Case:
    """Sizes of one attention. is_padded: sequences end anywhere, evenly distributed."""

    name: str
    batch: int
    tokens: int
    heads: int
    width: int
    is_causal: bool = False
    is_padded: bool = False

    def operands(self) -> list[Tensor]:
        """q, k, v and the gradient of y."""
        torch.manual_seed(0)
        size = self.batch, self.tokens, self.heads, self.width
        return [torch.randn(size).bfloat16().transpose(1, 2) for _ in range(4)]

    def mask(self) -> Tensor | None:
        if not self.is_padded:
            return None
        lengths = torch.linspace(0, self.tokens, self.batch + 1)[1:].long().view(-1, 1, 1, 1)
        seen = torch.arange(self.tokens) < lengths
        return seen.expand(self.batch, 1, self.tokens, self.tokens)

    def products(self) -> float:
        """Multiplications and additions of one product, without what is masked."""
        seen = 0.5 * (1 + 1 / self.tokens) if self.is_causal else 1.0
        if (mask := self.mask()) is not None:
            seen = mask.double().mean().item()
        return 2 * self.batch * self.heads * self.tokens**2 * self.width * seen


CASES = (
    Case("causal, 2 x 512", 2, 512, 16, 64, is_causal=True),
    Case("causal, 1 x 2048", 1, 2048, 16, 64, is_causal=True),
    Case("padded, 8 x 128", 8, 128, 12, 64, is_padded=True),
    Case("pictures, 4 x 197", 4, 197, 12, 64),
)


def by_torch(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, mask, is_causal=is_causal)


def by_kernel(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> Tensor:
    functions = KERNELS.choose(Attention16Spec.of(q, k, v, mask), OURS).kernel.run()
    return attention16(
        functions, q, k, v, mask, is_causal=is_causal, scale=1 / math.sqrt(q.shape[-1])
    )


Attention = Callable[[Tensor, Tensor, Tensor, "Tensor | None", bool], Tensor]
Made = Callable[[Attention, Case], Callable[[], object]]


def step(
    run: Attention, case: Case, dtype: torch.dtype = torch.bfloat16
) -> Callable[[], list[Tensor]]:
    """A function that returns y and the gradients of q, k and v."""
    q, k, v, grad_y = (each.to(dtype) for each in case.operands())
    leaves = q, k, v = tuple(each.detach().requires_grad_() for each in (q, k, v))
    mask = case.mask()

    def compute() -> list[Tensor]:
        y = run(q, k, v, mask, case.is_causal)
        return [y.detach(), *torch.autograd.grad(y, leaves, grad_y)]

    return compute


def forward(run: Attention, case: Case) -> Callable[[], Tensor]:
    q, k, v, _ = case.operands()
    mask = case.mask()
    return lambda: run(q, k, v, mask, case.is_causal)


def errors(found: list[Tensor], truth: list[Tensor]) -> dict[str, float]:
    """Of y and the three gradients."""
    names = ("y", "grad_q", "grad_k", "grad_v")
    pairs = zip(names, found, truth, strict=True)
    return {
        name: ((one.double() - true).square().mean().sqrt() / true.square().mean().sqrt()).item()
        for name, one, true in pairs
    }


def main() -> None:
    options = _options()
    rounds = 2 if options.quick else options.rounds
    found: list[dict[str, Any]] = []
    for threads, clock in ((1, processor_clock), (2, host_clock)):
        torch.set_num_threads(threads)
        for case in CASES:
            truth = step(by_torch, case, torch.float64)()
            off = {name: errors(step(run, case)(), truth) for name, run in ((OURS, by_kernel), (TORCH, by_torch))}  # fmt: skip
            for part, made, products in (
                ("forward", forward, 2),
                ("forward and backward", step, 7),
            ):
                timings = measure(
                    {OURS: made(by_kernel, case), TORCH: made(by_torch, case)},
                    rounds=rounds, warmup=2, clock=clock,
                )  # fmt: skip
                work = products * case.products()
                print(
                    f"\n{case.name} x {case.heads} x {case.width}, {part}, {threads} thread{'s' * (threads > 1)}"
                )
                print(table(timings, TORCH, {name: (work, "FLOP") for name in timings}))
                for row in rows(timings, TORCH):
                    row |= {
                        "attention": case.name,
                        "heads": case.heads,
                        "width": case.width,
                        "part": part,
                    }
                    row |= {"threads_of_case": threads, "gflops": work / row["median_s"] / 1e9}
                    row |= {
                        "clock": clock.__name__,
                        "load": os.getloadavg()[0],
                        "errors": off[row["case"]],
                    }
                    found.append(row)
            for name, each in off.items():
                print(
                    f"{name}: errors",
                    ", ".join(f"{key} {value:.5f}" for key, value in each.items()),
                )
    if not options.quick:
        record("cpu-attention", found, options.results)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--results", type=Path, default=RESULTS_FILE)
    return parser.parse_args()


if __name__ == "__main__":
    main()
