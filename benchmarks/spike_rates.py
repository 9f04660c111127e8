"""How often does the rule for loss spikes err on sound runs, and how small a spike does it find? On real curves of loss and gradient norm.

    python -m benchmarks.spike_rates --data shakespeare.txt                  trains 8 small Llamas, 1,000 steps each: 3 minutes of one core
    python -m benchmarks.spike_rates --data shakespeare.txt RUN RUN ...      folders of finished runs beside them

False alarms are events on the curves as they are. Then spikes are planted at 40 places of each curve: so many nats on the loss, over
one step or five, with the gradient norm as it was or ten times as large; found is an event at one of these steps.
"""

from __future__ import annotations

import argparse
import itertools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.guard_planted import SETTINGS, Run, batches, build
from benchmarks.harness import RESULTS, record
from narrowgauge.diagnose import runs
from narrowgauge.diagnose.spikes import LEAST, NORMAL, Spikes

Curve = list[tuple[float, float]]  # loss and gradient norm of each step
STEPS = 1000
TRAINED = [
    {"batch": batch, "rate": rate, "recipe": recipe}
    for batch in (2, 16)
    for rate in (1e-3, 1e-2)
    for recipe in ("bf16", "fp8-current")
]
HEIGHTS = (0.1, 0.25, 0.5, 1.0, 2.0)  # nats


def main() -> None:
    options = _options()
    curves = {
        " ".join(f"{key}={value}" for key, value in changes.items()): changes for changes in TRAINED
    }
    rows = []
    for name, changes in curves.items():
        rows.append(show(name, trained(options.data, options.steps, **changes)))
    for folder in options.runs:
        rows.append(show(folder.name, read(folder)))
    judged = sum(row["judged"] for row in rows)
    total = {
        "curve": "all",
        "judged": judged,
        "false_alarms": sum(row["false_alarms"] for row in rows),
    }
    print(total)
    record("spike_rates", [*rows, total], options.results)


def trained(data: Path, steps: int, *, batch: int, rate: float, recipe: str) -> Curve:
    import torch

    from benchmarks.planted_faults import plant

    torch.manual_seed(0)
    text = torch.frombuffer(bytearray(data.read_bytes()), dtype=torch.uint8).long()
    sizes = SETTINGS | {"batch": batch, "rate": rate}
    model = build(sizes)
    if recipe != "bf16":
        plant(model, recipe)
    run = Run(model, rate, sizes["warmup"], steps)
    losses = [float(run.step(ids)) for ids in batches(text, 0, steps, sizes)]
    return list(zip(losses, run.norms, strict=True))


def read(folder: Path) -> Curve:
    events = runs.read_metrics(folder / "metrics.jsonl")
    return [
        (event["loss"], event["grad_norm"])
        for event in events
        if event["event"] == "step" and "grad_norm" in event
    ]


def show(name: str, curve: Curve) -> dict[str, Any]:
    """A row: false alarms, the scale of the loss, and the share of planted spikes that were found."""
    watch = Spikes()
    false = [step for step, point in enumerate(curve, 1) if watch.add(step, *point)]
    losses = [loss for loss, _ in curve]
    steps = [abs(new - old) / math.sqrt(2) for old, new in itertools.pairwise(losses)]
    found = {
        f"{height} nats, {length} steps, norm x {factor}": share(curve, height, length, factor)
        for height in HEIGHTS
        for length in (1, 5)
        for factor in (1, 10)
    }
    row = {
        "curve": name,
        "judged": len(curve) - LEAST,
        "false_alarms": len(false),
        "scale": NORMAL * statistics.median(steps),
    }
    print(row | {key: value for key, value in found.items() if "5 steps" in key}, flush=True)
    return row | {"found": found}


def share(curve: Curve, height: float, length: int, factor: float) -> float:
    """The share of spikes, planted one at a time at 40 places, that are an event at one of their steps."""
    places = [LEAST + (len(curve) - LEAST - length) * i // 40 for i in range(40)]
    return statistics.fmean(planted(curve, place, height, length, factor) for place in places)


def planted(
    curve: Sequence[tuple[float, float]], place: int, height: float, length: int, factor: float
) -> bool:
    watch, first = Spikes(), max(place - 100, 0)
    for step, point in enumerate(curve[first:place]):
        watch.add(step, *point)
    spike = [(loss + height, norm * factor) for loss, norm in curve[place : place + length]]
    return any([watch.add(place + step, *point) is not None for step, point in enumerate(spike)])


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks.spike_rates", description=__doc__.splitlines()[0]
    )  # type: ignore[union-attr]
    parser.add_argument("runs", nargs="*", type=Path, help="folders that narrowgauge train wrote")
    parser.add_argument("--data", type=Path, required=True, help="any text file")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--results", type=Path, default=RESULTS / "spike_rates.jsonl")
    return parser.parse_args()


if __name__ == "__main__":
    main()
