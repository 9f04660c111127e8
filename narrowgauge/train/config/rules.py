"""Declaration of a setting: its entry in the table, its type, and the rule for its value.

Imports no torch, so that --help is quick.
"""

import math
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import Field, dataclass, field
from typing import Any

from narrowgauge.diagnose.former_settings import FORMER
from narrowgauge.errors import closest
from narrowgauge.train.config import recipe_syntax

Problem = tuple[tuple[str, ...], str]  # (names of fields whose values break a rule, message)
Check = tuple[object, str, str]  # (truthy if broken, keys separated by spaces, message)
# Types of settings besides bool, int, float and str
TABLE = Mapping[str, str]
NUMBERS = tuple[float, float]


@dataclass(frozen=True)
class Range:
    """Numbers from `low` to `high`; an open end excludes its bound.

    unset  value outside the range that leaves the number to another setting, or None
    """

    low: float
    high: float
    open_low: bool = False
    open_high: bool = False
    unset: float | None = None

    def refuse(self, value: float) -> str:
        """The rule in words if `value` breaks it, else ''."""
        is_end = (self.open_low and value == self.low) or (self.open_high and value == self.high)
        is_inside = self.low <= value <= self.high and not is_end
        return "" if is_inside or value == self.unset else str(self)

    def __str__(self) -> str:
        unset = "" if self.unset is None else f", or {self.unset:g}"
        if not (self.open_low or self.open_high):
            return f"from {self.low} to {self.high}{unset}"
        low = f"above {self.low}" if self.open_low else f"at least {self.low}"
        return f"{low} and {'below' if self.open_high else 'at most'} {self.high}{unset}"


@dataclass(frozen=True)
class TwoNumbers:
    """Two numbers, each of a range."""

    range: Range

    def refuse(self, value: tuple[float, float]) -> str:
        return str(self) if any(map(self.range.refuse, value)) else ""

    def __str__(self) -> str:
        return f"two numbers, each {self.range}"


@dataclass(frozen=True)
class OneOf:
    """One of a few names or numbers."""

    names: tuple[str, ...] | tuple[int, ...]

    def refuse(self, value: str | int) -> str:
        if value in self.names:
            return ""
        # Suggest the nearest name for a typo.
        near = closest(str(value), map(str, self.names), limit=1) if isinstance(value, str) else ""
        return f"{self}{f'. Closest: {near}' if near else ''}"

    def __str__(self) -> str:
        return "one of " + ", ".join(repr(name) for name in self.names)


@dataclass(frozen=True)
class Matching:
    """Text that fully matches a regular expression; `description` explains it in messages."""

    pattern: str
    description: str

    def refuse(self, value: str) -> str:
        return "" if re.fullmatch(self.pattern, value) else self.description

    def __str__(self) -> str:
        return self.description


@dataclass(frozen=True)
class OneOrPair:
    """One of `names` or `parts`, or two `parts` as "first/second"."""

    names: tuple[str, ...]
    parts: tuple[str, ...]

    def refuse(self, value: str) -> str:
        pair = value.split("/")
        if value in (*self.names, *self.parts) or (len(pair) == 2 and set(pair) <= set(self.parts)):
            return ""
        wrong = next((part for part in pair if part not in self.parts), value)
        near = closest(wrong, (*self.names, *self.parts), limit=1)
        return f"{self}{f'. Closest: {near}' if near else ''}"

    def __str__(self) -> str:
        pair = f"a pair of {', '.join(map(repr, self.parts))}, as '{self.parts[2]}/{self.parts[1]}'"
        return f"one of {', '.join(map(repr, self.names))}, or {pair}"


NOT_EMPTY = Matching(r"(?s).+", "not empty")
COUNT = Range(1, 2**31 - 1)
COUNT_OR_ZERO = Range(0, 2**31 - 1)
Rule = Range | TwoNumbers | OneOf | OneOrPair | Matching


def setting(
    table: str, default: Any, help: str, rule: Rule | None = None, key: str = "", tasks: Sequence[str] = (), short: bool = False,
    free: bool = False, parts: Mapping[str, str] | None = None, also: str = "",
) -> Any:  # fmt: skip
    """Declares a setting as a dataclass field.

    table    its table in a file and its group in --help; "" for the top of the file
    default  default value, or a type such as `dict` for a mutable default
    help     help text
    rule     allowed values
    key      key in its table, if it differs from the field's name
    tasks    tasks in which the setting has an effect; () means all
    short    the table's name alone also means this setting: recipe = "bf16", --recipe bf16
    free     may change when a run resumes, and in a branch
    parts    {name: help text} of parts that have a key and a flag of their own, as guard.every
    also     a second flag, without its dashes
    """
    metadata = {
        "table": table, "help": help, "rule": rule, "key": key, "tasks": tasks, "short": short, "free": free,
        "parts": parts or {}, "also": also,
    }  # fmt: skip
    if isinstance(default, type):
        # hash=False: a dict would make the frozen configuration unhashable.
        return field(default_factory=default, metadata=metadata, hash=False)
    return field(default=default, metadata=metadata)


def path_of(each: Field[Any]) -> str:
    """Full name of a setting, "table.key"; the key alone if it has no table."""
    table, key = each.metadata["table"], each.metadata["key"] or each.name
    return f"{table}.{key}" if table else str(key)


def key_of(each: Field[Any]) -> str:
    """Shortest name of a setting in a file; with dashes instead of underscores, its flag."""
    return str(each.metadata["table"]) if each.metadata["short"] else path_of(each)


def former_key(each: Field[Any]) -> str:
    """Name of a setting before it stood in a table, as run.json and the codes of errors have it."""
    return former_path(path_of(each))


def former_path(path: str) -> str:
    """The same for the full name of a setting, or of a part as "data.columns.text"."""
    return next((former for former, now in FORMER.items() if now == path), path)


def has_effect(each: Field[Any], task: str) -> bool:
    """True if a setting has an effect in runs of this task."""
    return not each.metadata["tasks"] or task in each.metadata["tasks"]


def refuse(each: Field[Any], value: Any) -> Problem | None:
    """Problem with a setting's value (wrong type or broken rule), or None."""
    if each.type is TABLE and each.metadata["parts"]:
        return _refuse_parts(each, value)
    rule = each.metadata["rule"]
    reason = _refuse_type(each.type, value)
    if not reason and rule and (broken := rule.refuse(value)):
        reason = f"must be {broken}"
    return ((each.name,), f"{key_of(each)} = {shown(value)}: {reason}.") if reason else None


def is_set(config: Any, name: str) -> bool:
    """True if a setting differs from its default."""
    return bool(getattr(config, name) != config.__dataclass_fields__[name].default)


def _refuse_parts(each: Field[Any], value: Any) -> Problem | None:
    """Problem with a table whose entries are parts, or with its first wrong entry, or None."""
    if not isinstance(value, Mapping):
        return (each.name,), f"{key_of(each)} = {shown(value)}: must be a table of name = text."
    for part, text in value.items():
        if not isinstance(part, str) or not part:
            return (each.name,), f"{key_of(each)} = {shown(value)}: must have names as text."
        if reason := _refuse_text(part) or _refuse_text(text):
            return (f"{each.name}.{part}",), f"{key_of(each)}.{part} = {shown(text)}: {reason}."
    return None


def _refuse_type(kind: Any, value: Any) -> str:
    """Reason why `value` is not of type `kind`, or ''.

    A bool is not an int, and a float is not an int.
    """
    if kind is str:
        return _refuse_text(value)
    if kind is TABLE:
        return _refuse_table(value)
    if kind is NUMBERS:
        is_pair = isinstance(value, tuple) and len(value) == 2
        is_pair = is_pair and not any(_refuse_type(float, each) for each in value)
        return "" if is_pair else "must be two finite numbers"
    # bool is a subclass of int.
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is bool:
        return "" if isinstance(value, bool) else "must be true or false"
    if kind is int:
        return "" if is_number and isinstance(value, int) else "must be a whole number"
    # Also rejects NaN, infinity, and integers too large for a float.
    return "" if is_number and abs(value) <= sys.float_info.max else "must be a finite number"


def _refuse_text(value: Any) -> str:
    if not isinstance(value, str):
        return "must be text"
    if "\0" in value:
        return "must not contain a zero byte"
    # Command-line bytes that are not UTF-8 become surrogates, which no file could store.
    return "must be valid Unicode" if re.search("[\ud800-\udfff]", value) else ""


def _refuse_table(value: Any) -> str:
    if not isinstance(value, Mapping):
        return "must be a table of pattern = recipe"
    for pattern, recipe in value.items():
        if isinstance(recipe, Mapping):
            return f'must hold recipes as text; write a pattern with dots in quotes: "{pattern}..." = "bf16"'
        words = _refuse_text(pattern) or _refuse_text(recipe) or recipe_syntax.refuse(recipe)
        if words or not pattern or not recipe:
            return words or "must have no empty pattern or recipe"
    return ""


def shown(value: Any) -> str:
    """A value in TOML notation for messages, shortened to 80 characters."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int) and abs(value) >= 10**20:
        # repr() of an int with more than 4,300 digits raises ValueError since Python 3.11.
        return f"{'-' if value < 0 else ''}a number of {int(math.log10(abs(value))) + 1} digits"
    if isinstance(value, tuple):
        value = list(value)
    text = ascii(value) if isinstance(value, str) and not value.isprintable() else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
