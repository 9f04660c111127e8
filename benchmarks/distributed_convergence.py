"""Do gradients that travel in FP8 end where 16-bit messages end? The demo's model on 2 ranks, several seeds, the same batches.

    python -m benchmarks.distributed_convergence            500 steps, 3 seeds, "16bit", "fp8" and "fp8-lm"; 2 processes of one thread

Data and batches of examples/demo.toml and a Llama of 4 blocks, 128 wide, in FP8 (batch 8), as DistributedDataParallel over 2 processes
(gloo), each with half of every batch; gradients are summed and the loss divided by the targets of both. A seed decides weights and data
order, so runs of one seed are twins. A line of results per run, as soon as it ends, with the validation loss (nats per token); at the
end, if there are several seeds, a line per method with its differences to "16bit" and the spread between seeds of "16bit", which the mean
difference must stay below. Runs whose line is there already are not repeated.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.environment import ROOT
from benchmarks.harness import RESULTS, record

NUMBERS = ("16bit", "fp8", "fp8-lm")
REFERENCE = "16bit"
WORLD = 2


class SummedLoss(nn.Module):
    """The loss as a module, which DistributedDataParallel wraps whole."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """Nats summed over the targets, float32."""
        inputs = {name: value for name, value in batch.items() if name != "labels"}
        logits = self.model(**inputs, use_cache=False).logits
        return nn.functional.cross_entropy(
            logits.float().flatten(0, -2), batch["labels"].flatten(), reduction="sum"
        )


def train(numbers: str, seed: int, steps: int, cache: Path) -> dict[str, Any]:
    """One run, on this rank."""
    import narrowgauge as ng
    from narrowgauge.data import valid_targets
    from narrowgauge.distributed.gradients import install
    from narrowgauge.optim import precision as precisions
    from narrowgauge.optim.clipping import clip_gradients
    from narrowgauge.train.config import toml
    from narrowgauge.train.config.settings import resolved
    from narrowgauge.train.launches import set_learning_rate
    from narrowgauge.train.model import build
    from narrowgauge.train.optimizer import build_optimizer
    from narrowgauge.train.schedule import learning_rate
    from narrowgauge.train.tasks.text import TextTask

    started_at_s = time.monotonic()
    demo = toml.load(ROOT / "examples" / "demo.toml")
    sizes = {"hidden_size": 128, "recipe": "fp8-current", "fuse": False, "min_learning_rate": 0.0}
    config = resolved(replace(demo, seed=seed, steps=steps, compare="", cache=str(cache), **sizes))
    task, cpu = TextTask.prepare(config), torch.device("cpu")
    model = build(config, task.model, cpu, task.tokens_per_forward() // WORLD, None)
    precision = precisions.get(config.precision)
    parallel = DistributedDataParallel(SummedLoss(model))
    made = install(parallel, gradients=numbers, reduce="sum")  # type: ignore[arg-type]
    optimizer = build_optimizer(config, model, precision)
    batches = task.feed(model).batches
    losses = []
    for step in range(steps):
        parts = [batches.batch(step, part, WORLD) for part in range(WORLD)]
        targets = sum(valid_targets(part) for part in parts)
        set_learning_rate(optimizer, learning_rate(config, step + 1))
        with precision.context("cpu"):
            loss = parallel(parts[dist.get_rank()]) / targets
        loss.backward()
        clip_gradients(model.parameters(), config.clip or None)
        optimizer.step()
        ng.advance(model)
        optimizer.zero_grad()
        losses.append(loss.detach())
    parameters = sum(p.numel() for p in model.parameters())
    summed = torch.stack(losses)
    dist.all_reduce(summed)
    row = {
        "case": numbers, "seed": seed, "steps": steps, "parameters": parameters, "ranks": WORLD, "recipe": config.recipe,
        "validation_loss": evaluated(parallel.module, task, model, precision), "train_loss_last_100": float(summed[-100:].mean()),
        "sent_bytes_per_parameter": sum(made.bytes_sent.values()) / steps / parameters,
        "ranks_equal": ranks_equal(model), "seconds": round(time.monotonic() - started_at_s),
    }  # fmt: skip
    mu = made.state_dict().get("mu", {})
    return row | (
        {"mu": [min(mu.values()), statistics.median(mu.values()), max(mu.values())]} if mu else {}
    )


@torch.no_grad()
def evaluated(loss: nn.Module, task: Any, model: Any, precision: Any) -> float:
    from narrowgauge.data import valid_targets

    total, targets = 0.0, 0
    model.eval()
    for batch in task.evaluation(model):
        with precision.context("cpu"):
            total += float(loss(batch))
        targets += valid_targets(batch)
    return total / targets


def ranks_equal(model: nn.Module) -> bool:
    """Whether all weights have the same bits on all ranks."""
    equal = True
    for parameter in model.parameters():
        first = parameter.detach().clone()
        dist.broadcast(first, 0)
        equal &= torch.equal(first, parameter)
    found = torch.tensor(equal)
    dist.all_reduce(found, dist.ReduceOp.MIN)
    return bool(found)


def _rank(
    rank: int, store: str, jobs: list[tuple[str, int]], steps: int, cache: Path, rows: Any
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    for numbers, seed in jobs:
        row = train(numbers, seed, steps, cache)
        if rank == 0:
            rows.put(row)
    dist.destroy_process_group()


def run(jobs: list[tuple[str, int]], steps: int, cache: Path, results: Path) -> None:
    """All jobs, one after another, on processes that stay; each row is written as it comes."""
    context = multiprocessing.get_context("spawn")
    rows, store = context.Queue(), str(Path(tempfile.mkdtemp()) / "store")
    processes = [
        context.Process(target=_rank, args=(rank, store, jobs, steps, cache, rows))
        for rank in range(WORLD)
    ]
    for process in processes:
        process.start()
    for numbers, seed in jobs:
        while rows.empty():
            if any(process.exitcode for process in processes):
                raise SystemExit(
                    "distributed_convergence: a process ended; see its traceback above."
                )
            time.sleep(1)
        row = rows.get()
        record("distributed_convergence", [row], results)
        ending = f"ranks equal: {row['ranks_equal']}, {row['seconds']} s"
        print(
            f"{numbers:7} seed {seed}: validation {row['validation_loss']:.4f}, {ending}",
            flush=True,
        )
    for process in processes:
        process.join()


def finished(results: Path, steps: int) -> dict[tuple[str, int], dict[str, Any]]:
    if not results.exists():
        return {}
    rows = [json.loads(line) for line in results.read_text(encoding="utf-8").splitlines()]
    return {
        (row["case"], row["seed"]): row
        for row in rows
        if row.get("seed") is not None and row["steps"] == steps
    }


def summary(found: dict[tuple[str, int], dict[str, Any]], steps: int) -> list[dict[str, Any]]:
    """A row per method, over the seeds that it and the reference have."""
    rows = []
    for numbers in NUMBERS[1:]:
        seeds = [seed for case, seed in found if case == numbers and (REFERENCE, seed) in found]
        losses = [found[REFERENCE, seed]["validation_loss"] for seed in seeds]
        gaps = {
            seed: found[numbers, seed]["validation_loss"]
            - found[REFERENCE, seed]["validation_loss"]
            for seed in seeds
        }
        if len(seeds) > 1:
            spread = max(losses) - min(losses)
            gap = statistics.mean(gaps.values())
            rows.append(
                {
                    "case": f"{numbers} - {REFERENCE}",
                    "steps": steps,
                    "difference": gap,
                    "differences": gaps,
                    "spread_of_seeds": spread,
                }
            )
            verdict = "below" if abs(gap) < spread else "NOT below"
            print(
                f"{numbers:7} {gap:+.4f} to {REFERENCE}: {verdict} the spread of its seeds, {spread:.4f}"
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="benchmarks.distributed_convergence", description=__doc__.splitlines()[0]
    )  # type: ignore[union-attr]
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--cache", type=Path, default=Path("runs/distributed_convergence/cache"))
    parser.add_argument("--results", type=Path, default=RESULTS / "distributed_convergence.jsonl")
    options = parser.parse_args()
    done = finished(options.results, options.steps)
    jobs = [
        (numbers, seed)
        for seed in options.seeds
        for numbers in NUMBERS
        if (numbers, seed) not in done
    ]
    if jobs:
        run(jobs, options.steps, options.cache, options.results)
    if len(options.seeds) > 1:
        record(
            "distributed_convergence",
            summary(finished(options.results, options.steps), options.steps),
            options.results,
        )


if __name__ == "__main__":
    main()
