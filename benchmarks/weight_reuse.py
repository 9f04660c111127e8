"""The cost of comparing a weight with the one that was cast, beside reuse by `_version` alone and beside casting at each pass.

    python -m benchmarks.weight_reuse                                  a Linear of 64, 512 and 1,024, one thread
    python -m benchmarks.weight_reuse --threads 2 --sizes 2048
    python -m benchmarks.weight_reuse --json benchmarks/results/weight_reuse.jsonl

A case is one optimizer step of a Linear [N, N]: so many micro-batches of T tokens, forward and backward, then `advance`; `eval` is
two forward passes with gradients in evaluation. Three ways in turns, in one process:

    trusted    codes are reused by `_version` and address, as before fingerprints: misses writes through `.data`
    compared   codes are reused if all bytes of the weight are the same (`ops.fingerprint`)
    recast     nothing is reused

Times are of this process on the CPU, the least of a round's calls: what a neighbour does to the machine only adds to it. extra: the
time of `compared` and `recast` over that of `trusted`, less one: of the least times, then the quartiles over rounds.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import narrowgauge as ng
from benchmarks import harness
from benchmarks.linear_overhead import least_clock
from narrowgauge.nn import weight_cache
from narrowgauge.ops.fingerprint import Exact, fingerprint

RECIPES = ("fp8-current", "fp8-delayed", "int8", "int4-hq-bs")
SHAPES = ((1, 32), (1, 512), (4, 32), (4, 512))  # (micro-batches, tokens)
ROUNDS = 40


class Trusted(Exact):
    """Says of every weight that it is the one that was cast."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor

    def is_same(self) -> bool:
        return True


def step(recipe: str, size: int, micro_batches: int, tokens: int, way: str) -> Callable[[], None]:
    torch.manual_seed(0)
    model = ng.convert(nn.Sequential(nn.Linear(size, size)), recipe)
    ng.advance(model)
    x, gradient = torch.randn(tokens, size, requires_grad=True), torch.randn(tokens, size)

    def run() -> None:
        weight_cache.fingerprint = Trusted if way == "trusted" else fingerprint  # type: ignore[attr-defined]
        for number in range(max(micro_batches, 1)):
            if way == "recast" and number:
                model[0].empty_cache(keep=True)
            model(x).backward(gradient)
        ng.advance(model)

    def evaluate() -> None:
        weight_cache.fingerprint = Trusted if way == "trusted" else fingerprint  # type: ignore[attr-defined]
        for number in range(2):
            if way == "recast" and number:
                model[0].empty_cache(keep=True)
            model(x)
        ng.advance(model)

    if not micro_batches:
        model.eval()
        return evaluate
    return run


def measured(recipe: str, size: int, micro_batches: int, tokens: int) -> dict[str, Any]:
    runs = {
        way: step(recipe, size, micro_batches, tokens, way)
        for way in ("trusted", "compared", "recast")
    }
    try:
        timings = harness.measure(runs, rounds=ROUNDS, warmup=4, sample_s=0.02, clock=least_clock)
    finally:
        weight_cache.fingerprint = fingerprint  # type: ignore[attr-defined]
    row: dict[str, Any] = {
        "recipe": recipe,
        "size": size,
        "micro_batches": micro_batches or "eval",
        "tokens": tokens,
    }
    least = {way: min(timing.samples_s) for way, timing in timings.items()}
    row["trusted_ms"] = round(least["trusted"] * 1e3, 4)
    for way in ("compared", "recast"):
        extra = harness.ratio(timings[way], timings["trusted"])
        row[f"{way}_extra"] = [
            round(each - 1, 3) for each in (least[way] / least["trusted"], extra.q1, extra.q3)
        ]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--recipes", nargs="+", default=RECIPES)
    parser.add_argument("--sizes", nargs="+", type=int, default=(64, 512, 1024))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument(
        "--json", type=Path, help="append the rows, with versions, commit and command, to this file"
    )
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    for recipe in options.recipes:
        for size in options.sizes:
            for micro_batches, tokens in (*SHAPES, (0, 32), (0, 512)):
                row = measured(recipe, size, micro_batches, tokens)
                print(*(f"{name} {value}" for name, value in row.items()), sep="   ", flush=True)
                if options.json is not None:
                    harness.record("weight_reuse", [row], options.json)


if __name__ == "__main__":
    main()
