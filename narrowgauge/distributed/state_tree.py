"""Flatten a nested state into named tensors and JSON values, and rebuild it.

    {"model": {"weight": w}, "step": 7, "groups": [{"lr": 0.1, "betas": (0.9, 0.99)}]}

    tensors  "model.weight": w
    values   "step": 7
             "groups": {"list": [{"items": [["lr", 0.1], ["betas", {"tuple": [0.9, 0.99]}]]}]}
    paths    "model.weight": ["model", "weight"]   "step": ["step"]   "groups": ["groups"]

Dicts are always flattened; lists and tuples only if they contain tensors (path steps ["list", 0]
and ["tuple", 0]). Ranks with different layers therefore have different names, and equal names must
be the same entry.

Types are preserved: int and float, tuple and list, string and integer keys. Values that JSON cannot
represent are refused: other types, NaN and infinity, and names that occur twice.
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

# Steps of a path: a key (str or int), or ["list" | "tuple", position].
Path = list[Any]
DICTS = (dict, OrderedDict)
PLAIN = (type(None), bool, int, float, str)
# Lone surrogates cannot be encoded as UTF-8, so JSON files cannot hold them.
SURROGATES = re.compile("[\ud800-\udfff]")


@dataclass
class Flat:
    """Result of `flatten`: the three tables of the module docstring."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    paths: dict[str, Path] = field(default_factory=dict)


def flatten(tree: Mapping[str, Any]) -> Flat:
    """Flatten a nested dict. CheckpointError for entries that cannot be stored."""
    if type(tree) not in DICTS:
        raise CheckpointError(
            f"the state is a {type(tree).__name__}, not a dict. Pass a dict of tensors and values.",
            code="checkpoint.not-a-dict",
        )
    flat = Flat()
    for path, leaf in _leaves(tree, []):
        name = _name(path)
        if name in flat.paths:
            raise CheckpointError(
                f"two entries of the state are called {name!r}. Rename one of them.",
                code="checkpoint.two-names",
            )
        flat.paths[name] = path
        if isinstance(leaf, Tensor):
            flat.tensors[name] = leaf
        else:
            flat.values[name] = encode(leaf, name)
    return flat


def _leaves(tree: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    # An empty dict below the root is a value: flattened, it would leave no entry.
    if type(tree) in DICTS and (tree or not path):
        for key, value in tree.items():
            # Exact types: isinstance would accept a bool as an int.
            if type(key) not in (str, int) or (isinstance(key, str) and SURROGATES.search(key)):
                raise CheckpointError(
                    f"{_name(path)!r} has the key {key!r}, which is no text or whole number. Use a text as key.",
                    code="checkpoint.key",
                )
            yield from _leaves(value, [*path, key])
    elif type(tree) in (list, tuple) and _has_tensors(tree):
        for place, value in enumerate(tree):
            yield from _leaves(value, [*path, [type(tree).__name__, place]])
    else:
        yield path, tree


def _has_tensors(tree: Any) -> bool:
    if isinstance(tree, Tensor):
        return True
    parts = (
        tree.values() if isinstance(tree, Mapping) else tree if type(tree) in (list, tuple) else ()
    )
    return any(map(_has_tensors, parts))


def _name(path: Path) -> str:
    return ".".join(str(step[1] if isinstance(step, list) else step) for step in path)


def encode(value: Any, name: str) -> Any:
    """Return the value as JSON-compatible data with its types."""
    if type(value) in (list, tuple):
        return {type(value).__name__: [encode(part, name) for part in value]}
    if type(value) in DICTS:
        # Pairs and not a JSON object, whose keys could be strings only.
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
            f"{name!r} {reason}, which JSON cannot hold. Store numbers, text, lists, tables or tensors.",
            code="checkpoint.not-json",
        )
    return value


def decode(stored: Any) -> Any:
    """Return the value of encoded data; ValueError if `encode` could not have written it."""
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
    """Compare two encoded values by type and value: 1, 1.0 and True differ, as do 0.0 and -0.0."""
    # Compare text: in Python 1 == 1.0 == True and 0.0 == -0.0.
    return json.dumps(one) == json.dumps(other)


def unflatten(paths: Mapping[str, Path], leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Rebuild the nested state from its leaves: tensors and decoded values."""
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
class _Position:
    """Position in a list or tuple."""

    kind: str
    number: int


def _key(step: Any) -> Any:
    return _Position(*step) if isinstance(step, list) else step


class _Node(dict[Any, Any]):
    """A dict or sequence under construction; any other object is a leaf."""


def _built(node: Any) -> Any:
    """Return the node as plain dicts, lists and tuples."""
    if not isinstance(node, _Node):
        return node
    parts = {key: _built(part) for key, part in node.items()}
    places = [key for key in parts if isinstance(key, _Position)]
    if not places:
        return parts
    kind = places[0].kind
    # Complete and of one kind: a damaged index must not shorten a list silently.
    if len(places) < len(parts) or {(place.kind, place.number) for place in places} != {
        (kind, i) for i in range(len(places))
    }:
        raise ValueError("a list has missing or foreign parts")
    ordered = [parts[_Position(kind, number)] for number in range(len(places))]
    return tuple(ordered) if kind == "tuple" else ordered


def fill(tree: Any, values: Mapping[str, Any], path: Path | None = None) -> Any:
    """Replace the non-tensor values of `tree` by decoded values of the same name, in place.

    Returns `tree`, or a new tuple for a tuple.
    """
    path = path or []
    if type(tree) in DICTS and (tree or not path):
        for key in tree:
            tree[key] = fill(tree[key], values, [*path, key])
        return tree
    if type(tree) in (list, tuple) and _has_tensors(tree):
        parts = [
            fill(part, values, [*path, [type(tree).__name__, place]])
            for place, part in enumerate(tree)
        ]
        if isinstance(tree, tuple):
            return tuple(parts)
        tree[:] = parts
        return tree
    return tree if isinstance(tree, Tensor) else values[_name(path)]
