"""Which 4-bit recipe ends nearest bf16? A Llama of 1.7 M parameters from scratch, five seeds, the same batches for every recipe.

    python -m benchmarks.frontier_study --learning-rate 1e-3 --warmup 200   the standard library; hours, see --cost
    python -m benchmarks.frontier_study --data shakespeare.txt --cost       the processor's time of a step, and of the study

At a rate of 2e-3 pairs scatter by 0.01 to 0.05 whatever the recipe, and none is told from another. At 1e-3 with 200 steps of warm-up,
bf16 with its batch cut in two, which changes the order of sums alone, ended 0.0008 from bf16 after 1,000 steps.

Runs are those of benchmarks/convergence.py at another size: a recipe and bf16 of one seed begin alike and read the same batches.
Every Linear but the head is cast: three blocks are too few for a recipe to keep one in 16 bits. The interrupted study goes on
with the same command: finished runs are not repeated, and the others continue from their last checkpoint.

The gap of a recipe is its loss minus bf16's: the final validation loss, and the mean over the last 500 steps of the loss of each batch
before the step. In less than one epoch no batch was seen before, so that is a validation loss too, of four times as many tokens and many
states of the weights, and it varies less. Reported beside the gaps is their ratio to nvfp4's, the sum over seeds by the sum over seeds,
with Fieller's interval for paired differences. With g and b the gaps of the recipe and of nvfp4, the ratio r belongs to the interval if
the mean of g - r b is within t standard errors of zero. That is a quadratic inequality in r; where nvfp4's own gap is not told from
zero, its solution has no end, and the interval is left out.
"""

from __future__ import annotations

import argparse
import math
import shutil
import statistics
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from benchmarks.convergence import SIZES, summarize, train
from benchmarks.four_bit_variants import added, hooked
from benchmarks.harness import RESULTS, record

BASE = "nvfp4"  # whose gap the others' are divided by
RECIPES = (
    "bf16",
    BASE,
    "nvfp4-46",
    "tetrajet2",
    "quartet2",
    "quartet2-46",
    "int4-hq-bs",
    "int4-eden",
)
STEPS = 2000
CHANGES: dict[str, Any] = {"hidden_size": 192, "checkpoint_every": 200}
METRICS = ("validation_loss", "train_loss_last_500")
SHORT, LONG = 4, 24  # steps of the two runs whose difference is the cost of a step


def fieller(gaps: Sequence[float], base: Sequence[float], t: float) -> tuple[float, float] | None:
    """Interval of sum(gaps) / sum(base) of paired samples; None where it has no ends.

    t  quantile of Student's distribution for len(gaps) - 1 degrees of freedom
    """
    n = len(gaps)
    if n < 2:
        return None
    g, b = statistics.mean(gaps), statistics.mean(base)
    vg, vb = statistics.variance(gaps) / n, statistics.variance(base) / n
    covariance = statistics.covariance(gaps, base) / n
    # (g - r b)^2 <= t^2 (vg - 2 r covariance + r^2 vb)
    square, linear, constant = b * b - t * t * vb, g * b - t * t * covariance, g * g - t * t * vg
    root = linear * linear - square * constant
    if square <= 0 or root < 0:
        return None
    return (linear - math.sqrt(root)) / square, (linear + math.sqrt(root)) / square


def ratios(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of `convergence.summarize` with the ratio of each gap to BASE's, over the seeds of both."""
    from narrowgauge.diagnose.band import student_quantile

    base = next((row["differences"] for row in rows if row["recipe"] == BASE), {})
    found = []
    for row in rows:
        seeds = [seed for seed in row["differences"] if seed in base]
        gaps, other = [row["differences"][seed] for seed in seeds], [base[seed] for seed in seeds]
        ratio = sum(gaps) / sum(other) if sum(other) else None
        interval = (
            fieller(gaps, other, student_quantile(len(seeds) - 1)) if len(seeds) > 1 else None
        )
        found.append(row | {"ratio": ratio, "ratio_interval": interval})
    return found


def markdown(rows: list[dict[str, Any]], metric: str) -> str:
    lines = [
        f"| recipe | loss | minus bf16's | by seed | of `{BASE}`'s gap (95 %) |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        by_seed = ", ".join(f"{value:+.4f}" for value in row["differences"].values())
        interval = row["ratio_interval"]
        ratio = "" if row["ratio"] is None else f"{row['ratio']:.2f}"
        ratio += f" ({interval[0]:.2f} to {interval[1]:.2f})" if interval else ""
        lines.append(
            f"| `{row['recipe']}` | {row[metric]:.4f} | {row['difference']:+.4f} | {by_seed} | {ratio} |"
        )
    return "\n".join(lines)


def train_variant(
    data: str, recipe: str, seed: int, steps: int, output: Path, changes: dict[str, Any]
) -> dict[str, Any]:
    """`convergence.train` in a process that knows the variants too."""
    with added(), hooked(recipe, steps) as hook:
        folder = output / Path(data).stem / f"{recipe}-seed{seed}"
        if hook is not None and not (folder / "final").exists():
            shutil.rmtree(folder, ignore_errors=True)
        result = train(data, recipe, seed, steps, output, changes)
    if hook is not None and hook.resets:
        print(f"{recipe}, seed {seed}: share of weights reset, by step: {hook.resets}", flush=True)
    return result


def processor_s(data: str, recipe: str, steps: int, output: Path) -> float:
    """Seconds of the processor that a run takes, its start and its evaluation included."""
    started_at_s = time.process_time()
    train(data, recipe, 0, steps, output / f"{recipe}-{steps}", CHANGES | {"eval_tokens": 4096})
    return time.process_time() - started_at_s


def cost(data: str, recipes: Sequence[str]) -> list[dict[str, Any]]:
    """A row per recipe: seconds of the processor of one step, by two runs of different length."""
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        processor_s(data, recipes[0], SHORT, Path(folder) / "first")  # compiles, tokenizes
        for recipe in recipes:
            short, long = (
                processor_s(data, recipe, steps, Path(folder)) for steps in (SHORT, LONG)
            )
            rows.append(
                {"part": "cost", "recipe": recipe, "step_s": (long - short) / (LONG - SHORT)}
            )
            print(rows[-1], flush=True)
    return rows


def main() -> None:
    options = _options()
    changes = CHANGES | {
        "learning_rate": options.learning_rate, "warmup_steps": options.warmup
    }  # fmt: skip
    if options.cost:
        rows = cost(options.data, options.recipes)
        whole = sum(row["step_s"] for row in rows) * options.steps * len(options.seeds)
        print(
            f"{whole / 3600:.1f} hours of one core for {len(options.seeds)} seeds and {options.steps} steps"
        )
        record("frontier_study", rows, options.results)
        return
    jobs = [(recipe, seed) for seed in options.seeds for recipe in options.recipes]
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        futures = [
            pool.submit(
                train_variant, options.data, recipe, seed, options.steps, options.output, changes
            )
            for recipe, seed in jobs
        ]
        results = [future.result() for future in futures]
    named = {"part": "losses", "data": Path(options.data).name, "steps": options.steps, **changes}
    for metric in METRICS:
        rows = ratios(summarize(results, metric))
        record(
            "frontier_study", [row | named | {"metric": metric} for row in rows], options.results
        )
        print(f"\n{metric}\n\n{markdown(rows, metric)}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.frontier_study", description=__doc__.splitlines()[0]
    )  # type: ignore[union-attr]
    parser.add_argument("--data", default="stdlib", help="as `narrowgauge train --data`")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--learning-rate", type=float, default=SIZES["learning_rate"])
    parser.add_argument("--warmup", type=int, default=SIZES["warmup_steps"], help="steps")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each")
    parser.add_argument(
        "--cost", action="store_true", help="measure a step of each, train nothing else"
    )
    parser.add_argument("--output", type=Path, default=Path("runs/frontier_study"))
    parser.add_argument("--results", type=Path, default=RESULTS / "frontier_study.jsonl")
    options = parser.parse_args()
    if "bf16" not in options.recipes:
        parser.error("--recipes must include bf16, the reference of every pair")
    return options


if __name__ == "__main__":
    main()
