"""A former name is understood in the minor release that renamed it and in the next one (exact).

The tables of CONTRIBUTING.md, "Former names", and every DeprecationWarning of the package say since when a name is another. A name that
is older than the rule allows fails here, on the day that the version in pyproject.toml rises, and is removed then.
"""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator

from narrowgauge import recipe
from narrowgauge.diagnose import former_settings, moved
from narrowgauge.train.config import merged_settings
from tests.processes import ROOT

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]["version"]
UNDERSTOOD = 1  # minor releases after the one that renamed it
OF_A_TABLE = {"diagnose/moved.py"}  # warns with names of MOVED_IN, which are counted already
SINCE = re.compile(r"since (\d+\.\d+\.\d+)\b")


def by_table() -> Iterator[tuple[str, str]]:
    """(former name, version that renamed it) of the tables."""
    tables = (former_settings.RENAMED_IN, moved.MOVED_IN, recipe._RENAMED_IN)
    for table in tables:
        for version, names in table.items():
            yield from ((name, version) for name in names)
    for setting in merged_settings.MERGED.values():
        yield from ((key, setting.since) for key in setting.kinds)


def warned_of(source: str) -> list[str]:
    """Of each call of warn with DeprecationWarning the version in its words, or '' without one."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or ast.unparse(node.func).rpartition(".")[2] != "warn":
            continue
        given = [*node.args, *(each.value for each in node.keywords)]
        if "DeprecationWarning" not in map(ast.unparse, given):
            continue
        words = "".join(
            each.value for each in ast.walk(node.args[0]) if isinstance(each, ast.Constant)
        )
        found.append(match[1] if (match := SINCE.search(words)) else "")
    return found


def by_warning() -> Iterator[tuple[str, str]]:
    """(file of the package, version) of each DeprecationWarning that no table has."""
    package = ROOT / "narrowgauge"
    for path in sorted(package.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        name = path.relative_to(package).as_posix()
        if "DeprecationWarning" in source and name not in OF_A_TABLE:
            yield from ((name, version) for version in warned_of(source))


def too_old(renamed_in: str, now: str) -> bool:
    """True if a name of that version is no longer understood. Versions as MAJOR.MINOR.PATCH."""
    (then_major, then_minor), (major, minor) = (
        tuple(int(part) for part in version.split(".")[:2]) for version in (renamed_in, now)
    )
    return major > then_major or minor - then_minor > UNDERSTOOD


def test_the_rule():
    """Renamed in 0.1: understood in 0.1 and 0.2, gone in 0.3 and in 1.0."""
    versions = ("0.1.0", "0.1.7", "0.2.0", "0.2.9", "0.3.0", "1.0.0")
    assert [too_old("0.1.0", now) for now in versions] == [False] * 4 + [True] * 2
    assert not too_old("0.2.0", "0.1.0"), "renamed for the release that comes"


def test_no_former_name_is_older_than_the_rule_allows():
    names = [*by_table(), *by_warning()]
    assert len(names) > 100
    undated = [name for name, version in names if not re.fullmatch(r"\d+\.\d+\.\d+", version)]
    assert not undated, f"says not since when: {undated}"
    old = [name for name, version in names if too_old(version, VERSION)]
    assert not old, f"at {VERSION} these are no longer understood; remove them: {old}"


def test_a_name_that_is_too_old_is_seen():
    """Two minor releases on, every name of today is too old."""
    major, minor, *_ = (int(part) for part in VERSION.split("."))
    later = f"{major}.{minor + 3}.0"
    assert all(too_old(version, later) for _, version in by_table())


def test_a_warning_without_a_version_is_seen():
    source = 'warnings.warn("A is B{}.", DeprecationWarning, stacklevel=2)\nwarn("C", UserWarning)'
    assert warned_of(source.format("")) == [""]
    assert warned_of(source.format(" since 9.8.7")) == ["9.8.7"]
