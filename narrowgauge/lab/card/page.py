"""The page of `card-report --read`: what failed first, then checks and timings beside the predictions.

`narrowgauge plan` and `recipe="auto"` make the predictions (`plan`, `conversion.predict`), when the
page is written. They hold for eager code of narrowgauge, on cards of the table `ops.timing.cards`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from narrowgauge.conversion.measure import LinearWorkload
from narrowgauge.conversion.predict import likely_gain, predicted
from narrowgauge.errors import ConfigError
from narrowgauge.lab.card import contenders, contents, steps
from narrowgauge.lab.card.process import (
    CULPRITS,
    LEFT_OUT,
    PASS,
    REFUSED,
    STATUSES,
)
from narrowgauge.ops.timing.cards import Card, of_device
from narrowgauge.plan.functions import plan
from narrowgauge.plan.roofline import time
from narrowgauge.report import template

if TYPE_CHECKING:
    from narrowgauge.lab.card.archive import Report

Line = Mapping[str, Any]
MOST_LAYERS = 8  # of a step that is predicted; a report has `steps.LAYERS`
KINDS = {PASS: "good", REFUSED: "open", LEFT_OUT: "open"}  # classes of the notice


def write(report: Report, path: Path) -> Path:
    """Write the page of a report to `path` and return it. Takes seconds for the predictions.

    Raises ConfigError if a fact or a line has other types than those that a report writes. Any
    other exception is an error of this page, and none of the archive.
    """
    contents.refuse(report)
    return template.write(path, "lab/card/page.html.jinja", page(report))


def page(report: Report) -> dict[str, Any]:
    """Variables of the template."""
    known = of_device(str(report.facts.get("card", {}).get("name", "")))
    return {
        "card": report.facts.get("card", {}), "versions": report.facts.get("versions", {}), "facts": report.facts,
        "notice": notice(report), "conditions": conditions(report.lines), "known": known is not None,
        "culprits": [row(line) for line in report.lines if line["status"] in CULPRITS],
        "checks": checks(report.lines), "refused": [row(line) for line in report.lines if line["status"] not in (PASS, *CULPRITS)],
        "rates": [line for line in report.lines if line["part"] == "rates" and line["status"] == PASS],
        "linears": linears(report.lines, known), "layers": whole(report.lines, "layer", known),
        "steps": whole(report.lines, "step", known),
        "optimizers": [
            {**row(line), "ms": ms(line.get("median_s")), "bytes": f"{line['state_bytes'] / line['parameters']:.2f}"}
            for line in report.lines if line["part"] == "optimizer" and "median_s" in line
        ],
        "communication": [
            {
                **row(line), "hidden": f"{100 * line['hidden']:.0f} %",
                "times": [ms(line[key]) for key in ("compute_s", "communication_s", "both_s")],
            }
            for line in report.lines if line["part"] == "communication" and "hidden" in line
        ],
    }  # fmt: skip


def notice(report: Report) -> dict[str, str]:
    """The first sentence of the page: what failed, or that nothing did."""
    counts = Counter(line["status"] for line in report.lines)
    # A refusal is an answer, not a failure: it has a row further below.
    bad = sum(counts[status] for status in CULPRITS)
    words = ", ".join(f"{counts[status]} {status}" for status in STATUSES if counts[status])
    ended = report.facts.get("ended", "")
    more = "" if ended == "finished" else f"The report did not finish: {ended}."
    if bad:
        names = [str(line["job"]) for line in report.lines if line["status"] in CULPRITS]
        text = f" {words}. The first: {names[0]}."
        return {"kind": "bad", "heading": f"{bad} process{'es' if bad > 1 else ''} failed.", "text": text, "more": more}  # fmt: skip
    kind = "good" if not more else "warn"
    return {"kind": kind, "heading": "No process failed.", "text": f" {words}.", "more": more}


def row(line: Line) -> dict[str, Any]:
    """Texts of a line that every table uses."""
    clocks = [line[key] for key in ("sm_mhz", "temperature_c", "power_w") if line.get(key)]
    units = ("MHz", "°C", "W")
    return {
        "job": line["job"], "status": line["status"], "why": line.get("why", ""), "at": line.get("at", ""),
        "seconds": line.get("seconds", 0.0), "output": line.get("output", ""),
        "clocks": ", ".join(f"{value:.0f} {unit}" for value, unit in zip(clocks, units, strict=False)),
        "kernels": [f"{each['count']} × {each['name']}" for each in line.get("kernels", [])[:8]],
        "backend": "; ".join(dict.fromkeys(line.get("backend", []))),
    }  # fmt: skip


def conditions(lines: list[dict[str, Any]]) -> str:
    """Driver, and the range of temperatures and clocks over the report."""
    drivers = ", ".join(sorted({str(line["driver"]) for line in lines if line.get("driver")}))
    words = [f"driver {drivers}" if drivers else "nvidia-smi could not be asked"]
    for key, unit in (("sm_mhz", "MHz"), ("temperature_c", "°C"), ("power_w", "W")):
        if values := [line[key] for line in lines if isinstance(line.get(key), float)]:
            words.append(f"{min(values):.0f} to {max(values):.0f} {unit}")
    return ", ".join(words)


def checks(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each operator and kernel: how many forms ended how."""
    found: dict[str, Counter[str]] = {}
    for line in lines:
        if line["part"] == "checks":
            name = str(line["job"]).partition(":")[0]
            found.setdefault(name, Counter())[line["status"]] += 1
    return [
        {"name": name, "forms": sum(counts.values()), "words": ", ".join(f"{counts[each]} {each}" for each in STATUSES if counts[each]),
         "good": not any(counts[each] for each in CULPRITS)}
        for name, counts in found.items()
    ]  # fmt: skip


def linears(lines: list[dict[str, Any]], card: Card | None) -> list[dict[str, Any]]:
    """Linears by shape: milliseconds, speedup over BF16, and both as predicted."""
    found = []
    for line in lines:
        if line["part"] != "linear" or "median_s" not in line:
            continue
        given = line["arguments"]
        shape = {key: int(given[key]) for key in ("tokens", "inputs", "outputs")}
        same = [
            each for each in lines
            if each["part"] == "linear" and "median_s" in each and all(each["arguments"].get(key) == value for key, value in shape.items())
        ]  # fmt: skip
        flop = 6.0 * shape["tokens"] * shape["inputs"] * shape["outputs"]
        predict = partial(_linear, card, tuple(shape.values()))
        found.append(
            row(line) | _beside_bf16(line, same, predict, "layer")
            | {"teraflops": f"{flop / line['median_s'] / 1e12:.0f}", "error": f"{line.get('error_db', 0.0):.1f}"}
        )  # fmt: skip
    return found


def whole(lines: list[dict[str, Any]], part: str, card: Card | None) -> list[dict[str, Any]]:
    """Layers or steps: the same, with the parts of a step and its memory."""
    found = []
    for line in lines:
        if line["part"] == part and "median_s" in line:
            compiled = line["arguments"]["compiled"]
            same = [
                each for each in lines
                if each["part"] == part and "median_s" in each and each["arguments"]["compiled"] == compiled
            ]  # fmt: skip
            given = line["arguments"].get("sizes") or {}
            predict = partial(_step, None if compiled else card, part, tuple(sorted(given.items())))
            parts = ", ".join(
                f"{name} {ms(each)}" for name, each in line.get("parts_s", {}).items()
            )
            peak = f"{line['peak_bytes'] / 2**30:.1f}" if "peak_bytes" in line else "–"
            found.append(
                row(line)
                | _beside_bf16(line, same, predict, "step")
                | {"parts": parts, "peak": peak}
            )
    return found


def _beside_bf16(
    line: Line, same: list[dict[str, Any]], predict: Callable[[str], float | None], of: str
) -> dict[str, str]:
    """Time and speedup over BF16's first timing, measured and predicted; of: see `likely_gain`."""
    name = str(line["arguments"]["contender"])
    plain = [each["median_s"] for each in same if each["arguments"]["contender"] == contenders.BF16]  # fmt: skip
    own, bf16 = predict(name), predict(contenders.BF16)
    return {
        "contender": name, "ms": ms(line["median_s"]), "speedup": ratio(plain[0] if plain else None, line["median_s"]),
        "predicted_ms": ms(own), "predicted": likely(bf16, own, of), "off": percent(own, line["median_s"]),
    }  # fmt: skip


# --- predictions ---

# Traced once for each contender: BF16 stands beside every line.
_KNOWN: dict[Any, float | None] = {}


def _linear(card: Card | None, shape: tuple[int, ...], name: str) -> float | None:
    """Predicted seconds of a Linear; None for other libraries and unknown cards."""
    if card is None or name in (*contenders.TORCHAO, *contenders.ENGINE):
        return None
    key = card.name, shape, name
    if key not in _KNOWN:
        workload = LinearWorkload(tokens=shape[0], inputs=shape[1], outputs=shape[2], dtype=torch.bfloat16)  # fmt: skip
        try:
            _KNOWN[key] = predicted(workload, [name], card)[name]
        # A card without a unit for the recipe has no prediction, but may have been measured.
        except ConfigError:  # the card's units cannot multiply it
            _KNOWN[key] = None
    return _KNOWN[key]


def _step(
    card: Card | None, part: str, given: tuple[tuple[str, int], ...], name: str
) -> float | None:
    """Predicted seconds of an eager layer or step."""
    if card is None or name in (*contenders.TORCHAO, *contenders.ENGINE):
        return None
    # Traced for as long as its sizes say, which a stranger's archive may name.
    if dict(given).get("layers", 0) > MOST_LAYERS:
        return None
    key = card.name, part, given, name
    if key not in _KNOWN:
        _KNOWN[key] = _counted_step(card, part, steps.Sizes(**dict(given)), name)
    return _KNOWN[key]


def _counted_step(card: Card, part: str, sizes: steps.Sizes, name: str) -> float | None:
    """Seconds of a step that `ng.plan` traces; of a layer its forward and backward."""
    tokens = sizes.rows * sizes.length

    def model() -> torch.nn.Module:
        made = steps.Llama(sizes) if part == "step" else steps.AloneBlock(sizes)
        return contenders.model(name, made.to(torch.bfloat16), tokens)

    batch = (
        torch.zeros(sizes.rows, sizes.length, dtype=torch.int64)
        if part == "step"
        else torch.zeros(sizes.rows, sizes.length, sizes.hidden, dtype=torch.bfloat16)
    )
    key = next((key for key in _card_names(card)), "")
    try:
        found = plan(
            model, lambda made, x: made(x).sum(), lambda made: torch.optim.AdamW(made.parameters(), fused=True), batch, card=key
        )  # fmt: skip
        predicted_time = time(found.forecast.work, card)
    except ConfigError:
        return None
    # The update of a layer's weights is traced with it, and is no part of its measurement.
    by_phase = predicted_time.by_phase
    if part == "layer":
        return by_phase["forward"] + by_phase["backward"]
    return predicted_time.seconds


def _card_names(card: Card) -> list[str]:
    from narrowgauge.ops.timing.cards import CARDS

    return [key for key, each in CARDS.items() if each is card]


# --- words ---


def ms(seconds: float | None) -> str:
    return "–" if seconds is None else f"{1e3 * seconds:.3f}"


def ratio(plain: float | None, own: float | None) -> str:
    return "–" if not plain or not own else f"{plain / own:.2f}"


def likely(plain: float | None, own: float | None, of: str) -> str:
    return "–" if not plain or not own else likely_gain(plain, own, of)


def percent(predicted_s: float | None, measured_s: float) -> str:
    """Error of the prediction relative to the measurement, in percent."""
    return "–" if predicted_s is None else f"{100 * (predicted_s / measured_s - 1):+.0f} %"
