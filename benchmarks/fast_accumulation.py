"""Does training end elsewhere where FP8 tensor cores add all three products in 14 bits? Small Llamas, added as Hopper adds, on a CPU.

    python -m benchmarks.fast_accumulation                     the runs of docs/convergence.md, one after another, an hour on one thread
    python -m benchmarks.fast_accumulation --data shakespeare.txt
    python -m benchmarks.fast_accumulation --small             two layers, 64 wide: a minute and a half a run
    python -m benchmarks.fast_accumulation --quick             50 steps, one seed: to see that it works

Cases, each from the same start and with the same batches as bf16 of its seed (benchmarks/convergence.py):

    bf16, bf16-in-halves        the reference, and what the order of float32 sums does alone
    fp8-current                 fast in output, split in the products of the gradient: sums leave the tensor core after 128 products
    fp8-current-fast            fast in all three
    fp8-current-fast:12         the same with 12 bits. A product over 512 tokens then errs as one over 8,192 does with 14

and the error of a product by the length of its contracted axis, fast and split, which says how far a small model speaks for a large one.
Runs that are finished are not repeated; delete the output folder to start anew.
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from benchmarks.convergence import CONTROL, SIZES, markdown, summarize, train
from benchmarks.harness import RESULTS, record
from benchmarks.hopper_sums import BITS, hopper_sums, in_place_of_float32

CASES = ("bf16", CONTROL, "fp8-current", "fp8-current-fast", "fp8-current-fast:12")
SMALL: dict[str, Any] = {"hidden_size": 64, "layers": 2, "heads": 2}
LENGTHS = (128, 512, 2048, 8192, 32768)
ROWS = 64  # of the two random operands, E4M3 of normal numbers


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    changes = SMALL if options.small else {}
    results = []
    for seed in options.seeds:
        for case in options.cases:
            results.append(run(options.data, case, seed, options.steps, options.output, changes))
            print(f"fast_accumulation: {results[-1]}", flush=True)
    facts = {"data": Path(options.data).name, "steps": options.steps, **SIZES, **changes}
    rows = [row | facts for row in summarize(results)]
    lengths = [] if options.small else errors()
    record("fast_accumulation", [*rows, *lengths], options.results)
    print(markdown(rows))
    for row in lengths:
        print(row)


def run(
    data: str, case: str, seed: int, steps: int, output: Path, changes: dict[str, Any] | None = None
) -> dict[str, Any]:
    """One run of `convergence`, its FP8 products added as Hopper adds them. changes: of its SIZES."""
    recipe, _, bits = case.partition(":")
    adds = in_place_of_float32(int(bits or BITS)) if recipe.startswith("fp8") else nullcontext()
    with adds:
        return train(data, recipe, seed, steps, output / f"{bits or BITS}-bits", changes) | {
            "recipe": case
        }


def errors() -> list[dict[str, Any]]:
    """By length of the contracted axis: relative error (Frobenius), and how much smaller the products are, of fast and split sums."""
    generator = torch.Generator().manual_seed(20261122)
    rows = []
    for length in LENGTHS:
        lhs, rhs = (
            torch.randn(ROWS, length, generator=generator).to(torch.float8_e4m3fn).double()
            for _ in range(2)
        )
        truth = lhs @ rhs.T
        row: dict[str, Any] = {"case": "product", "contracted": length}
        for name, fast, bits in (
            ("split", False, BITS),
            ("fast", True, BITS),
            ("fast_12_bits", True, 12),
        ):
            found = hopper_sums(lhs.float(), rhs.float(), fast=fast, bits=bits).double()
            row[f"{name}_error"] = float((found - truth).norm() / truth.norm())
            row[f"{name}_slope"] = float((found * truth).sum() / truth.square().sum())
        rows.append(row)
    return rows


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.fast_accumulation", description=__doc__.splitlines()[0]
    )  # type: ignore[union-attr]
    parser.add_argument("--data", default="stdlib", help="as `narrowgauge train --data`")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--cases", nargs="+", default=list(CASES))
    parser.add_argument("--output", type=Path, default=Path("runs/fast_accumulation"))
    parser.add_argument("--results", type=Path, default=RESULTS / "fast_accumulation.jsonl")
    parser.add_argument("--small", action="store_true", help="two layers, 64 wide")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.small:
        options.output = options.output / "small"
    if options.quick:
        options.steps, options.seeds = 50, [0]
        options.output = options.output / "quick"
        options.results = options.output / "fast_accumulation.jsonl"
    if "bf16" not in options.cases:
        parser.error("--cases must include bf16, the reference of every pair")
    return options


if __name__ == "__main__":
    main()
