"""A nested state as named tensors and JSON values, and back.

    {"model": {"weight": w}, "step": 7, "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]}

    tensors   "model.weight": w
    values    "step": 7    "groups": {"list": [{"items": [["lr", 0.1], ["betas", {"tuple": [0.9, 0.99]}]]}]}
    paths     "model.weight": ["model", "weight"]    "step": ["step"]    "groups": ["groups"]

Dicts are taken apart, lists and tuples only if they hold tensors (their steps in a path are ["list", 0] and ["tuple", 0]). So ranks
that hold different layers have different names, and what has one name must be one thing. Types are kept: int and float, tuple and
list, text and number as a key. What JSON cannot hold is refused: other types, NaN and infinity, a name that two entries would have.
"""

from __future__ import annotations

import json
import math
import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from narrowgauge.errors import CheckpointError

Path = list[Any]  # of a key (text or whole number), or ["list" or "tuple", place]
DICTS = (dict, OrderedDict)
PLAIN = (type(None), bool, int, float, str)
SURROGATES = re.compile("[\ud800-\udfff]")


@dataclass
class Flat:
    """A state as `flatten` gives it: the three tables above."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)


def flatten(tree: Mapping[str, Any]) -> Flat:
    """CheckpointError names what cannot be stored."""
    if type(tree) not in DICTS:
        raise CheckpointError(f"the state is a {type(tree).__name__}, not a dict. Pass a dict of tensors and values.")
    flat = Flat()
    for path, leaf in _leaves(tree, []):
        name = _name(path)
        if name in flat.paths:
            raise CheckpointError(f"two entries of the state are called {name!r}. Rename one of them.")
        flat.paths[name] = path
        if isinstance(leaf, Tensor):
            flat.tensors[name] = leaf
        else:
            flat.values[name] = encode(leaf, name)
    return flat


def _leaves(tree: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    if type(tree) in DICTS and (tree or not path):
        for key, value in tree.items():
            if type(key) not in (str, int) or (isinstance(key, str) and SURROGATES.search(key)):
                raise CheckpointError(
                    f"{_name(path)!r} has the key {key!r}, which is no text or whole number. Use a text as key."
                )
            yield from _leaves(value, [*path, key])
    elif type(tree) in (list, tuple) and _holds_tensors(tree):
        for place, value in enumerate(tree):
            yield from _leaves(value, [*path, [type(tree).__name__, place]])
    else:
        yield path, tree


def _holds_tensors(tree: Any) -> bool:
    if isinstance(tree, Tensor):
        return True
    parts = tree.values() if isinstance(tree, Mapping) else tree if type(tree) in (list, tuple) else ()
    return any(map(_holds_tensors, parts))


def _name(path: Path) -> str:
    return ".".join(str(step[1] if isinstance(step, list) else step) for step in path)


def encode(value: Any, name: str) -> Any:
    """The value as JSON, with its types."""
    if type(value) in (list, tuple):
        return {type(value).__name__: [encode(part, name) for part in value]}
    if type(value) in DICTS:
        return {"items": [[encode(key, name), encode(part, name)] for key, part in value.items()]}
    reason = ""
    if type(value) not in PLAIN:
        reason = f"is a {type(value).__module__}.{type(value).__qualname__}"
    elif isinstance(value, float) and not math.isfinite(value):
        reason = f"is {value}"
    elif isinstance(value, str) and SURROGATES.search(value):
        reason = f"is {value!r}, which is no Unicode text"
    if reason:
        raise CheckpointError(
            f"{name!r} {reason}, which JSON cannot hold. Store numbers, text, lists, tables or tensors."
        )
    return value


def decode(stored: Any) -> Any:
    """The inverse of `encode`; ValueError for what it does not write."""
    if not isinstance(stored, dict):
        return stored
    [(kind, content)] = stored.items()
    if kind == "items":
        return {decode(key): decode(value) for key, value in content}
    if kind not in ("list", "tuple"):
        raise ValueError(f"{kind!r} is not one of 'items', 'list' and 'tuple'")
    parts = map(decode, content)
    return tuple(parts) if kind == "tuple" else list(parts)


def same(one: Any, other: Any) -> bool:
    """Whether two encoded values are one: 1, 1.0 and True are not, 0.0 and -0.0 neither."""
    return json.dumps(one) == json.dumps(other)


def unflatten(paths: Mapping[str, Path], leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The nested state from its leaves: tensors, and decoded values."""
    root = _Node()
    for name, path in paths.items():
        place = root
        for step in path[:-1]:
            place = place.setdefault(_key(step), _Node())
            if not isinstance(place, _Node):
                raise ValueError(f"{name!r} is below something that is no table")
        if _key(path[-1]) in place:
            raise ValueError(f"{name!r} is where something else is")
        place[_key(path[-1])] = leaves[name]
    found = _built(root)
    if not isinstance(found, dict):
        raise ValueError("its outermost table is a list")
    return found


@dataclass(frozen=True)
class _Place:
    """A place in a list or tuple."""

    kind: str
    number: int


def _key(step: Any) -> Any:
    return _Place(*step) if isinstance(step, list) else step


class _Node(dict[Any, Any]):
    """A table or sequence while it is being put together; all else is a leaf."""


def _built(node: Any) -> Any:
    """The node with its sequences put back, as plain dicts, lists and tuples."""
    if not isinstance(node, _Node):
        return node
    parts = {key: _built(part) for key, part in node.items()}
    places = [key for key in parts if isinstance(key, _Place)]
    if not places:
        return parts
    kind = places[0].kind
    if len(places) < len(parts) or {(place.kind, place.number) for place in places} != {
        (kind, i) for i in range(len(places))
    }:
        raise ValueError("a list has missing or foreign parts")
    ordered = [parts[_Place(kind, number)] for number in range(len(places))]
    return tuple(ordered) if kind == "tuple" else ordered


def fill(tree: Any, values: Mapping[str, Any], path: Path | None = None) -> Any:
    """Puts decoded values by name in the places of `tree` that they came from; tensors stay. Returns `tree`, or a new tuple."""
    path = path or []
    if type(tree) in DICTS and (tree or not path):
        for key in tree:
            tree[key] = fill(tree[key], values, [*path, key])
        return tree
    if type(tree) in (list, tuple) and _holds_tensors(tree):
        parts = [fill(part, values, [*path, [type(tree).__name__, place]]) for place, part in enumerate(tree)]
        if isinstance(tree, tuple):
            return tuple(parts)
        tree[:] = parts
        return tree
    return tree if isinstance(tree, Tensor) else values[_name(path)]
