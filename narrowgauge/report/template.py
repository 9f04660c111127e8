"""Render a page of sections: one skeleton (base.html.jinja), one set of parts (parts.html.jinja).

A page is a template that extends "base.html.jinja" and imports "parts.html.jinja". The file that is
written is complete in itself: the styles are inside, nothing is fetched, and no script runs.
"""

from __future__ import annotations

import importlib.resources
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

from narrowgauge import storage
from narrowgauge.diagnose import format_text


def write(path: Path, page: str, variables: Mapping[str, Any]) -> Path:
    """Render a page into the file `path` and return it. Raises StorageError if it cannot be written.

    page  "folder/name" of the template: "report/page.html.jinja", "lab/ladder.html.jinja"
    """
    text = environment().get_template(page).render(variables)
    # errors="replace": a sample may hold a lone surrogate.
    storage.replace_file(path, text.encode("utf-8", errors="replace"), "make the folder writable")
    return path


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
