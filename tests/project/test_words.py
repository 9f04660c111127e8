"""Tests match codes, values and structure: few of them hold the very words that the package prints. exact

A word of a message can then be changed in one file. Golden texts remain where the words are the product: blocks of the documentation, one
page of a report, one table of `describe`, `--help`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import CodeType
from typing import Any

from tests.processes import ROOT

# Strings and files at most. Lower both when there are fewer. A cause that a test must tell from others gets a code (tests/raising.py).
MOST_STRINGS, MOST_FILES = 20, 15
SHORTEST, WORDS = 12, 3  # characters and words from which a string counts as prose


def strings(path: Path, *, docstrings: bool) -> set[str]:
    """Every string constant of a file, pieces of f-strings included.

    Read from the compiled code, which takes half as long as a walk over the syntax tree. optimize=2 leaves out docstrings, and without
    the future statement annotations are no strings.
    """
    source = path.read_text(encoding="utf-8").replace("from __future__ import annotations", "")
    code = compile(source, str(path), "exec", dont_inherit=True, optimize=0 if docstrings else 2)
    return set(constants(code))


def constants(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, CodeType | tuple | frozenset):
        for each in value.co_consts if isinstance(value, CodeType) else value:
            yield from constants(each)


def repeated(package: Path, tests: Path) -> list[tuple[str, str]]:
    """(file, string) of each string of a test that stands letter for letter in a string of the package."""
    shown = "\n".join(
        value for path in sorted(package.rglob("*.py")) for value in strings(path, docstrings=False)
    )
    words = set(shown.replace("\n", " ").split(" "))
    found = []
    for path in sorted(tests.rglob("*.py")):
        for value in sorted(strings(path, docstrings=True)):
            prose = value.replace("\\", "")  # a pattern is compared as the text that it matches
            parts = prose.split(" ")
            # The words between the first and the last are whole, and cheap to look up.
            if (
                len(prose) >= SHORTEST
                and len(parts) >= WORDS
                and words.issuperset(parts[1:-1])
                and prose in shown
            ):
                found.append((str(path.relative_to(tests.parent)), prose))
    return found


def test_few_tests_repeat_the_words_of_the_package():
    found = repeated(ROOT / "narrowgauge", ROOT / "tests")
    files = {file for file, _ in found}
    report = "\n".join(f"{file}: {prose!r}" for file, prose in found)
    assert len(found) <= MOST_STRINGS and len(files) <= MOST_FILES, report


def test_a_repeated_sentence_is_found(tmp_path):
    """Planted: a whole clause, a piece of an f-string, a pattern and a table's cell; a docstring and two words are none."""
    package, tests = tmp_path / "package", tmp_path / "tests"
    package.mkdir()
    tests.mkdir()
    (package / "a.py").write_text(
        '"""Says what it does."""\nx = 1\nraise ValueError(f"{x} holds no such thing at all. Write (4).")\n'
    )
    (tests / "b.py").write_text(
        'a = "holds no such thing"\nb = f"{a} holds no such "\nc = r"Write \\(4\\)\\."\nd = "Says what it does."\n'
        'def e():\n    return [("at all", r"at all\\. Write \\(4\\)")]\n'
    )
    assert [prose for _, prose in repeated(package, tests)] == [
        " holds no such ",
        "at all. Write (4)",
        "holds no such thing",
    ]
