"""What the report says of a task's metrics and of padding, both of runs on tables: figures, cards and rows."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from narrowgauge.diagnose import format_text
from narrowgauge.report import figures
from narrowgauge.report.run_data import Recorded

SCORES = ("accuracy", "mcc", "f1", "f1_binary")  # between -1 and 1, more is better
NAMES = {"mcc": "MCC", "f1": "F1, mean over classes", "f1_binary": "F1 of the second class"}
NOT_METRICS = frozenset({"event", "step", "tokens", "elapsed_s"})
SHOWN_EVALUATIONS = 30
WAYS = {
    "fixed": "every row as wide as the longest example",
    "shuffled": "shuffled batches, each as wide as its longest example",
    "planned": "planned by length, first epoch",
}


def label(metric: str) -> str:
    return NAMES.get(metric, metric)


def unit(recorded: Recorded) -> str:
    """Of the loss."""
    return "nats/example" if recorded.run.get("task") == "classification" else "nats/token"


def metrics(recorded: Recorded) -> list[str]:
    """Names of what evaluations measured, the loss first."""
    found = [key for event in recorded.of("eval") for key in event if key not in NOT_METRICS]
    return list(dict.fromkeys(found))


def scores(recorded: Recorded) -> list[str]:
    return [metric for metric in metrics(recorded) if metric in SCORES]


def points(recorded: Recorded, metric: str) -> list[tuple[int, float]]:
    return [(event["step"], float(event[metric])) for event in recorded.of("eval") if metric in event]


def best(recorded: Recorded) -> tuple[str, int, float] | None:
    """(metric, step, value) of the evaluation whose weights were kept; None if the run keeps none."""
    metric = recorded.run.get("best") or ""
    sign = -1 if metric == "loss" else 1
    finite = [point for point in points(recorded, metric) if math.isfinite(point[1])]
    if not finite:
        return None
    step, value = max(finite, key=lambda point: (sign * point[1], -point[0]))
    return metric, step, value


def figure(recorded: Recorded) -> str:
    """The scores over the steps, or the perplexity where there are none; '' where only a loss was measured."""
    shown = scores(recorded) or [metric for metric in metrics(recorded) if metric == "perplexity"]
    if not shown:
        return ""
    lines = {label(metric): points(recorded, metric) for metric in shown}
    reference = recorded.reference
    others = {label(metric): points(reference, metric) for metric in shown} if reference else {}
    return figures.metric_curves(lines, others)


def rows(recorded: Recorded) -> list[dict[str, Any]]:
    """Evaluations with all their metrics, thinned out evenly where they are many; the best one and the last stay."""
    kept = best(recorded)
    events, shown = recorded.of("eval"), metrics(recorded)
    places = set(range(0, len(events), math.ceil(len(events) / SHOWN_EVALUATIONS) or 1)) | {len(events) - 1}
    return [
        {
            "step": event["step"],
            "values": [format_text.loss_value(event[metric]) if metric in event else "–" for metric in shown],
            "best": kept is not None and kept[1] == event["step"],
        }
        for place, event in enumerate(events)
        if place in places or (kept is not None and kept[1] == event["step"])
    ]


def cards(recorded: Recorded) -> Iterator[dict[str, str]]:
    """The last value of the metric that chooses the best weights, or of the first score, and the best one."""
    kept, shown = best(recorded), scores(recorded)
    metric = kept[0] if kept and kept[0] != "loss" else next(iter(shown), "")
    found = points(recorded, metric)
    if found:
        step, value = found[-1]
        note = f"at step {format_text.count(step)}"
        if kept and kept[0] == metric:
            note += f"; best {kept[2]:.4f} at step {format_text.count(kept[1])}, whose weights are kept"
        yield {"label": label(metric), "value": f"{value:.4f}", "unit": "", "note": note}


def padding(recorded: Recorded) -> list[dict[str, Any]]:
    """Positions computed, of them padding, and its share, by way of batching; what the run did is the last row."""
    planned = recorded.data.get("padding") or {}
    found = [
        _waste(words_, planned[way]["tokens"], planned[way]["positions"])
        for way, words_ in WAYS.items()
        if way in planned
    ]
    steps = [event for event in recorded.of("step") if "positions" in event and "inputs" in event]
    if found and steps:
        name = f"measured over {format_text.plural(len(steps), 'step')}"
        found.append(_waste(name, sum(event["inputs"] for event in steps), sum(event["positions"] for event in steps)))
    return found


def _waste(name: str, tokens: int, positions: int) -> dict[str, Any]:
    share = (positions - tokens) / positions if positions else 0.0
    return {"name": name, "positions": positions, "padding": positions - tokens, "share": share}
