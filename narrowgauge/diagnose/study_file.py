"""study.json: the runs of a study, as `narrowgauge study` writes it and the report reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from narrowgauge.diagnose import forms
from narrowgauge.diagnose.seeds import Margin
from narrowgauge.errors import ConfigError
from narrowgauge.storage import reading

NAME = "study.json"


def _refuse_margin(value: Any) -> str:
    try:
        Margin.parse(value)
    except (ConfigError, TypeError) as error:
        return f" = {forms.shown(value)}: {error}"
    return ""


def _named(form: forms.Form) -> forms.Form:
    """A list that is not empty."""
    listed = forms.listed(form)
    return lambda value: listed(value) or ("" if value else " is empty: it names no runs")


KIND = reading.Kind(
    most_bytes=64 * reading.MIB,
    step="Restore a copy of it, or choose another --output.",
    form=forms.record(
        {"recipes": _named(forms.text), "seeds": _named(forms.number(0, whole=True)), "metric": forms.text, "margin": _refuse_margin},
        {
            "control": forms.one_of(True, False),
            "threads": forms.number(0, whole=True), "identity": forms.table(forms.text), "margins": forms.listed(forms.text),
            "looks": forms.listed(forms.number(0, whole=True)), "failed": forms.table(forms.text), "steps": forms.number(0, whole=True),
        },
    ),
)  # fmt: skip


def read(folder: Path) -> dict[str, Any]:
    """Facts of a study. Raises ConfigError if the file is missing or damaged."""
    return dict(reading.json_of(folder / NAME, KIND))
