"""Tests match codes, values and structure: few of them hold the very words that the package prints. exact

A word of a message can then be changed in one file. Golden texts remain where the words are the product: blocks of the documentation, one
page of a report, one table of `describe`, `--help`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.processes import ROOT

# Strings and files at most. Lower both when there are fewer; a text that a test needs belongs into a code (tests/raising.py).
MOST_STRINGS, MOST_FILES = 0, 0
SHORTEST, WORDS = 12, 3  # characters and words from which a string counts as prose


def strings(path: Path, *, docstrings: bool) -> Iterator[tuple[int, str]]:
    """(line, value) of every string constant of a file, pieces of f-strings included."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    left_out: set[int] = set()
    for node in ast.walk(tree):
        if not docstrings and isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            left_out.add(id(node.value))
        if (
            isinstance(node, ast.Constant)
            and isinstance(node.value, str)
            and id(node) not in left_out
        ):
            yield node.lineno, node.value


def repeated(package: Path, tests: Path) -> dict[str, str]:
    """file:line of a test -> its string that stands letter for letter in a string of the package."""
    shown = "\n".join(
        value
        for path in sorted(package.rglob("*.py"))
        for _, value in strings(path, docstrings=False)
    )
    words = set(shown.replace("\n", " ").split(" "))
    found = {}
    for path in sorted(tests.rglob("*.py")):
        for line, value in strings(path, docstrings=True):
            prose = value.replace("\\", "")  # a pattern is compared as the text that it matches
            parts = prose.split(" ")
            # The words between the first and the last are whole, and cheap to look up.
            if (
                len(prose) >= SHORTEST
                and len(parts) >= WORDS
                and words.issuperset(parts[1:-1])
                and prose in shown
            ):
                found[f"{path.relative_to(tests.parent)}:{line}"] = prose
    return found


def test_few_tests_repeat_the_words_of_the_package():
    found = repeated(ROOT / "narrowgauge", ROOT / "tests")
    files = {place.partition(":")[0] for place in found}
    report = "\n".join(f"{place}: {prose!r}" for place, prose in found.items())
    assert len(found) <= MOST_STRINGS and len(files) <= MOST_FILES, report


def test_a_repeated_sentence_is_found(tmp_path):
    """Planted: a whole message, a piece of an f-string and a pattern; a docstring and two words are none."""
    package, tests = tmp_path / "package", tmp_path / "tests"
    package.mkdir()
    tests.mkdir()
    (package / "a.py").write_text(
        '"""Says what it does."""\nraise ValueError(f"{x} is no number of ranks. Write (4).")\n'
    )
    (tests / "b.py").write_text(
        'a = "is no number of ranks"\nb = f"{y} is no number "\nc = r"Write \\(4\\)\\."\nd = "Says what it does."\n'
        'e = r"of ranks\\. Write \\(4\\)"\n'
    )
    assert repeated(package, tests) == {
        "tests/b.py:1": "is no number of ranks",
        "tests/b.py:2": " is no number ",
        "tests/b.py:5": "of ranks. Write (4)",
    }
