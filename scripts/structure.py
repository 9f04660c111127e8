"""Measures how the package's files depend on each other, against limits that only fall.

    python scripts/structure.py             the figures, the files with most imports, and classes with two homes
    python scripts/structure.py --chain     the longest chain of imports, file by file
    python scripts/structure.py --check     exit 1 where a figure is above its limit; `make check` runs this
    python scripts/structure.py --lower     rewrite the limits to today's figures, where they are lower

    floors         files of the longest chain of imports at the top of files: what a reader may have to open
    lazy floors    the same with imports inside functions
    imports        other files of the package that a file imports, on average
    most imports   those of the file with most
    small files    files of fewer than SMALL lines
    shared names   names of classes that two files define, private ones included

Imports for type checkers alone are left out. The figures are a thermometer: a limit may be raised
by hand where the design is better for it, with the reason in the message of the commit.
"""

from __future__ import annotations

import argparse
import ast
import json
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "narrowgauge"
LIMITS = Path(__file__).with_name("structure_limits.json")
SMALL = 60

Graph = Mapping[str, frozenset[str]]


@dataclass(frozen=True)
class Structure:
    """What the syntax trees of a package say.

    lines    module -> lines of its file
    eager    module -> modules that it imports at its top
    every    module -> all that it imports, inside functions too
    classes  name -> modules that define such a class
    """

    lines: Mapping[str, int]
    eager: Graph
    every: Graph
    classes: Mapping[str, frozenset[str]]

    def figures(self) -> dict[str, float]:
        counts = [len(imported) for imported in self.every.values()]
        return {
            "floors": len(longest_chain(self.eager)),
            "lazy floors": len(longest_chain(self.every)),
            "imports": round(sum(counts) / len(counts), 1),
            "most imports": max(counts),
            "small files": sum(count < SMALL for count in self.lines.values()),
            "shared names": len(self.shared_names()),
        }

    def shared_names(self) -> dict[str, list[str]]:
        """Class name -> its modules, of those with more than one."""
        return {
            name: sorted(homes) for name, homes in sorted(self.classes.items()) if len(homes) > 1
        }


def modules_of(package: Path) -> dict[str, Path]:
    """Dotted name -> file."""
    found = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package.parent).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def read(package: Path) -> Structure:
    modules = modules_of(package)
    lines, eager, every = {}, {}, {}
    classes: dict[str, set[str]] = defaultdict(set)
    for module, path in modules.items():
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        lines[module] = len(text.splitlines())
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                classes[node.name].add(module)
        known = {
            is_eager: frozenset(
                target
                for statement in imports(tree, is_eager)
                for target in targets(statement, modules)
                if target != module
            )
            for is_eager in (True, False)
        }
        eager[module], every[module] = known[True], known[False]
    return Structure(
        lines, eager, every, {name: frozenset(homes) for name, homes in classes.items()}
    )


def imports(tree: ast.AST, only_eager: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Import statements outside of `if TYPE_CHECKING`, and outside of functions if `only_eager`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for statement in node.orelse:
                yield from imports(ast.Module([statement], []), only_eager)
        elif not (only_eager and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)):
            yield from imports(node, only_eager)


def targets(statement: ast.Import | ast.ImportFrom, modules: Mapping[str, Path]) -> Iterator[str]:
    """The package's modules that a statement imports: `from a import b` is a.b if that is a module."""
    names = [alias.name for alias in statement.names]
    if isinstance(statement, ast.ImportFrom):
        within = statement.module or ""
        names = [f"{within}.{name}" if f"{within}.{name}" in modules else within for name in names]
    yield from (name for name in names if name in modules)


def longest_chain(graph: Graph) -> list[str]:
    """Modules of the longest chain, each importing the next. An import that closes a cycle is left out."""
    sys.setrecursionlimit(10_000)
    open_modules: set[str] = set()

    @cache
    def chain(module: str) -> tuple[str, ...]:
        open_modules.add(module)
        rest = [chain(each) for each in sorted(graph[module]) if each not in open_modules]
        open_modules.discard(module)
        return (module, *max(rest, key=len, default=()))

    return list(max((chain(module) for module in sorted(graph)), key=len, default=()))


def failures(now: Mapping[str, float], limits: Mapping[str, float]) -> list[str]:
    return [
        f"{what}: {now[what]}, at most {limits[what]}. python scripts/structure.py shows where; a limit is raised in "
        "scripts/structure_limits.json, with the reason in the commit."
        for what in now
        if now[what] > limits[what]
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--chain", action="store_true", help="the longest chain of imports")
    parser.add_argument("--check", action="store_true", help="fail above a limit")
    parser.add_argument("--lower", action="store_true", help="lower the limits to today's figures")
    options = parser.parse_args()
    structure = read(PACKAGE)
    if options.chain:
        print(*longest_chain(structure.every), sep="\n")
        return
    now = structure.figures()
    limits = json.loads(LIMITS.read_text(encoding="utf-8")) if LIMITS.exists() else {}
    if options.lower:
        lowered = {what: min(figure, limits.get(what, figure)) for what, figure in now.items()}
        LIMITS.write_text(json.dumps(lowered, indent=2) + "\n", encoding="utf-8")
        return
    if options.check:
        problems = failures(now, limits)
        print(*problems, sep="\n", end="\n" if problems else "")
        sys.exit(1 if problems else 0)
    for what, figure in now.items():
        print(f"{what:14}{figure:8g}")
    most = sorted(structure.every.items(), key=lambda item: -len(item[1]))[:8]
    print("\nmost imports", *(f"{len(found):5}  {module}" for module, found in most), sep="\n")
    print("\nshared names")
    for name, homes in structure.shared_names().items():
        print(f"    {name}: {', '.join(homes)}")


if __name__ == "__main__":
    main()
