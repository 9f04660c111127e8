"""Whole training steps, timed one contender after another, since they do not fit into memory beside each other.

The baseline is timed before and after them: `drift` is the second reading over the first. With `keeps` it stays where it is between, and
is built, and compiled, once; what it holds counts in nobody's peak.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from benchmarks import harness
from benchmarks.gpu.bench import Bench

STEPS, ROUNDS = 3, 5


def compared(
    bench: Bench,
    question: str,
    contenders: Sequence[str],
    build: Callable[[str], Callable[[], None]],
    facts: Mapping[str, Any],
    baseline: str = "bf16",
    keeps: bool = False,
) -> list[dict[str, Any]]:
    """The lines of the contenders that could run, beside the baseline's; printed and recorded. build: name -> a step."""
    readings: list[dict[str, Any]] = []
    if keeps:
        build = _keeping(build, baseline)
    title = f"{question}, {', '.join(f'{name} {value}' for name, value in facts.items())}"
    for name in (baseline, *contenders, baseline):
        if (
            bench.has_time(f"{title}, {name}")
            and (line := _measured(bench, question, name, build, facts)) is not None
        ):
            readings.append(line)
    plain = [line for line in readings if line["case"] == baseline]
    if not plain:
        return []
    if keeps:  # what it held at its second reading was its own
        plain[-1]["peak_bytes"] = plain[0]["peak_bytes"]
    first, drift = plain[0]["median_s"], plain[-1]["median_s"] / plain[0]["median_s"]
    print(f"\n{title}  ({baseline} after over before: {drift:.3f})")
    for line in readings:
        line |= {"baseline": baseline, "speedup": first / line["median_s"], "drift": drift}
        peak = "" if line["peak_bytes"] is None else f"  peak {line['peak_bytes'] / 2**30:.1f} GiB"
        print(
            f"{line['case']:20} {harness.seconds(line['median_s'])}  x {line['speedup']:.3f} of {baseline}{peak}",
            flush=True,
        )
    bench.write(question, readings)
    return readings


def _keeping(
    build: Callable[[str], Callable[[], None]], baseline: str
) -> Callable[[str], Callable[[], None]]:
    kept: dict[str, Callable[[], None]] = {}

    def once(name: str) -> Callable[[], None]:
        if name != baseline:
            return build(name)
        if name not in kept:
            kept[name] = build(name)
        return kept[name]

    return once


def _measured(
    bench: Bench,
    question: str,
    name: str,
    build: Callable[[str], Callable[[], None]],
    facts: Mapping[str, Any],
) -> dict[str, Any] | None:
    on_gpu = bench.device.type == "cuda"
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated() if on_gpu else 0
    try:
        step = build(name)
        clock = harness.cuda_clock if on_gpu else harness.host_clock
        for _ in range(2):
            step()
        samples = [
            clock(step, 1 if bench.dry else STEPS) for _ in range(2 if bench.dry else ROUNDS)
        ]
    except Exception as error:
        bench.fail(question, f"{name} {' '.join(map(str, facts.values()))}", error)
        return None
    finally:
        gc.collect()
    spread = harness.Spread.of(samples)
    return {
        "case": name, "median_s": spread.median, "q1_s": spread.q1, "q3_s": spread.q3, "rounds": len(samples), **facts,
        "peak_bytes": torch.cuda.max_memory_allocated() - held if on_gpu else None,
    }  # fmt: skip
