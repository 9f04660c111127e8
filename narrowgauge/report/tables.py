"""Lists of the report: layers, watched tensors and notable events, ready for the template."""

from __future__ import annotations

import math
import re
from collections import Counter
from typing import TYPE_CHECKING, Any

from narrowgauge.diagnose import format_text
from narrowgauge.diagnose.verdict import GUARD, WORSE, outcome_of
from narrowgauge.report import figures

if TYPE_CHECKING:
    from narrowgauge.diagnose.compare import Event
    from narrowgauge.report.run_data import Recorded

SHOWN_TENSORS = 9
ROLES = {"x": "input activations", "w": "weights", "gy": "output gradients"}
DESCRIBE_COLUMNS = ("shape", "recipe", "output", "grad_input", "grad_weight", "backend", "sends")


def layers(recorded: Recorded) -> list[dict[str, Any]]:
    """Rows of `describe`, merged where only name and note differ.

    names  pattern ("layers.*.mlp.up") -> number of layers
    notes  note -> names of the layers that have it
    """
    groups: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in recorded.run.get("describe") or []:
        name, note, *columns = (
            str(row.get(key) or "") for key in ("name", "note", *DESCRIBE_COLUMNS)
        )
        new = {"names": Counter(), "columns": tuple(columns), "notes": {}}
        group = groups.setdefault(tuple(columns), new)
        # Numbers in names become *, so that equal layers of all blocks share a row.
        group["names"][re.sub(r"\b\d+\b", "*", name)] += 1
        group["notes"].setdefault(note, []).append(name)
    return list(groups.values())


def tensors(recorded: Recorded) -> tuple[int, dict[str, list[dict[str, Any]]]]:
    """(number of watched tensors, module -> its tensors to show).

    Shows the SHOWN_TENSORS tensors with the largest share of values lost to underflow or
    saturation.
    """
    watched: dict[tuple[str, str], list[Event]] = {}
    for event in recorded.of("tensor"):
        watched.setdefault((event["module"], event["role"]), []).append(event)
    lost = {
        key: max(worst_share(watched[key], loss) for loss in ("underflow", "saturated"))
        for key in watched
    }
    worst = sorted(watched, key=lambda key: -lost[key])
    shown: dict[str, list[dict[str, Any]]] = {}
    for module, role in watched:  # in the order of the readings
        if (module, role) in worst[:SHOWN_TENSORS]:
            name = str(worst.index((module, role)))
            shown.setdefault(module, []).append(tensor(watched[module, role], name))
    return len(watched), shown


def tensor(events: list[Event], name: str) -> dict[str, Any]:
    """One tensor: its last reading, its worst shares of the run, and its figures."""
    last = events[-1]
    return {
        "role": role(last),
        "format": last.get("format", "?"),
        "is_known": figures.format_of(last) is not None,
        "step": last["step"],
        "facts": [
            ("become zero", *shares(events, "underflow")),
            ("saturate", *shares(events, "saturated")),
            ("largest |x|", format_text.magnitude(last.get("amax")), ""),
            ("scale", format_text.magnitude(last.get("scale")), ""),
        ],
        "histogram": figures.histogram(last, name),
        # One reading is in the facts above.
        "history": figures.scale_history(events, name) if len(events) > 1 else "",
    }


def shares(events: list[Event], key: str) -> tuple[str, str]:
    """Share at the last reading, and the largest share of all readings if it differs."""
    last, worst = (
        format_text.percent(events[-1].get(key)),
        format_text.percent(worst_share(events, key)),
    )
    return last, f"worst {worst}" if worst != last and last != "–" else ""


def worst_share(events: list[Event], key: str) -> float:
    found = [event.get(key) for event in events]
    return max(
        (share for share in found if share is not None and math.isfinite(share)), default=0.0
    )


def role(event: Event) -> str:
    return ROLES.get(event.get("role", ""), str(event.get("role", "?")))


def happenings(recorded: Recorded) -> list[str]:
    """Sentences on notable events, sorted by step.

    Covers switches, resumptions, spikes, alarms, blame, idle GPU time and non-finite amax.
    """
    found = []
    for event in recorded.of("switch"):
        if {"layers", "before", "after"} <= event.keys():
            what = f"{', '.join(event['before'])} to {', '.join(event['after'])}"
            found.append(
                (event["step"], f"{format_text.plural(event['layers'], 'layer')} went from {what}.")
            )
    for event in recorded.of("resume"):
        skipped = ", ".join(event.get("skipped") or [])
        text = f"The run resumed from {event.get('path') or 'its beginning'}."
        found.append((event["step"], text + f" Passed over as corrupt: {skipped}." * bool(skipped)))
    found += [
        (event["step"], event["sentence"]) for event in recorded.of("spike") if "sentence" in event
    ]
    found += [
        (event["step"], f"Alarm of the guard. {event['sentence']}")
        for event in recorded.of("guard")
        if outcome_of(GUARD, event) == WORSE
    ]
    for event in recorded.of("rewind"):
        if event.get("why") == "guard":
            last = format_text.count(event["step"] + event["steps"])
            found.append((event["step"], f"The steps from here to {last} are those of BF16."))
    found += [(event["step"], blamed(event)) for event in recorded.of("blame")]
    for event in recorded.of("launches"):
        if {"words", "advice"} <= event.keys():
            found.append((event["step"], " ".join([f"{event['words']}.", *event["advice"]])))
    nonfinite: dict[str, list[Event]] = {}
    for event in recorded.of("nonfinite_amax"):
        nonfinite.setdefault(f"{role(event)} of {event.get('module', '?')}", []).append(event)
    for where, events in nonfinite.items():
        # The counter is cumulative.
        count = format_text.plural(max(event.get("count", 1) for event in events), "reading")
        until = (
            f", the last at step {format_text.count(events[-1]['step'])}" if len(events) > 1 else ""
        )
        text = f"An amax of the {where} was not finite ({count}{until}) and was kept out of the amax history."
        found.append((events[0]["step"], text))
    return [f"Step {format_text.count(step)}: {text}" for step, text in sorted(found)]


def blamed(event: Event) -> str:
    """Sentence on the suspect GEMMs of a step, and the setting that runs them in 16 bits."""
    if not event.get("suspects"):
        return "No product is suspect."
    said = f"{format_text.plural(len(event['suspects']), 'product')} suspect: {', '.join(event['suspects'])}."
    entries = ", ".join(f'"{entry}"' for entry in event.get("recipes") or ())
    return f"{said} In 16 bits with recipe.layers = [{entries}]." if entries else said
