"""How much faster is a whole training step, and how much memory does it take? A Llama of 8B-shaped layers, equal batch.

Forward, loss, backward and torch's fused AdamW on bfloat16 weights, the same for all contenders; eager and compiled, each against
BF16 in the same mode. One contender at a time is in memory, so they are timed one after another with the baseline timed before and
after: `drift` is the second reading over the first. Eager first: compiling takes most of the budget.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import torch

import narrowgauge as ng
from benchmarks import harness
from benchmarks.gpu.bench import SETS, Bench
from benchmarks.gpu.models import converted, llama
from narrowgauge.auto.measure import compiled_alone

LAYERS, SEQUENCE, ROWS = 4, 4096, 2
CONTENDERS = {
    "eager": ("fp8-delayed", "fp8-current", "fp8-block", "auto", "torchao-tensorwise"),
    "compiled": (
        "fp8-current",
        "torchao-tensorwise",
        "fp8-delayed",
    ),  # `auto` would compile each candidate for each shape
}
STEPS, ROUNDS = 3, 5


def main(bench: Bench) -> None:
    for mode, contenders in CONTENDERS.items():
        if bench.dry and mode == "compiled" and bench.device.type != "cuda":
            continue
        readings: list[dict[str, Any]] = []
        for name in ("bf16", *contenders, "bf16"):
            if bench.has_time(f"step, {mode}, {name}") and (line := _measured(bench, name, mode)) is not None:
                readings.append(line)
        _report(bench, mode, readings)


def _report(bench: Bench, mode: str, readings: list[dict[str, Any]]) -> None:
    plain = [line for line in readings if line["case"] == "bf16"]
    if not plain:
        return
    baseline, drift = plain[0]["median_s"], plain[-1]["median_s"] / plain[0]["median_s"]
    print(f"\nstep, {mode}  (BF16 after over before: {drift:.3f})")
    for line in readings:
        line |= {"mode": mode, "baseline": "bf16", "speedup": baseline / line["median_s"], "drift": drift}
        peak = "" if line["peak_bytes"] is None else f"  peak {line['peak_bytes'] / 2**30:.1f} GiB"
        print(
            f"{line['case']:20} {harness.seconds(line['median_s'])}  x {line['speedup']:.3f} of BF16{peak}", flush=True
        )
    bench.write("step", readings)


def _measured(bench: Bench, name: str, mode: str) -> dict[str, Any] | None:
    on_gpu = bench.device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    try:
        step = _step(bench, name, mode)
        clock = harness.cuda_clock if on_gpu else harness.host_clock
        for _ in range(2):
            step()
        samples = [clock(step, 1 if bench.dry else STEPS) for _ in range(2 if bench.dry else ROUNDS)]
    except Exception as error:
        bench.fail("step", f"{name} {mode}", error)
        return None
    finally:
        gc.collect()
    spread = harness.Spread.of(samples)
    return {
        "case": name, "median_s": spread.median, "q1_s": spread.q1, "q3_s": spread.q3, "rounds": len(samples),
        "layers": bench.size(LAYERS, 1), "tokens": bench.size(ROWS * SEQUENCE, 32),
        "peak_bytes": torch.cuda.max_memory_allocated() if on_gpu else None,
    }  # fmt: skip


def _step(bench: Bench, name: str, mode: str) -> Callable[[], None]:
    rows, length = ROWS, bench.size(SEQUENCE, 16)
    model = converted(llama(bench, LAYERS), name, bench, rows * length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=bench.device.type == "cuda")
    forward: Any = compiled_alone(model) if mode == "compiled" else model
    vocabulary = model.config.vocab_size
    batches = [torch.randint(vocabulary, (rows, length), device=bench.device) for _ in range(SETS)]
    turn = iter(range(10**9))

    def step() -> None:
        ids = batches[next(turn) % SETS]
        forward(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        ng.advance(model)
        optimizer.zero_grad()

    return step
