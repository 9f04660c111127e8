"""Runs the cases of a module under Triton's interpreter, in a process of its own, and looks at what they print.

A module yields names with calls from `cases()`, has `KINDS`, what a name begins with, and `is_quick(name)`, whether `make test` runs it:

    TRITON_INTERPRET=1 python -m tests.ops.triton.stepped quick      a JSON object for each case: its name, and "" or what differs
    TRITON_INTERPRET=1 python -m tests.ops.triton.stepped rest       those that `make test-slow` adds
    TRITON_INTERPRET=1 python -m tests.ops.triton.stepped "lion "    those that begin so
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable

import torch

Case = tuple[str, Callable[[], object]]


def tell(cases: Iterable[Case], is_quick: Callable[[str], bool], part: str) -> None:
    """Runs a part of the cases, each from the same random state, and prints of each what differs."""
    chosen = {"quick": is_quick, "rest": lambda name: not is_quick(name)}.get(part, lambda name: name.startswith(part))
    for name, case in cases:
        if chosen(name):
            torch.manual_seed(0)
            try:
                case()
                words = ""
            except Exception as error:  # told to the test that started this process
                words = f"{type(error).__name__}: {error}"
            print(json.dumps({"case": name, "words": words}), flush=True)


def check(found: dict[str, str], kinds: Iterable[str], part: str) -> None:
    """Nothing differs, every case is of a kind, and every kind has a quick case: one without is a test that cannot fail."""
    kinds = tuple(kinds)
    assert found and not [name for name in found if not name.startswith(kinds)]
    if part == "quick":
        assert not [kind for kind in kinds if not any(name.startswith(kind) for name in found)]
    different = [f"{name}: {words}" for name, words in found.items() if words]
    assert not different, "\n".join(different)
