"""Times cases side by side: interleaved rounds in balanced order, medians, quartiles, and ratios taken round by round.

A machine drifts: clocks change, neighbours come and go. So all cases run in every round, the order is mirrored from round to
round (A B, B A, B A, A B, ...), and cases are compared within a round, where the drift has acted on both. The median of those
ratios with its quartiles is the result; the ratio of two medians is not.

    timings = measure({"bf16": lambda: x @ w, "fp8-row": lambda: mm(x8, w8)}, rounds=20, warmup=3)
    print(table(timings, baseline="bf16"))
    record("mm", rows(timings, baseline="bf16"), RESULTS / "mm.jsonl")

On a GPU each sample begins and ends with a synchronization, and holds as many calls as make that cost small. Caches stay warm:
what is measured is a call that follows itself.
"""

from __future__ import annotations

import gc
import json
import math
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import ROOT, environment

RESULTS = ROOT / "benchmarks" / "results"
Clock = Callable[[Callable[[], object], int], float]


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of some numbers; half of them lie from q1 to q3."""

    median: float
    q1: float
    q3: float

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Spread:
        q1, median, q3 = (
            statistics.quantiles(numbers, n=4, method="inclusive")
            if len(numbers) > 1
            else numbers * 3
        )
        return cls(median, q1, q3)


@dataclass(frozen=True)
class Timing:
    """Seconds per call, one sample per round in the order of the rounds; each sample is the mean of `calls` calls."""

    name: str
    samples_s: tuple[float, ...]
    calls: int

    @property
    def spread_s(self) -> Spread:
        return Spread.of(self.samples_s)

    @property
    def median_s(self) -> float:
        return self.spread_s.median


def measure(
    cases: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int,
    sample_s: float = 0.01,
    clock: Clock | None = None,
) -> dict[str, Timing]:
    """Time each case once per round.

    rounds    even, so that each case comes early as often as late
    warmup    calls of each case before anything is timed; compilation and first allocations belong here
    sample_s  a sample holds as many calls as take about so long, found from the last warm-up call
    clock     seconds per call of so many calls; None: the host's clock, around a synchronization
    """
    clock = clock or host_clock
    if rounds < 2 or rounds % 2 or warmup < 1 or not cases:
        raise ValueError(
            f"measure: needs cases, even rounds and a warm-up; got {len(cases)}, {rounds}, {warmup}."
        )
    calls = {name: _warm(case, warmup, sample_s, clock) for name, case in cases.items()}
    samples: dict[str, list[float]] = {name: [] for name in cases}
    collecting = gc.isenabled()
    gc.disable()  # a collection would fall into whichever case runs when it is due
    try:
        for round in range(rounds):
            for name in order(list(cases), round):
                samples[name].append(clock(cases[name], calls[name]))
    finally:
        if collecting:
            gc.enable()
    return {name: Timing(name, tuple(samples[name]), calls[name]) for name in cases}


def order(names: list[str], round: int) -> list[str]:
    """The names rotated by one every second round, mirrored in odd rounds."""
    shift = (round // 2) % len(names)
    rotated = names[shift:] + names[:shift]
    return rotated[::-1] if round % 2 else rotated


def _warm(case: Callable[[], object], warmup: int, sample_s: float, clock: Clock) -> int:
    """Calls that fit into a sample."""
    for _ in range(warmup - 1):
        case()
    return max(1, math.ceil(sample_s / max(clock(case, 1), 1e-9)))


def host_clock(case: Callable[[], object], calls: int) -> float:
    _synchronize()
    started_at_s = time.perf_counter()
    for _ in range(calls):
        case()
    _synchronize()
    return (time.perf_counter() - started_at_s) / calls


def processor_clock(case: Callable[[], object], calls: int) -> float:
    """As `host_clock`, in seconds of this process on a processor, all of its threads together."""
    started_at_s = time.process_time()
    for _ in range(calls):
        case()
    return (time.process_time() - started_at_s) / calls


def cuda_clock(case: Callable[[], object], calls: int) -> float:
    """As `host_clock`, on the device's own clock: between two events on the current stream."""
    started, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    started.record()
    for _ in range(calls):
        case()
    ended.record()
    ended.synchronize()
    return started.elapsed_time(ended) / 1e3 / calls


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def ratio(timing: Timing, baseline: Timing) -> Spread:
    """Time as a multiple of the baseline's, round by round: below 1 is faster."""
    pairs = zip(timing.samples_s, baseline.samples_s, strict=True)
    return Spread.of([mine / theirs for mine, theirs in pairs])


def rows(timings: Mapping[str, Timing], baseline: str | None = None) -> list[dict[str, Any]]:
    """One record per case, for `record`; `of_baseline` is the ratio's median and quartiles."""
    found = []
    for name, timing in timings.items():
        spread = timing.spread_s
        row = {"case": name, "median_s": spread.median, "q1_s": spread.q1, "q3_s": spread.q3}
        row |= {"rounds": len(timing.samples_s), "calls_per_sample": timing.calls}
        if baseline is not None:
            relative = ratio(timing, timings[baseline])
            row |= {
                "baseline": baseline,
                "of_baseline": [relative.median, relative.q1, relative.q3],
            }
        found.append(row)
    return found


def record(name: str, rows: Iterable[Mapping[str, Any]], path: Path) -> None:
    """Append one JSON line per row, each with the benchmark's name and the whole environment."""
    conditions = environment()
    lines = [json.dumps({"benchmark": name, **row, **conditions}, allow_nan=False) for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(line + "\n" for line in lines))


def table(
    timings: Mapping[str, Timing],
    baseline: str | None = None,
    work: Mapping[str, tuple[float, str]] | None = None,
) -> str:
    """One line per case: time per call with quartiles, multiple of the baseline, and work done per second.

    work  name -> (amount per call, unit), such as (2 * m * n * k, "FLOP") or (bytes read and written, "B")
    """
    lines = [["case", "per call", "half of rounds"]]
    lines[0] += [f"time / {baseline}"] if baseline is not None else []
    lines[0] += ["rate"] if work else []
    for name, timing in timings.items():
        spread = timing.spread_s
        line = [name, seconds(spread.median), f"{seconds(spread.q1)} .. {seconds(spread.q3)}"]
        if baseline is not None:
            relative = ratio(timing, timings[baseline])
            line.append(f"{relative.median:.3f} ({relative.q1:.3f} .. {relative.q3:.3f})")
        if work:
            line.append(rate(*work[name], timing.median_s) if name in work else "")
        lines.append(line)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.ljust, line, widths)).rstrip() for line in lines)


def seconds(duration_s: float) -> str:
    """Four digits and a unit: 1.234 ms."""
    for unit, scale in (("s", 1), ("ms", 1e-3), ("us", 1e-6)):
        if duration_s >= scale:
            return f"{duration_s / scale:.4g} {unit}"
    return f"{duration_s / 1e-9:.4g} ns"


def rate(amount: float, unit: str, duration_s: float) -> str:
    """Work per second with a decimal prefix: 12.3 GFLOP/s."""
    per_second = amount / duration_s
    for prefix, scale in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if per_second >= scale:
            return f"{per_second / scale:.4g} {prefix}{unit}/s"
    return f"{per_second:.4g} {unit}/s"
