"""Which dotted names a pattern means: shell wildcards, and ranges of numbers.

"*.mlp.*"          wildcards over the whole name; `*` crosses dots
"mlp.up_proj"      without a leading `*` it also matches the end of a name, from a dot on: "model.layers.0.mlp.up_proj"
"layers.0-3"       a part of the form A-B stands for the numbers from A to B, both included
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

from narrowgauge.errors import ConfigError

_RANGE = re.compile(r"(\d+)-(\d+)")
MOST_NUMBERS = 100_000  # of a range; more is a slip of the pen


def matches(name: str, pattern: str) -> bool:
    """Whether `pattern` means the dotted `name`."""
    return any(_matches_one(name, each) for each in expanded(pattern))


def expanded(pattern: str) -> list[str]:
    """The pattern without ranges: "layers.0-2.mlp" -> ["layers.0.mlp", "layers.1.mlp", "layers.2.mlp"].

    Raises ConfigError for a range that runs backwards.
    """
    found = [""]
    for part in pattern.split("."):
        found = [f"{start}.{end}" if start else end for start in found for end in _alternatives(part, pattern)]
    return found


def _alternatives(part: str, pattern: str) -> list[str]:
    limits = _RANGE.fullmatch(part)
    if not limits:
        return [part]
    first, last = int(limits[1]), int(limits[2])
    if not first <= last < first + MOST_NUMBERS:
        raise ConfigError(
            f"pattern {pattern!r}: the range {part!r} runs from {first} to {last}. "
            f"Write the smaller number first, and at most {MOST_NUMBERS:,} numbers."
        )
    return [str(number) for number in range(first, last + 1)]


def _matches_one(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern) or (not pattern.startswith("*") and fnmatchcase(name, f"*.{pattern}"))
