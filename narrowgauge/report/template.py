"""Render a page of sections: one skeleton (base.html.jinja), one set of parts (parts.html.jinja).

A page is a template that extends "base.html.jinja" and imports "parts.html.jinja". The file that is
written is complete in itself: the styles are inside, nothing is fetched, and no script runs.

The notice and the colour of a verdict are the same on every page. page.css names the colours:

    worse         "bad"
    better        "below"
    equivalent    "same"; "open" if a claim of no difference has no positive control behind it
    unknown       "open"; "warn" if these runs could not have shown a difference
"""

from __future__ import annotations

import importlib.resources
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from narrowgauge import storage
from narrowgauge.diagnose import format_text
from narrowgauge.diagnose.verdict import (
    BETTER,
    EQUIVALENT,
    NOT_SENSITIVE,
    NOT_WORSE,
    UNKNOWN,
    WORSE,
    Verdict,
)
from narrowgauge.errors import ConfigError

GENERATOR = b'<meta name="generator" content="narrowgauge">'  # as in base.html.jinja


def write(path: Path, page: str, variables: Mapping[str, Any]) -> Path:
    """Render a page into the file `path`, in a folder that may be new, and return it.

    Raises StorageError if it cannot be written.

    page  "folder/name" of the template: "report/page.html.jinja", "lab/ladder.html.jinja"
    """
    text = environment().get_template(page).render(variables)
    with storage.refusals("write a page in", path.parent):
        storage.make_folder(path.parent)
    # errors="replace": a sample may hold a lone surrogate.
    storage.replace_file(path, text.encode("utf-8", errors="replace"), "make the folder writable")
    return path


def refuse_other_file(path: Path) -> None:
    """Raises ConfigError if something is at `path` that `write` did not write."""
    if os.path.lexists(path) and not _is_own(path):
        raise ConfigError(
            f"output: {path} is there already, and is no page that narrowgauge wrote. Name another place by --output, or remove it.",
            code="report.other-file",
        )


def _is_own(path: Path) -> bool:
    try:
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return GENERATOR in file.read(4096)
    except OSError:
        return False


def environment() -> jinja2.Environment:
    """Jinja environment of all pages: strict, escaped, with the styles as variables."""
    # Autoescape, because samples and names are user text; StrictUndefined, so that a misspelt
    # variable raises an error and is not rendered as ''.
    found = jinja2.Environment(
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        loader=jinja2.FunctionLoader(read),
    )
    spellings = (
        format_text.count,
        format_text.rounded,
        format_text.plural,
        format_text.duration,
    )
    for spelled in spellings:
        found.filters[spelled.__name__] = spelled
    found.globals["style"] = read("report/page.css")
    found.globals["series_style"] = read("report/series.css")
    return found


def read(name: str) -> str:
    """Text of a file of the package, such as "report/page.css"."""
    # importlib.resources, because an installed package may be a zip file.
    return importlib.resources.files("narrowgauge").joinpath(name).read_text(encoding="utf-8")


VERDICT_KINDS = {WORSE: "bad", BETTER: "below", EQUIVALENT: "same", UNKNOWN: "open"}
KINDS_OF_DETAIL = {NOT_SENSITIVE: "warn", NOT_WORSE: "same"}


def verdict_kind(verdict: Verdict) -> str:
    """CSS class of the verdict's colour."""
    return KINDS_OF_DETAIL.get(verdict.detail, VERDICT_KINDS[verdict.outcome])


def notice(verdict: Verdict, subject: str = "", *, is_checked: bool = True) -> dict[str, str]:
    """Variables of the notice in parts.html.jinja.

    subject     what is judged, such as the name of a recipe; '' if the page says so
    is_checked  False: no positive control backs a claim of no difference, so it is not green
    """
    return {
        "kind": verdict_kind(verdict) if is_checked else VERDICT_KINDS[UNKNOWN],
        "heading": ": ".join(filter(None, (subject, verdict.heading))),
        "text": verdict.sentence,
        "more": verdict.beside,
    }
