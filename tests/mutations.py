"""Damage to JSON, drawn from a seed: values that are wrong, missing, deep or odd, as no writer of ours leaves them."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

DEEP = "[" * 20_000 + "]" * 20_000
SCALARS: list[Any] = [
    None, True, False, 0, -1, 1.5, -0.5, 2**70, -(2**70), 1e308, float("nan"), float("inf"), "", "x", "NaN", "\ud800", "../../etc",
    [], [1], {}, {"value": 1}, [[[[]]]],
]  # fmt: skip


def mutated(text: str, count: int, seed: int) -> Iterator[tuple[str, str]]:
    """(what was done, the text of a damaged copy) of a JSON value, `count` times."""
    draw = random.Random(seed)
    for _ in range(count):
        kind = draw.choice(
            ["value", "value", "value", "drop", "swap", "byte", "cut", "whole", "deep", "twice"]
        )
        words, damaged = _mutate(json.loads(text), text, kind, draw)
        yield f"{kind}: {words}", damaged


def _mutate(value: Any, text: str, kind: str, draw: random.Random) -> tuple[str, str]:
    if kind == "byte":
        place = draw.randrange(len(text))
        new = chr(draw.randrange(32, 127))
        return f"{place} {text[place]!r} -> {new!r}", text[:place] + new + text[place + 1 :]
    if kind == "cut":
        place = draw.randrange(len(text))
        return str(place), text[:place]
    if kind == "whole":
        new = draw.choice(SCALARS)
        return repr(new), json.dumps(new)
    holder, key = draw.choice(list(_places(copied := copy.deepcopy(value))))
    old = holder[key]
    if kind == "deep":
        holder[key] = "DEEP"
        return f"{key!r}", json.dumps(copied).replace('"DEEP"', DEEP, 1)
    if kind == "drop":
        del holder[key]
    elif kind == "swap":
        other, place = draw.choice(list(_places(copied)))
        holder[key], other[place] = other[place], old
        if "Circular" in _dump_error(copied):
            return "whole", "[]"
    elif kind == "twice" and isinstance(holder, list):
        holder.insert(key, copy.deepcopy(old))
    else:
        holder[key] = _other(old, draw)
    now = (
        holder[key]
        if (isinstance(holder, list) and key < len(holder)) or key in holder
        else "nothing"
    )
    return f"{key!r}: {str(old)[:40]!r} -> {str(now)[:40]!r}", json.dumps(copied)


def _dump_error(value: Any) -> str:
    try:
        json.dumps(value)
    except (ValueError, RecursionError) as error:
        return f"Circular {error}"
    return ""


def _other(old: Any, draw: random.Random) -> Any:
    if isinstance(old, int | float) and not isinstance(old, bool) and draw.random() < 0.6:
        return draw.choice(
            [-old - 1, old + 10**9, -1, old * -1e30, float("nan"), float("inf"), old + 0.5]
        )
    return copy.deepcopy(draw.choice(SCALARS))


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key) of each value inside, up to a few of each list."""
    items = (
        list(value.items())
        if isinstance(value, dict)
        else list(enumerate(value))
        if isinstance(value, list)
        else []
    )
    for key, each in items if len(items) < 40 else [*items[:8], *items[-8:]]:
        yield value, key
        yield from _places(each)
