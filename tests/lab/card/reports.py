"""Reports over the played card: their jobs, and one failure at a place."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from narrowgauge.lab import card
from narrowgauge.lab.card.process import CardJob
from narrowgauge.lab.card.runner import Line

# Ten places where a kernel can fail: (operator, kernel, number of the form, stage), and a timing.
PLACES: tuple[tuple[str, str, int, str], ...] = (
    ("quantize_pair", "triton", 2, "full grid"),
    ("mm", "native", 0, "self-check"),
    ("quantize_precast", "triton", 1, "self-check"),
    ("quantize", "triton", 4, "full grid"),
    ("optim", "triton", 0, "full grid"),
    ("rotary", "triton", 0, "self-check"),
    ("rotate_and_encode", "triton", 0, "full grid"),
    ("norm_act", "triton", 1, "self-check"),
    ("norm_act_backward", "triton", 0, "full grid"),
    ("linear", "fp8-current", 0, "first step"),
)
CULPRIT = {"fault": "fault", "crash": "fault", "hang": "hang", "wrong": "wrong", "refused": "refused"}  # fmt: skip
MACHINE = CardJob(name="machine", part="machine", run="tests.lab.card.stand_in:machine", limit_s=60.0, alone=True)  # fmt: skip


def job(place: int, failure: str = "", limit_s: float = 60.0) -> CardJob:
    """The job at a place, which fails if told so."""
    op, kernel, number, at = PLACES[place]
    if op == "linear":
        sizes = {"tokens": 64, "inputs": 32, "outputs": 48, "contender": kernel, "device": "cpu"}
        run, arguments, part = "linear", sizes, "linear"
    else:
        run, part = "check", "checks"
        arguments = {"op": op, "kernel": kernel, "number": number, "device": "cpu"}
    played: dict[str, Any] = {"run": run, "arguments": arguments, "failure": failure, "at": at}
    return CardJob(
        name=f"{op}, {kernel}: {number}", part=part, run="tests.lab.card.stand_in:played", limit_s=limit_s, arguments=played
    )  # fmt: skip


def report(folder: Path, jobs: Sequence[CardJob], **settings: Any) -> tuple[Path, list[Line]]:
    """A whole report with these jobs."""
    given: dict[str, Any] = {"workers": 1, "device": "cpu", "machine": MACHINE, "minutes": 10.0, **settings}  # fmt: skip
    return card.report(
        folder / "report.zip", card.CardSettings(**given), lambda line: None, lambda *_: list(jobs)
    )
