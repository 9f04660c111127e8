"""What callers rely on changes only on purpose (exact): public names, CLI verbs, recipes, formats, as in surface.txt.

python -m tests.project.test_surface --update     takes the surface as it is now; say why in the commit
"""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

SNAPSHOT = Path(__file__).with_name("surface.txt")
HOW_TO_UPDATE = "If this is on purpose, run `python -m tests.project.test_surface --update` and say why in the commit."


def public_names() -> Iterable[str]:
    return importlib.import_module("narrowgauge").__all__


def cli_verbs() -> Iterable[str]:
    return importlib.import_module("narrowgauge.cli").VERBS


def recipe_names() -> Iterable[str]:
    return importlib.import_module("narrowgauge.recipes").names()


def format_names() -> Iterable[str]:
    return [each.name for each in importlib.import_module("narrowgauge.formats").ALL]


SECTIONS: dict[str, Callable[[], Iterable[str]]] = {
    "narrowgauge.__all__": public_names,
    "CLI verbs": cli_verbs,
    "recipes": recipe_names,
    "formats": format_names,
}


def parse(text: str) -> dict[str, list[str]]:
    """Section -> names; a section begins with its title in brackets."""
    sections: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.startswith("["):
            names = sections.setdefault(line.strip("[]"), [])
        elif line and not line.startswith("#"):
            names.append(line)
    return sections


def render(sections: dict[str, list[str]]) -> str:
    head = "# The public surface. tests/project/test_surface.py compares it with the code and says how to change it.\n"
    return head + "".join(
        f"\n[{title}]\n" + "".join(f"{name}\n" for name in names)
        for title, names in sections.items()
    )


@pytest.mark.parametrize("section", SECTIONS)
def test_the_surface_is_as_recorded(section):
    expected = parse(SNAPSHOT.read_text(encoding="utf-8"))[section]
    actual = sorted(SECTIONS[section]())
    diff = difflib.unified_diff(
        expected, actual, "tests/project/surface.txt", "the code", n=0, lineterm=""
    )
    assert actual == expected, "\n".join([f"{section} changed:", *diff, HOW_TO_UPDATE])


def test_every_public_name_exists():
    narrowgauge = importlib.import_module("narrowgauge")
    missing = [name for name in public_names() if not hasattr(narrowgauge, name)]
    assert not missing, f"in narrowgauge.__all__ but not there: {missing}"


def test_the_snapshot_survives_a_round_trip():
    sections = {title: ["a", "b-c"] for title in SECTIONS}
    assert parse(render(sections)) == sections
    text = SNAPSHOT.read_text(encoding="utf-8")
    assert render(parse(text)) == text, "tests/project/surface.txt was edited by hand"


def update() -> None:
    """Write the snapshot; a section that cannot be read ends the program with the reason and leaves the file alone."""
    sections = {title: sorted(read()) for title, read in SECTIONS.items()}
    SNAPSHOT.write_text(render(sections), encoding="utf-8")
    print(f"{SNAPSHOT}: " + ", ".join(f"{len(names)} {title}" for title, names in sections.items()))


if __name__ == "__main__":
    if sys.argv[1:] == ["--update"]:
        update()
    else:
        sys.exit("usage: python -m tests.project.test_surface --update")
