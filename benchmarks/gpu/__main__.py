"""python -m benchmarks.gpu [--dry-run] [--only QUESTION ...] [--modes MODE ...] [--budget-s SECONDS] [--results FOLDER]"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import sys
import time
from importlib import import_module
from pathlib import Path

import torch

from benchmarks import harness
from benchmarks.gpu import floor
from benchmarks.gpu.bench import MODES, Bench

# Question -> seconds that it may begin new comparisons in; together with the floor and imports under nine minutes.
BUDGETS_S = {
    "gemms": 20, "casts": 20, "adamw": 30, "layer": 70, "step": 125, "largest": 45, "graphs": 35, "integers": 35, "growth": 25,
    "sweep": 40,
}  # fmt: skip


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu", description="What narrowgauge gains on one GPU."
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="toy sizes, on a CPU too; nothing is recorded"
    )
    parser.add_argument(
        "--only", nargs="+", choices=BUDGETS_S, default=list(BUDGETS_S), help="questions to answer"
    )
    parser.add_argument(
        "--results", type=Path, default=harness.RESULTS, help="folder of the .jsonl files"
    )
    parser.add_argument(
        "--budget-s", type=float, help="for each question, in the place of its own budget"
    )
    parser.add_argument(
        "--modes", nargs="+", choices=MODES, default=list(MODES), help="of layer and step"
    )
    parser.add_argument(
        "--contenders", nargs="+", default=[], help="of layer and step, bf16 among them"
    )
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available() and not options.dry_run:
        print(
            "bench-gpu: torch.cuda.is_available() is False, and these questions are about a GPU; --dry-run tries the code.",
            file=sys.stderr,
        )
        return 1
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    torch.manual_seed(0)
    rates = floor.measured(device, options.dry_run)
    print(rates, flush=True)
    bench = Bench(
        device,
        options.dry_run,
        rates,
        None if options.dry_run else options.results,
        modes=tuple(options.modes),
        contenders=tuple(options.contenders),
    )
    for name in options.only:
        began_at_s = time.monotonic()
        with contextlib.suppress(ImportError):  # which is told below
            import_module(f"benchmarks.gpu.{name}")  # transformers, say: no part of a budget
        bench.ends_at_s = time.monotonic() + (
            BUDGETS_S[name] if options.budget_s is None else options.budget_s
        )
        try:
            import_module(f"benchmarks.gpu.{name}").main(bench)
        except (
            Exception
        ) as error:  # of what a question does outside its cases: the others are still answered
            bench.fail(name, "all of it", error)
        print(f"-- {name}: {time.monotonic() - began_at_s:.0f} s", flush=True)
    if bench.results is not None:
        _draw(bench.results)
    return _ending(bench)


def _draw(results: Path) -> None:
    """Pictures of what was measured; a borrowed card may have no matplotlib."""
    if importlib.util.find_spec("matplotlib") is None:
        print(
            "Pictures: matplotlib is not installed here; draw them later by `python -m benchmarks.gpu.picture`.",
            flush=True,
        )
        return
    from benchmarks.gpu import picture

    for path in picture.write(results):
        print(f"Picture: {path}", flush=True)


def _ending(bench: Bench) -> int:
    """Says what is missing; 1 if a case failed."""
    if bench.left_out:
        print(
            f"Left out for want of time: {len(bench.left_out)}, the first {', '.join(bench.left_out[:5])}."
        )
    for failure in bench.failures:
        print(f"Failed: {failure}", file=sys.stderr)
    return 1 if bench.failures else 0


if __name__ == "__main__":
    sys.exit(main())
