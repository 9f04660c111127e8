"""Runs the cases of modules under Triton's interpreter, in a process of its own, and looks at what they print.

A module yields names with calls from `cases()`, has `KINDS`, what a name begins with, and `is_quick(name)`, whether `make test` runs it:

    TRITON_INTERPRET=1 python -m tests.ops.triton.cases quick stepped casting      an object for each case: its name, and "" or what differs
    TRITON_INTERPRET=1 python -m tests.ops.triton.cases rest stepped casting       those that `make test-slow` adds
    TRITON_INTERPRET=1 python -m tests.ops.triton.cases "rest 1/3" stepped         a third of those: the first, the fourth ...
    TRITON_INTERPRET=1 python -m tests.ops.triton.cases "lion " stepped            those that begin so
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from itertools import islice
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import torch

from narrowgauge.ops import triton

Case = tuple[str, Callable[[], object]]


def chosen(module: Any, part: str) -> Iterator[Case]:
    share = re.fullmatch(r"(.*) (\d+)/(\d+)", part)
    if share:
        whole, number, count = share[1], int(share[2]), int(share[3])
        return islice(chosen(module, whole), number - 1, None, count)
    quick = module.is_quick
    takes = {"quick": quick, "rest": lambda name: not quick(name)}.get(
        part, lambda name: name.startswith(part)
    )
    # Sorted: some cases come from sets, whose order differs between processes.
    return iter(sorted((each for each in module.cases() if takes(each[0])), key=itemgetter(0)))


def tell(module: Any, part: str) -> None:
    """Runs a part of the cases, each from the same random state, and prints of each what differs."""
    for name, case in chosen(module, part):
        torch.manual_seed(0)
        try:
            case()
            words = ""
        except Exception as error:  # told to the test that started this process
            words = f"{type(error).__name__}: {error}"
        print(json.dumps({"case": f"{module.__name__}: {name}", "words": words}), flush=True)


def check(found: dict[str, str], modules: list[Any], part: str) -> None:
    """All were run, none differs, each is of a kind, and each kind has a case: one without is a test that cannot fail."""
    assert list(found) == [
        f"{module.__name__}: {name}" for module in modules for name, _ in chosen(module, part)
    ]
    for module in modules:
        names = [name for name, _ in module.cases()]
        assert not [name for name in names if not name.startswith(module.KINDS)], module
        assert not [
            kind for kind in module.KINDS if not any(name.startswith(kind) for name in names)
        ], module
    different = [f"{name}: {words}" for name, words in found.items() if words]
    assert found and not different, "\n".join(different)


def look_up_builtins_once() -> None:
    """Half the time of a case goes: the interpreter looks through all of `triton.language` at every call of a device function.

    It asks `inspect` for all members of a module or class and takes the builtins. Their names do not change; their values do, as
    they are replaced for the time of a launch, so those are read anew.
    """
    from triton.runtime import interpreter

    whole = inspect.getmembers

    @cache
    def builtins_of(owner: Any) -> list[str]:
        return [name for name, member in whole(owner) if interpreter.tl.core.is_builtin(member)]

    names = dict(
        vars(inspect), getmembers=lambda owner: [(n, getattr(owner, n)) for n in builtins_of(owner)]
    )
    interpreter.inspect = SimpleNamespace(**names)


def patch_language_once_a_launch() -> None:
    """A third of what is left goes: the interpreter patches `triton.language` at every call of a device function.

    Its first patch holds until the launch ends, so a device function of a file that imports the same modules finds them patched.
    """
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):  # an older Triton; the cases are only slower
        return
    whole, patched = interpreter._patch_lang, set()

    @cache
    def languages(name: str) -> frozenset[str]:
        tl = interpreter.tl
        values = vars(sys.modules[name]).values()
        return frozenset(each.__name__ for each in (tl, tl.core) if any(v is each for v in values))

    def once(function: Any) -> Any:
        needed = languages(function.__module__)
        if needed <= patched:
            return interpreter._LangPatchScope()
        scope = whole(function)
        if not patched:
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        patched.update(needed)
        return scope

    interpreter._patch_lang = once


if __name__ == "__main__":
    triton.unavailable = lambda: ""  # the interpreter needs no C compiler
    look_up_builtins_once()
    patch_language_once_a_launch()
    for name in sys.argv[2:]:
        tell(import_module(f"tests.ops.triton.{name}"), sys.argv[1])
