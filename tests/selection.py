"""Which cases `make test` runs, which of them wait for `make test-slow`, and which need a compiler."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterable
from typing import Any

import pytest

from narrowgauge.ops.cpp.build import compiler_name

needs_compiler = pytest.mark.skipif(
    shutil.which(compiler_name()) is None, reason="needs a C++ compiler"
)

# For a test that takes the fixture `cpu` and a second or more: the CPU without fast instructions waits for the slow suite.
slow_on_a_plain_cpu = pytest.mark.parametrize(
    "cpu",
    [
        pytest.param(False, marks=pytest.mark.slow, id="plain-cpu"),
        pytest.param(True, id="fast-cpu"),
    ],
    indirect=True,
)


def quick(chosen: Collection[Any], cases: Iterable[Any]) -> list[Any]:
    """All the cases for `parametrize`; those that are not chosen are marked slow.

    chosen    the cases themselves, or for tuples their first element; each of them must occur, so that none is lost in a renaming
    """
    cases = list(cases)

    def found(case: Any) -> list[Any]:
        return [
            each for each in chosen if each == case or (isinstance(case, tuple) and each == case[0])
        ]

    taken = [each for case in cases for each in found(case)]
    assert not (lost := [each for each in chosen if each not in taken]), (
        f"chosen, but no case: {lost}"
    )
    return [case if found(case) else _slow(case) for case in cases]


def _slow(case: Any) -> Any:
    values = case if isinstance(case, tuple) else (case,)
    return pytest.param(*values, marks=pytest.mark.slow)
