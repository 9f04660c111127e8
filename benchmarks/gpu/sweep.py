"""Is `auto` ever slower than BF16? One Linear, forward and backward with all casts, over tokens M and widths K -> N.

Shapes come in a fixed shuffled order, the corners first, so that a budget that ends early has still seen all sizes. The choice is made
by `auto` itself, with an empty cache; then its layer and a plain one are timed against each other, apart from the choice.
"""

from __future__ import annotations

import itertools
import random
import tempfile
from pathlib import Path

import torch

from benchmarks.gpu.bench import SETS, Bench, rotating
from narrowgauge.conversion import measure
from narrowgauge.conversion.auto import decide

TOKENS = (512, 1024, 2048, 4096, 8192, 16384, 32768)
WIDTHS = (1024, 2048, 4096, 8192, 16384)


def main(bench: Bench) -> None:
    slowest, where = 0.0, ""
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "auto.json"
        for m, n, k in shapes(bench):
            if bench.has_time(f"sweep {m} x {k} -> {n}"):
                ratio = one(bench, cache, m, n, k)
                slowest, where = max((slowest, where), (ratio, f"{m} tokens, {k} -> {n}"))
    if where:
        print(f"sweep: slowest shape {where}: {1 / slowest:.3f} x the speed of BF16")


def shapes(bench: Bench) -> list[tuple[int, int, int]]:
    if bench.dry:
        return [(32, 48, 64), (64, 32, 32)]
    found = list(itertools.product(TOKENS, WIDTHS, WIDTHS))
    random.Random(0).shuffle(found)
    corners = list(
        itertools.product(
            TOKENS[:: len(TOKENS) - 1], WIDTHS[:: len(WIDTHS) - 1], WIDTHS[:: len(WIDTHS) - 1]
        )
    )
    return corners + [shape for shape in found if shape not in corners]


def one(bench: Bench, cache: Path, m: int, n: int, k: int) -> float:
    """Time of auto's layer as a multiple of BF16's; 0 if it could not be measured."""
    workload = measure.LinearWorkload(tokens=m, inputs=k, outputs=n, dtype=torch.bfloat16)
    try:
        decision = decide(workload, bench.device, cache)
        sets = [measure.inputs(workload, bench.device) for _ in range(SETS)]
    except Exception as error:
        bench.fail("sweep", f"{m} x {k} -> {n}", error)
        return 0.0

    def build(name: str):
        return lambda: rotating(measure.step(workload, name, sets, bench.device), range(SETS))

    flop = 6.0 * m * n * k
    facts = {
        "tokens": m,
        "inputs": k,
        "outputs": n,
        "chosen": decision.recipe,
        "how": decision.how,
        "mode": "eager",
    }
    work = {"bf16": (flop, "bf16"), "auto": (flop, "bf16" if decision.recipe == "bf16" else "fp8")}
    timings = bench.compare(
        "sweep",
        {"bf16": build("bf16"), "auto": build(decision.recipe)},
        "bf16",
        work=work,
        facts=facts,
        sample_s=0.01,
    )
    if "auto" not in timings:
        return 0.0
    pairs = zip(timings["auto"].samples_s, timings["bf16"].samples_s, strict=True)
    return sorted(mine / theirs for mine, theirs in pairs)[len(timings["auto"].samples_s) // 2]
