"""Overhead of a small Linear: calls of Python, moves between files, depth, statements imported, time beside nn.Linear.

    python -m benchmarks.linear_overhead                         counts and times on this CPU
    python -m benchmarks.linear_overhead --recipe int4-hq-lss
    python -m benchmarks.linear_overhead --device cuda           host time of 8,192 x 4096 x 4096, bfloat16, four FP8 recipes
    python -m benchmarks.linear_overhead --base COMMIT           `advance` of 24 layers, here and at COMMIT
    python -m benchmarks.linear_overhead --json results.jsonl    appends the row, with versions, commit and command

A call is an event "call" of `sys.setprofile` in a file of this package (a generator that resumes counts again); a move, a call in
another file than the one before it; depth, frames of the package above each other. One layer of 64 x 64 reads [32, 64] float32,
forward and backward, after `advance`, so that its weight is cast too. Times are of this process on the CPU, by `benchmarks.harness`, one
thread; torchao's emulated float8 Linear is timed beside them where it is installed.

With --device cuda: processor time of a pass with the threads of autograd, the least of each round, recipes in turns, and calls of Python in
all files, whoever's. With --base: processor time and calls of Python in `advance` behind a forward and backward pass, for each layer. Five
pairs of processes, here and at COMMIT in turns; a process gives the least time of 40 steps. ratio: here over COMMIT, the median and the
quartiles of the pairs.

Over an empty CUDA runtime, where a driver costs nothing, that is a lower bound of what a GPU would wait for.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import narrowgauge as ng
from benchmarks import harness
from benchmarks.environment import ROOT

PACKAGE = str(Path(ng.__file__).parent)
ROWS, WIDTH, ROUNDS, GPU_ROUNDS = 32, 64, 60, 60
LAYERS, STEPS, PAIRS = 24, 40, 5  # of --base
ADVANCED = ("fp8-current", "fp8-delayed", "int8", "int4-hq-bs")

# Prints how many statements `import narrowgauge.nn.linear` reads.
IMPORTED = """
import sys
import narrowgauge.nn.linear
files = [m.__file__ for name, m in sys.modules.items() if name.partition(".")[0] == "narrowgauge"]
from benchmarks.linear_overhead import statements
print(sum(statements(open(file, encoding="utf-8").read()) for file in files))
"""


def statements(source: str) -> int:
    """Statements of a module's source without docstrings: a count that its formatting does not change."""
    tree = ast.parse(source)
    counted = sum(isinstance(node, ast.stmt) for node in ast.walk(tree))
    documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    return counted - sum(
        ast.get_docstring(node, clean=False) is not None
        for node in ast.walk(tree)
        if isinstance(node, documented)
    )


def counted(run: Callable[[], Any]) -> dict[str, int]:
    """calls, files, moves and depth of what `run` calls in the package."""
    files: list[str] = []
    stack: list[str] = []
    depth = 0

    def see(frame: FrameType, event: str, _: object) -> None:
        nonlocal depth
        name = frame.f_code.co_filename
        if not name.startswith(PACKAGE):
            return
        if event == "call":
            stack.append(name)
            files.append(name)
            depth = max(depth, len(stack))
        elif event == "return" and stack:
            stack.pop()

    sys.setprofile(see)
    try:
        run()
    finally:
        sys.setprofile(None)
    moves = sum(one != other for one, other in pairwise(files))
    return {"calls": len(files), "files": len(set(files)), "moves": moves, "depth": depth}


def trip(layer: nn.Module) -> Callable[[], None]:
    """Forward and backward of one layer; backward in this thread, as on a CPU."""
    x, gradient = torch.randn(ROWS, WIDTH, requires_grad=True), torch.randn(ROWS, WIDTH)

    def run() -> None:
        layer(x).backward(gradient)

    return run


def process_clock(case: Callable[[], object], calls: int) -> float:
    """As `harness.host_clock`, in time of this process on the CPU."""
    started_at_s = time.process_time()
    for _ in range(calls):
        case()
    return (time.process_time() - started_at_s) / calls


def least_clock(case: Callable[[], object], calls: int) -> float:
    """The least processor time of so many single calls: what a neighbour does to the machine only adds to it."""
    return min(process_clock(case, 1) for _ in range(calls))


def on_gpu(recipes: list[str]) -> list[dict[str, Any]]:
    """Rows of the host's time of one Linear on a GPU, nn.Linear first; extra: what a recipe adds, in times of nn.Linear.

    On one core, where there is a way to ask for it: autograd's thread on another one costs its waking up, twice as much at times.
    """
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    steps: dict[str, Callable[[], None]] = {}
    advances: dict[str, Callable[[], None]] = {}
    calls: dict[str, int] = {}
    for recipe in ("nn.Linear", *recipes):
        model = nn.Sequential(
            nn.Linear(4096, 4096, bias=False, device="cuda", dtype=torch.bfloat16)
        )
        if recipe != "nn.Linear":
            ng.convert(model, recipe)
            advances[recipe] = partial(ng.advance, model)
        x = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        gradient = torch.randn(8192, 4096, device="cuda", dtype=torch.bfloat16)

        def step(
            model: nn.Module = model, x: torch.Tensor = x, gradient: torch.Tensor = gradient
        ) -> None:
            model(x).backward(gradient)
            model.zero_grad(set_to_none=True)
            x.grad = None

        for _ in range(4):
            step()
            if recipe in advances:
                advances[recipe]()
        with torch.autograd.set_multithreading_enabled(False):
            calls[recipe] = python_calls(step)
        steps[recipe] = step
    timings = harness.measure(steps, rounds=GPU_ROUNDS, warmup=8, clock=least_clock)
    rows: list[dict[str, Any]] = []
    for recipe, timing in timings.items():
        row = {
            "recipe": recipe,
            "host_us": round(min(timing.samples_s) * 1e6, 1),
            "calls": calls[recipe],
        }
        if recipe in advances:
            extra = harness.ratio(timing, timings["nn.Linear"])
            row["extra"], row["quartiles"] = (
                round(extra.median - 1, 2),
                [round(each - 1, 2) for each in (extra.q1, extra.q3)],
            )
            row["advance_us"] = round(least_clock(advances[recipe], 100) * 1e6, 1)
        rows.append(row)
    return rows


def python_calls(run: Callable[[], Any]) -> int:
    """Calls of Python functions in all files, whoever's."""
    events: list[str] = []
    sys.setprofile(lambda frame, event, _: events.append(event))
    try:
        run()
    finally:
        sys.setprofile(None)
    return events.count("call")


def advances() -> dict[str, dict[str, float]]:
    """Recipe -> microseconds and Python calls of `advance` for each of LAYERS layers, behind a forward and backward pass.

    Run against either tree by `--base`, so it uses what both have.
    """
    torch.set_num_threads(1)
    found = {}
    for recipe in ADVANCED:
        model = ng.convert(nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))), recipe)
        x, least_s = torch.randn(ROWS, WIDTH), float("inf")
        for _ in range(STEPS):
            model(x).sum().backward()
            least_s = min(least_s, process_clock(partial(ng.advance, model), 1))
        model(x).sum().backward()
        calls = python_calls(partial(ng.advance, model))
        found[recipe] = {"us": least_s * 1e6 / LAYERS, "calls": calls / LAYERS}
    return found


def advances_at(tree: Path, folder: Path) -> dict[str, dict[str, float]]:
    path = folder / "advances.json"
    command = [sys.executable, str(Path(__file__).resolve()), "--advances", str(path)]
    subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(tree)}, check=True)
    read: dict[str, dict[str, float]] = json.loads(path.read_text(encoding="utf-8"))
    return read


def beside(base: str) -> list[dict[str, Any]]:
    """Rows of `advance` here and at the commit `base`."""
    from benchmarks.same_loss import checked_out

    pairs = []
    with (
        tempfile.TemporaryDirectory(prefix="linear-overhead-") as name,
        checked_out(base, Path(name)) as tree,
    ):
        for number in range(PAIRS):
            trees = (tree, ROOT) if number % 2 else (ROOT, tree)
            both = {each: advances_at(each, Path(name)) for each in trees}
            pairs.append((both[ROOT], both[tree]))
    rows: list[dict[str, Any]] = []
    for recipe in ADVANCED:
        here, there = [here[recipe] for here, _ in pairs], [there[recipe] for _, there in pairs]
        ratio = harness.Spread.of([a["us"] / b["us"] for a, b in zip(here, there, strict=True)])
        row: dict[str, Any] = {"recipe": recipe, "layers": LAYERS, "base": base}
        for which, values in (("", here), ("base_", there)):
            row[f"{which}advance_us"] = round(min(each["us"] for each in values), 2)
            row[f"{which}calls"] = round(values[0]["calls"], 1)
        rows.append(
            row | {"ratio": [round(each, 3) for each in (ratio.median, ratio.q1, ratio.q3)]}
        )
    return rows


def _torchao() -> nn.Module | None:
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError:
        return None
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    converted: nn.Module = convert_to_float8_training(
        model, config=Float8LinearConfig(emulate=True)
    )
    return converted


def measured(recipe: str) -> dict[str, Any]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = ng.QLinear(WIDTH, WIDTH, recipe=recipe)
    run = trip(layer)
    run()
    ng.advance(layer)
    run()  # the weight's casts are kept from here on
    ng.advance(layer)
    found: dict[str, Any] = {"recipe": recipe, **counted(run)}
    run()
    runs = {"nn.Linear": trip(nn.Linear(WIDTH, WIDTH)), recipe: run}

    def first() -> None:
        ng.advance(layer)
        run()

    runs["with advance"] = first
    if (peer := _torchao()) is not None:
        runs["torchao"] = trip(peer)
    timings = harness.measure(runs, rounds=ROUNDS, warmup=3, clock=process_clock)
    found["times_us"] = {name: round(timing.median_s * 1e6, 1) for name, timing in timings.items()}
    found["times_over_linear"] = round(
        harness.ratio(timings[recipe], timings["nn.Linear"]).median, 2
    )
    done = subprocess.run(
        [sys.executable, "-c", IMPORTED], capture_output=True, encoding="utf-8", check=True
    )
    found["imported_statements"] = int(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--recipe", default="fp8-current")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--json", type=Path, help="append the row, with versions, commit and command, to this file"
    )
    parser.add_argument("--base", help="commit to compare `advance` with")
    parser.add_argument(
        "--advances", type=Path, help="write the times of this tree's `advance` into this file"
    )
    options = parser.parse_args()
    if options.advances is not None:
        options.advances.write_text(json.dumps(advances()), encoding="utf-8")
        return
    if options.base is not None:
        rows = beside(options.base)
        for row in rows:
            print(*(f"{name} {value}" for name, value in row.items()), sep="   ")
        if options.json is not None:
            harness.record("linear_overhead_advance", rows, options.json)
        return
    if options.device == "cuda":
        rows = on_gpu(["fp8-current", "fp8-delayed", "fp8-block", "fp8-row"])
        for row in rows:
            print(*(f"{name} {value}" for name, value in row.items()), sep="   ")
        if options.json is not None:
            harness.record("linear_overhead_gpu", rows, options.json)
        return
    found = measured(options.recipe)
    for name, value in found.items():
        print(f"{name:20} {value}")
    if options.json is not None:
        harness.record("linear_overhead", [found], options.json)


if __name__ == "__main__":
    main()
