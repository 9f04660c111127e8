"""Read a run folder: the run, and the reference inside it if there is one."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowgauge.diagnose import format_text, left_out, lineage
from narrowgauge.diagnose.runs import read_metrics, read_run
from narrowgauge.errors import ConfigError
from narrowgauge.storage import reading

if TYPE_CHECKING:
    from narrowgauge.diagnose.compare import Event

CONFIG = reading.Kind(
    most_bytes=reading.MIB, step="Restore a copy of it, or remove it: the page does without."
)


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """Contents of a run folder."""

    folder: Path
    run: dict[str, Any]
    events: list[Event]
    config: str  # text of config.toml; '' if there is none
    reference: Recorded | None = None
    label: str = ""  # prefix of the run's name on the page
    broken_reference: str | None = None  # name of a compare-* folder without a readable run

    def of(self, kind: str) -> list[Event]:
        """Events of one kind, sorted by step."""
        return sorted(
            (event for event in self.events if event["event"] == kind),
            key=lambda event: event["step"],
        )

    @property
    def name(self) -> str:
        """Name of this run on the page."""
        recipe = str(self.run.get("recipe") or "this run")
        if recipe == "none":
            in_float32 = " in float32" if self.run.get("precision") == "fp32" else ""
            recipe = (
                f"no recipe{in_float32}" if self.run.get("fused") else f"plain torch{in_float32}"
            )
        if recipe == "auto" and isinstance(chosen := self.run.get("auto"), dict):
            recipe = f"auto ({', '.join(sorted({str(each) for each in chosen.values()}))})"
        return (
            self.label
            + recipe
            + format_text.elsewhere(
                self.run.get("recipes") or {},
                str(self.run.get("embedding_codes") or ""),
                str(self.run.get("attention") or ""),
            )
        )

    @property
    def alone_fused(self) -> bool:
        """True if this run has fused kernels and its reference has none: its gain is of both."""
        return bool(
            self.run.get("fused") and self.reference and not self.reference.run.get("fused")
        )

    @property
    def model(self) -> dict[str, Any]:
        return self.run.get("model") or {}

    @property
    def data(self) -> dict[str, Any]:
        return self.run.get("data") or {}

    @property
    def left_out(self) -> tuple[int, ...]:
        """Batches that the run skipped."""
        return left_out.of_run(self.run, self.events)

    @property
    def narrow_share(self) -> float | None:
        """Share of its matrix-product operations in low precision; None if not counted."""
        return lineage.narrow_share(self.run)

    @property
    def last_step(self) -> int:
        return max((event["step"] for event in self.events if event["event"] == "step"), default=0)


def read(folder: Path) -> Recorded:
    """Read the run in `folder` and its reference.

    The reference is the run in a compare-* folder inside, else the parent of a branch, else None.
    """
    if not os.path.lexists(folder / "run.json"):
        what = "has no run.json" if folder.is_dir() else "is not a folder"
        raise ConfigError(
            f"report: {folder} {what}. Name the folder that `narrowgauge train` wrote, the one with run.json in it.",
            code="report.no-run" if folder.is_dir() else "report.no-folder",
        )
    reference, broken = None, None
    # The first readable reference is used; the page mentions a broken one.
    for inner in sorted(folder.glob("compare-*")):
        try:
            reference = read_alone(inner)
            break
        except ConfigError:
            broken = broken or inner.name
    own = read_alone(folder)
    parent = (
        lineage.parent_of(lineage.Member(folder=folder, run=own.run, events=own.events))
        if reference is None
        else None
    )
    if parent is not None:
        reference = replace(read_alone(parent), label="parent: ")
    return replace(own, reference=reference, broken_reference=broken)


def read_alone(folder: Path) -> Recorded:
    """Read one run folder; metrics.jsonl and config.toml may be missing."""
    metrics, config = folder / "metrics.jsonl", folder / "config.toml"
    return Recorded(
        folder=folder,
        run=read_run(folder / "run.json"),
        events=read_metrics(metrics),
        config=reading.text_of(config, CONFIG, errors="replace") if os.path.lexists(config) else "",
    )


def last_done(recorded: Recorded) -> Event | None:
    """The `done` event; None if the run has none or was resumed after it."""
    order = [event for event in recorded.events if event["event"] in ("step", "resume", "done")]
    # A run that was resumed after its end has `step` or `resume` events behind `done`.
    done = next((event for event in reversed(order) if event["event"] == "done"), None)
    if done is None or any(event["event"] == "resume" for event in order[order.index(done) :]):
        return None
    return done if done["step"] >= recorded.last_step else None
