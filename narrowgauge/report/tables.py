"""What the report lists row by row: layers, watched tensors with their figures, non-finite readings, the environment.

Each function takes a run as recorded and returns plain rows for page.html.jinja.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

from narrowgauge.description import readings
from narrowgauge.diagnose import format_text
from narrowgauge.diagnose.compare import Event
from narrowgauge.report import figures
from narrowgauge.report.run_data import Recorded

SHOWN_TENSORS = 9  # with both figures; all are in the table
UNGROUPED_ROWS = 12  # a longer table of `describe` is grouped
ROLES = {"x": "input activations", "w": "weights", "gy": "output gradients"}
DESCRIBE_COLUMNS = ("shape", "recipe", "output", "grad_input", "grad_weight", "backend", "note")


def layers(recorded: Recorded) -> list[dict[str, Any]]:
    """The rows of `describe`; where they are many, those alike but for the numbers in their names are put together."""
    rows = recorded.run.get("describe") or []
    groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
    for index, row in enumerate(rows):
        row = {key: str(row.get(key) or "") for key in ("name", *DESCRIBE_COLUMNS)}
        alike = row | {"note": readings.without(row["note"])}
        key = (re.sub(r"\d+", "#", row["name"]), *(alike[column] for column in DESCRIBE_COLUMNS))
        groups.setdefault(key if len(rows) > UNGROUPED_ROWS else (str(index),), []).append(row)
    return [
        {
            "name": group_name([row["name"] for row in group]),
            "shared": group[0] | {"note": readings.spanned([row["note"] for row in group])},
            "rows": group,
        }
        for group in groups.values()
    ]


def switches(recorded: Recorded) -> list[str]:
    """What changed in that table on the way: a sentence for every switch that was reached."""
    return [
        f"Step {format_text.count(event['step'])}: {format_text.plural(event['layers'], 'layer')} went from "
        f"{', '.join(event['before'])} to {', '.join(event['after'])}; "
        "the table is of the end, or of the beginning of a run that was cut short."
        for event in recorded.of("switch")
        if {"layers", "before", "after"} <= event.keys()
    ]


def group_name(names: Sequence[str]) -> str:
    """One name for many: 'layers.0–3.mlp.up' for 'layers.0.mlp.up' to 'layers.3.mlp.up'."""
    if len(names) == 1:
        return names[0]
    parts = [re.split(r"(\d+)", name) for name in names]
    return "".join(
        number_range({int(part) for part in column}) if i % 2 else column[0]
        for i, column in enumerate(zip(*parts, strict=True))
    )


def number_range(numbers: set[int]) -> str:
    """'0–3', '0, 2, 5', or '0…9' where the list would be long."""
    first, last = min(numbers), max(numbers)
    if first == last:
        return str(first)
    if len(numbers) == last - first + 1:
        return f"{first}–{last}"
    return ", ".join(str(n) for n in sorted(numbers)) if len(numbers) <= 4 else f"{first}…{last}"


def tensors(recorded: Recorded) -> list[dict[str, Any]]:
    """Per module, in the order first seen, its watched tensors; those that lost most of their values get figures."""
    watched: dict[str, dict[str, list[Event]]] = {}
    for event in recorded.of("tensor"):
        watched.setdefault(event["module"], {}).setdefault(event["role"], []).append(event)
    modules: list[dict[str, Any]] = [
        {"name": module, "tensors": [tensor_entry(roles[name]) for name in sorted(roles, key=role_order)]}
        for module, roles in watched.items()
    ]
    entries = [entry for module in modules for entry in module["tensors"]]
    for place, entry in enumerate(sorted(entries, key=lambda entry: -entry["loses"])[:SHOWN_TENSORS]):
        entry |= tensor_figures(entry["events"], str(place))
    return modules


def role_order(name: str) -> int:
    return list(ROLES).index(name) if name in ROLES else len(ROLES)


def tensor_entry(events: Sequence[Event]) -> dict[str, Any]:
    """What the table says of one tensor: its last reading, and the worst ones of the run."""
    last = events[-1]
    amax, scale, held = (
        positive(last.get("amax")),
        positive(last.get("scale")),
        figures.RANGES.get(last.get("format", "")),
    )
    headroom = math.log2(scale * held.largest / amax) if held and scale and amax else None
    worst = {key: max((share(event, key) for event in events), default=0.0) for key in ("underflow", "saturated")}
    return {
        "events": events,
        "role": role(last),
        "format": last.get("format", "?"),
        "step": last["step"],
        "amax": last.get("amax"),
        "scale": last.get("scale"),
        "headroom": "–" if headroom is None else format_text.signed(headroom, 2),
        "underflow": last.get("underflow"),
        "saturated": last.get("saturated"),
        "worst_underflow": worst["underflow"],
        "worst_saturated": worst["saturated"],
        "loses": max(worst.values()),
        "range": held,
        "histogram": "",
        "history": "",
    }


def positive(value: float | None) -> float | None:
    """The value if it has a logarithm, else None."""
    return value if value is not None and math.isfinite(value) and value > 0 else None


def share(event: Event, key: str) -> float:
    value = event.get(key)
    return value if value is not None and math.isfinite(value) else 0.0


def tensor_figures(events: Sequence[Event], name: str) -> dict[str, str]:
    """The histogram of the last reading, and amax against the format's limit over the run."""
    last = events[-1]
    held = figures.RANGES.get(last.get("format", ""))
    counted = last.get("histogram") or {"lowest_exponent": 0, "counts": []}
    picture = figures.TensorPicture(
        lowest_exponent=counted["lowest_exponent"],
        counts=counted["counts"],
        scale=positive(last.get("scale")),
        range=held,
    )
    history = figures.History(
        steps=[event["step"] for event in events],
        amax=[positive(event.get("amax")) for event in events],
        scale=[positive(event.get("scale")) for event in events],
        range=held,
    )
    return {
        "histogram": figures.histogram(picture, name) if counted["counts"] else "",
        "history": figures.scale_history(history, name),
    }


def role(event: Event) -> str:
    return ROLES.get(event.get("role", ""), str(event.get("role", "?")))


def nonfinite_readings(recorded: Recorded) -> list[dict[str, Any]]:
    """Per module and role: how many amax readings were not finite, and when."""
    found: dict[tuple[str, str], list[Event]] = {}
    for event in recorded.of("nonfinite_amax"):
        found.setdefault((str(event.get("module", "?")), role(event)), []).append(event)
    return [
        {
            "module": module,
            "role": which,
            "first": events[0]["step"],
            "last": events[-1]["step"],
            "steps": len(events),
            "count": sum(event.get("count", 1) for event in events),
        }
        for (module, which), events in found.items()
    ]


def environment(recorded: Recorded) -> list[tuple[str, str]]:
    """What the run was made with, as label and value; what was not recorded is left out."""
    run = recorded.run
    rows = [
        ("narrowgauge", run.get("narrowgauge")),
        ("PyTorch", run.get("torch")),
        ("Python", run.get("python")),
        ("Device", run.get("device")),
        ("CPU threads", run.get("threads")),
        ("Started", run.get("started_at")),
        ("Seed", run.get("seed")),
        ("Recipe", run.get("recipe")),
        ("Precision of the rest", run.get("precision")),
        ("Parameters", run.get("parameters")),
        *((f"Model: {key.replace('_', ' ')}", value) for key, value in recorded.model.items()),
        *((f"Data: {key.replace('_', ' ')}", value) for key, value in recorded.data.items()),
        ("Tokens per step", run.get("tokens_per_step")),
        ("Steps planned", run.get("steps")),
    ]
    return [(label, plain(value)) for label, value in rows if value is not None and value != []]


def plain(value: Any) -> str:
    """Numbers with separators or four places, the entries of a list as sentences, anything else as it is."""
    if isinstance(value, list):
        return " ".join(map(str, value))
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return (
        f"{value:.4f}" if isinstance(value, float) else format_text.count(value) if abs(value) >= 10000 else str(value)
    )
