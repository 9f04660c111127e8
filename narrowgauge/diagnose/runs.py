"""Reads the files of a run folder: run.json and metrics.jsonl (see docs/architecture.md)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from narrowgauge.errors import ConfigError

NOT_FINITE = {"NaN": float("nan"), "Infinity": float("inf"), "-Infinity": float("-inf")}


def read_run(path: Path) -> dict[str, Any]:
    """The contents of run.json."""
    try:
        return restored(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"runs: cannot read {path}: {error}. Name a folder that `narrowgauge train` wrote."
        ) from error


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The events of metrics.jsonl, in the order written; the last one of each (event, step, module, role) counts."""
    kept: dict[tuple[Any, ...], dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            event = restored(json.loads(line))
        except ValueError:
            continue
        key = (event["event"], event["step"], event.get("module"), event.get("role"))
        kept.pop(key, None)
        kept[key] = event
    return list(kept.values())


def restored(value: Any, key: str = "") -> Any:
    """`value` with the strings that stand for non-finite numbers turned back into numbers; text stays text."""
    if isinstance(value, dict):
        return {name: restored(inner, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [restored(inner, key) for inner in value]
    if isinstance(value, str) and key not in ("text", "prompt"):
        return NOT_FINITE.get(value, value)
    return value
