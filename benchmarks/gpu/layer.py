"""How much faster is a layer of 12 GEMMs, forward and backward, casts included? Hidden 4096, MLP 16384, 15,872 tokens.

The four Linears of a Transformer layer, each with three products, nothing between them: the shape of TransformerEngine's table
(docs/examples/gemm_profiling), where an H200 reaches 1.69 x BF16 with delayed scaling, 1.58 with current and 1.40 with blocks.
Eager and compiled, each against BF16 in the same mode.

"products of RECIPE" are its 12 products of operands that were quantized beforehand: what is left of the time is casts. "te-" is
TransformerEngine.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import narrowgauge as ng
from benchmarks.gpu.bench import SETS, Bench, rotating
from benchmarks.gpu.gemms import products
from benchmarks.gpu.models import converted, in_recipe
from narrowgauge import recipes
from narrowgauge.conversion.measure import compiled_alone
from narrowgauge.ops.mm import mm

PRODUCTS = "products of "
CONTENDERS: dict[str, tuple[str, ...]] = {
    "compiled": ("bf16", "torchao-tensorwise", "fp8-delayed", "fp8-current", "fp8-block"),  # each is four compilations
    "eager": (
        "bf16", "fp8-delayed", "fp8-current", "fp8-row", "fp8-block", "products of fp8-current", "products of fp8-row",
        "products of fp8-block", "torchao-tensorwise", "torchao-rowwise", "te-delayed", "te-current",
    ),
}  # fmt: skip


def main(bench: Bench) -> None:
    hidden, wide, tokens = bench.size(4096, 32), bench.size(16_384, 64), bench.size(15_872, 48)
    facts = {"hidden": hidden, "mlp": wide, "tokens": tokens}
    flop = 6.0 * tokens * hidden * (3 * hidden + hidden + 2 * wide)
    for mode in bench.modes:
        contenders = bench.present(CONTENDERS[mode])
        if bench.dry and mode == "compiled" and bench.device.type != "cuda":
            continue  # Inductor takes minutes for seven small models on a CPU
        if not bench.has_time(f"layer, {mode}"):
            continue
        builds = {name: _build(bench, name, mode, hidden, wide, tokens) for name in contenders}
        work = {name: (flop, "bf16" if name == "bf16" else "fp8") for name in contenders}
        bench.compare("layer", builds, "bf16", work=work, facts=facts | {"mode": mode})


def _build(bench: Bench, contender: str, mode: str, hidden: int, wide: int, tokens: int) -> Any:
    def build() -> Any:
        shapes = ((hidden, 3 * hidden), (hidden, hidden), (hidden, wide), (wide, hidden))
        if contender.startswith(PRODUCTS):
            return _products(bench, contender.removeprefix(PRODUCTS), shapes, tokens)
        layers = nn.ModuleList(
            nn.Linear(k, n, bias=False, device=bench.device, dtype=torch.bfloat16)
            for k, n in shapes
        )
        layers = converted(layers, contender, bench, tokens)
        calls = [compiled_alone(layer) if mode == "compiled" else layer for layer in layers]
        sets = [[_pair(tokens, k, n, bench) for k, n in shapes] for _ in range(SETS)]

        def step(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
            for layer, call, (x, gy) in zip(layers, calls, pairs, strict=True):
                with in_recipe(contender):
                    y = call(x)
                y.backward(gy)
                layer.weight.grad = x.grad = None
            if not contender.startswith("te-"):
                ng.advance(
                    layers
                )  # weights are quantized anew in the next step, delayed scaling goes on

        return rotating(step, sets)

    return build


def _products(bench: Bench, recipe: str, shapes: tuple[tuple[int, int], ...], tokens: int) -> Any:
    """The 12 products alone, of codes that are there."""

    def operands(product: str, k: int, n: int) -> Any:
        gemm = recipes.get(recipe).gemms()[product]
        rows, columns, depth = products(tokens, k, n)[product]
        pair = [
            torch.randn(outer, depth, device=bench.device, dtype=torch.bfloat16)
            for outer in (rows, columns)
        ]
        codes = [ng.quantize(x, cast) for x, cast in zip(pair, (gemm.lhs, gemm.rhs), strict=True)]
        return lambda: mm(*codes, out_dtype=torch.bfloat16, fast_accumulate=gemm.fast_accumulate)

    calls = [
        operands(product, k, n)
        for k, n in shapes
        for product in ("output", "grad_input", "grad_weight")
    ]

    def step() -> None:
        for call in calls:
            call()

    return step


def _pair(tokens: int, k: int, n: int, bench: Bench) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(tokens, k, device=bench.device, dtype=torch.bfloat16, requires_grad=True)
    return x, torch.randn(tokens, n, device=bench.device, dtype=torch.bfloat16)
