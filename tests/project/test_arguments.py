"""No function takes more arguments than a reader keeps apart, kernels included (exact, by the syntax tree)."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from tests.processes import ROOT

MOST = 12


def crowded(source: str) -> Iterator[tuple[str, int]]:
    """(name, arguments) of the functions with more than MOST; `*args` and `**options` count one each."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            given = node.args
            count = len(given.posonlyargs) + len(given.args) + len(given.kwonlyargs)
            count += (given.vararg is not None) + (given.kwarg is not None)
            if count > MOST:
                yield getattr(node, "name", "lambda"), count


def test_no_function_takes_more_than_twelve_arguments():
    found = {}
    for path in sorted((ROOT / "narrowgauge").rglob("*.py")):
        for name, count in crowded(path.read_text(encoding="utf-8")):
            found[f"{path.relative_to(ROOT)}:{name}"] = count
    assert not found, f"group what belongs together, as ops/triton/launch.py does: {found}"


def test_every_sort_of_argument_counts():
    """Control: thirteen of all sorts are found, twelve are not."""
    names = ", ".join(f"x{place}" for place in range(10))
    assert dict(crowded(f"def f({names}, *args, option, **options): ...")) == {"f": 13}
    assert dict(crowded(f"lambda {names}, *args, **options: 0")) == {}
    assert dict(crowded(f"class A:\n    async def f(self, {names}, /, option, *, other): ...")) == {
        "f": 13
    }
