"""The index in the docstring of narrowgauge/nn/__init__.py: it names every file, and every name in it exists. exact"""

from __future__ import annotations

import re
from pathlib import Path

import narrowgauge.nn

FOLDER = Path(narrowgauge.nn.__file__).parent


def answers():
    """The right column: names of files of nn/, and dotted names of other modules."""
    lines = [line for line in narrowgauge.nn.__doc__.splitlines() if line.startswith("    ")]
    found = set()
    for line in lines:
        right = re.split(r" {2,}", line.strip())[-1]
        found |= set(re.findall(r"\b(?:narrowgauge\.|ops\.)?[a-z]\w*(?:\.\w+)*\b", right))
    return found


def test_every_file_is_in_the_index():
    files = {path.stem for path in FOLDER.glob("*.py")} - {"__init__"}
    assert files <= answers(), files - answers()


def test_every_name_in_the_index_exists():
    words = {"errors", "in", "on", "a", "list", "other", "warnings"}
    for name in answers() - words:
        parts = name.removeprefix("narrowgauge.").split(".")
        place = (
            FOLDER.parent.joinpath(*parts)
            if len(parts) > 1 or "narrowgauge." in name
            else FOLDER / name
        )
        assert place.is_dir() or place.with_suffix(".py").is_file(), name
