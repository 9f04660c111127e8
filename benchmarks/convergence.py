"""Do the narrow recipes end where bfloat16 ends? Small Llamas from scratch, several seeds, the same batches for every recipe.

    make convergence                                     the default corpus (Python's standard library), about half an hour on 2 cores
    make convergence ARGS="--data shakespeare.txt"       any other text
    make convergence ARGS="--recipes bf16 int4-hq-bs int4-hq-bs,fp8-current@80%"     the last fifth in a wider recipe
    make convergence ARGS="--quick"                      50 steps, one seed: to see that it works

A seed decides weights and data order, so a recipe and bf16 of one seed are a pair: same start, same batches. Reported for each
recipe: the mean over seeds of (its final validation loss - that of its bf16 twin), the single differences, and beside them what
chance does here: the spread between bf16 seeds, and the control, which is bf16 with the batch cut into two micro-batches. That
changes nothing but the order of float32 sums, yet such a run drifts away from its twin as any perturbed training does; a
recipe's differences mean something only where they exceed the control's. Runs that are finished are not repeated; delete the
output folder to start anew.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.harness import RESULTS, record

CONTROL = "bf16-in-halves"
RECIPES = ("bf16", CONTROL, "fp8-delayed", "fp8-current", "fp8-row", "fp8-block", "mxfp8")
SIZES: dict[str, Any] = {
    "hidden_size": 128, "layers": 3, "heads": 4, "sequence_length": 64, "batch_size": 8, "vocab_size": 1024,
    "learning_rate": 2e-3, "warmup_steps": 50, "eval_every": 0, "eval_tokens": 65536, "checkpoint_every": 0,
    "tensor_every": 0, "sample_tokens": 0, "log_every": 200, "threads": 1, "keep": 1,
}  # fmt: skip


def main() -> None:
    options = _options()
    jobs = [(recipe, seed) for seed in options.seeds for recipe in options.recipes]
    changes = {"batch_size": options.batch_size}
    with ProcessPoolExecutor(options.jobs, multiprocessing.get_context("spawn")) as pool:
        futures = [
            pool.submit(train, options.data, recipe, seed, options.steps, options.output, changes)
            for recipe, seed in jobs
        ]
        results = [future.result() for future in futures]
    rows = summarize(results)
    record(
        "convergence",
        [
            row | {"data": Path(options.data).name, "steps": options.steps, **changes}
            for row in rows
        ],
        options.results,
    )
    print(markdown(rows))


def train(
    data: str,
    recipe: str,
    seed: int,
    steps: int,
    output: Path,
    changes: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """One run, or the record of it if it is finished. changes: of SIZES; each set of them needs an output of its own."""
    from narrowgauge.train.config.settings import TrainConfig, resolved
    from narrowgauge.train.loop import run

    folder = output / Path(data).stem / f"{recipe}-seed{seed}"
    if not (folder / "final").exists():
        sizes = SIZES | {"warmup_steps": min(SIZES["warmup_steps"], steps)} | (changes or {})
        if recipe == CONTROL:
            sizes = sizes | {"micro_batches": 2}
        name, _, switch = ("bf16" if recipe == CONTROL else recipe).partition(",")
        config = TrainConfig(
            data=data, recipe=name, switch=switch, seed=seed, steps=steps, output=str(folder), resume=True,
            cache=str(output / "cache" / f"{Path(data).stem}-{seed}"), **sizes,
        )  # fmt: skip
        if code := run(resolved(config)):
            raise SystemExit(
                f"convergence: {recipe} seed {seed} ended with exit code {code}; see {folder}."
            )
    events = [
        json.loads(line)
        for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    losses = [event["loss"] for event in events if event["event"] == "step"]
    final = [event["loss"] for event in events if event["event"] == "eval"][-1]
    return {
        "recipe": recipe,
        "seed": seed,
        "validation_loss": final,
        "train_loss_last_100": statistics.mean(losses[-100:]),
        "train_loss_last_500": statistics.mean(losses[-500:]),
    }


def summarize(
    results: list[dict[str, Any]], metric: str = "validation_loss"
) -> list[dict[str, Any]]:
    """A row per recipe: losses and paired differences by seed, in nats per token. metric: of `train`."""
    by_recipe: dict[str, dict[int, float]] = {}
    for result in results:
        by_recipe.setdefault(result["recipe"], {})[result["seed"]] = result[metric]
    reference = by_recipe["bf16"]
    values = list(reference.values())
    spread = max(values) - min(values)
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    rows = []
    for recipe, losses in by_recipe.items():
        differences = {seed: loss - reference[seed] for seed, loss in losses.items()}
        rows.append(
            {
                "recipe": recipe,
                metric: statistics.mean(losses.values()),
                "losses": losses,
                "difference": statistics.mean(differences.values()),
                "differences": differences,
                "bf16_spread": spread,
                "bf16_deviation": deviation,
            }
        )
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    """The table of docs/convergence.md."""
    lines = [
        "| recipe | validation loss (mean) | difference to bf16 (mean) | by seed |",
        "|---|---|---|---|",
    ]
    for row in rows:
        by_seed = ", ".join(f"{value:+.4f}" for value in row["differences"].values())
        lines.append(
            f"| `{row['recipe']}` | {row['validation_loss']:.4f} | {row['difference']:+.4f} | {by_seed} |"
        )
    first = rows[0]
    lines.append("")
    lines.append(
        f"Between seeds of bf16: spread {first['bf16_spread']:.4f}, standard deviation {first['bf16_deviation']:.4f} nats."
    )
    return "\n".join(lines)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.convergence", description=__doc__.splitlines()[0]
    )  # type: ignore[union-attr]
    parser.add_argument("--data", default="stdlib", help="as `narrowgauge train --data`")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument(
        "--batch-size", type=int, default=SIZES["batch_size"], help="sequences of a step"
    )
    parser.add_argument("--recipes", nargs="+", default=list(RECIPES))
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time, one thread each")
    parser.add_argument("--output", type=Path, default=Path("runs/convergence"))
    parser.add_argument("--results", type=Path, default=RESULTS / "convergence.jsonl")
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    if options.quick:
        options.steps, options.seeds = 50, [0]
        options.output = options.output / "quick"
        options.results = options.output / "convergence.jsonl"
    if "bf16" not in options.recipes:
        parser.error("--recipes must include bf16, the reference of every pair")
    return options


if __name__ == "__main__":
    main()
