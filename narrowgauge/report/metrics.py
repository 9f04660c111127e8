"""The report's figure and cards for a task's metrics and for padding."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from narrowgauge.diagnose import format_text
from narrowgauge.report import figures
from narrowgauge.report.run_data import Recorded

SCORES = ("accuracy", "mcc", "f1", "f1_binary")  # between -1 and 1, more is better
NAMES = {"mcc": "MCC", "f1": "F1, mean over classes", "f1_binary": "F1 of the second class"}


def unit(recorded: Recorded) -> str:
    """The unit of the loss."""
    return "nats/example" if recorded.run.get("task") == "classification" else "nats/token"


def points(recorded: Recorded, metric: str) -> list[tuple[int, float]]:
    return [(event["step"], float(event[metric])) for event in recorded.of("eval") if metric in event]


def scores(recorded: Recorded) -> list[str]:
    """Names of the scores that evaluations measured."""
    return [metric for metric in SCORES if points(recorded, metric)]


def best(recorded: Recorded) -> tuple[str, int, float] | None:
    """(metric, step, value) of the evaluation whose weights were kept; ties go to the lower loss. None if there is none."""
    metric = recorded.run.get("best") or ""
    sign = -1 if metric == "loss" else 1
    found = [event for event in recorded.of("eval") if metric in event and math.isfinite(event[metric])]
    if not found:
        return None
    kept = max(found, key=lambda event: (sign * event[metric], -event["loss"], -event["step"]))
    return metric, kept["step"], kept[metric]


def figure(recorded: Recorded) -> str:
    """The scores over the steps, else the perplexity; '' if only a loss was measured."""
    shown = scores(recorded) or [metric for metric in ("perplexity",) if points(recorded, metric)]
    if not shown:
        return ""
    curves, others = (
        {NAMES.get(metric, metric): points(each, metric) for metric in shown} if each else {}
        for each in (recorded, recorded.reference)
    )
    return figures.metric_curves(curves, others)


def cards(recorded: Recorded) -> Iterator[dict[str, str]]:
    """The last and best value of the metric that chooses the weights, or of the first score; and padding."""
    kept, shown = best(recorded), scores(recorded)
    metric = kept[0] if kept and kept[0] != "loss" else next(iter(shown), "")
    found = points(recorded, metric)
    if found:
        step, value = found[-1]
        note = f"at step {format_text.count(step)}"
        if kept and kept[0] == metric:
            note += f"; best {kept[2]:.4f} at step {format_text.count(kept[1])}, whose weights are kept"
        yield {"label": NAMES.get(metric, metric), "value": f"{value:.4f}", "unit": "", "note": note}
    yield from padding(recorded)


def padding(recorded: Recorded) -> Iterator[dict[str, str]]:
    """The share of computed positions that were padding, here and with other ways of batching."""
    planned: dict[str, dict[str, Any]] = recorded.data.get("padding") or {}
    shares = {way: waste(each["tokens"], each["positions"]) for way, each in planned.items()}
    steps = [event for event in recorded.of("step") if "positions" in event and "inputs" in event]
    if shares and steps:
        share = waste(sum(event["inputs"] for event in steps), sum(event["positions"] for event in steps))
        ways = (
            ("planned", "planned by length, first epoch"),
            ("shuffled", "in shuffled batches"),
            ("fixed", "in rows of one width"),
        )
        others = ", ".join(f"{format_text.percent(shares[way])} {text}" for way, text in ways if way in shares)
        note = f"of all positions; {others}"
        yield {"label": "Padding", "value": format_text.percent(share), "unit": "", "note": note}


def waste(tokens: int, positions: int) -> float:
    return (positions - tokens) / positions if positions else 0.0
