"""Checks the values of a JSON file against a form, and says what is wrong.

EVAL = record({"step": number(1, whole=True), "loss": number()}, {"tokens": number(0, whole=True)})
refuse({"step": -1, "loss": 8.3}, EVAL)   ->  "step = -1 is not a whole number of at least 1"
refuse({"step": 1, "loss": 8.3}, EVAL)    ->  ""
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterable, Mapping
from typing import Any

# '' for a valid value, else the end of a clause: " = -1 is not ...", ".step = -1 is not ..."
Form = Callable[[Any], str]


def refuse(value: Any, form: Form) -> str:
    """A clause that says what is wrong with `value`, or ''."""
    return form(value).removeprefix(".").strip()


def number(low: float = -math.inf, high: float = math.inf, *, whole: bool = False, finite: bool = True) -> Form:
    """A number from `low` to `high`. finite=False allows NaN and infinity."""
    kind = "whole number" if whole else "number"
    limits = f" of at least {low:g}" if high == math.inf else f" from {low:g} to {high:g}"
    words = f"a {kind}{limits if low > -math.inf else ''}"

    def check(value: Any) -> str:
        is_number = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
        if is_number and (low <= value <= high if math.isfinite(value) else not finite and not value < low):
            return ""
        return f" = {shown(value)} is not {words}"

    return check


def anything(value: Any) -> str:
    return ""


def text(value: Any) -> str:
    return "" if isinstance(value, str) else f" = {shown(value)} is not text"


def one_of(*choices: Any) -> Form:
    return lambda value: "" if value in choices else f" = {shown(value)} is not one of {', '.join(map(repr, choices))}"


def either(*forms: Form) -> Form:
    """Any of the forms; the first one describes an error."""
    return lambda value: "" if any(not form(value) for form in forms) else forms[0](value)


def listed(form: Form) -> Form:
    def check(value: Any) -> str:
        if not isinstance(value, list):
            return f" = {shown(value)} is not a list"
        return first_problem((f"[{place}]", form, each) for place, each in enumerate(value))

    return check


def table(form: Form) -> Form:
    """A mapping with any keys, whose values have one form."""

    def check(value: Any) -> str:
        if not isinstance(value, Mapping):
            return f" = {shown(value)} is not a table"
        return first_problem((f".{key}", form, each) for key, each in value.items())

    return check


def record(required: Mapping[str, Form], optional: Mapping[str, Form] | None = None) -> Form:
    """A mapping with `required` and `optional` keys; other keys may hold anything."""
    forms = {**required, **(optional or {})}

    def check(value: Any) -> str:
        if not isinstance(value, Mapping):
            return f" = {shown(value)} is not a table"
        if missing := [key for key in required if key not in value]:
            return f" has no {', '.join(map(repr, missing))}"
        return first_problem((f".{key}", form, value[key]) for key, form in forms.items() if key in value)

    return check


def first_problem(parts: Iterable[tuple[str, Form, Any]]) -> str:
    """The first of (place, form, value) whose value is wrong, or ''."""
    return next((place + words for place, form, value in parts if (words := form(value))), "")


def shown(value: Any) -> str:
    """A short text for a value: dtype and shape of a tensor, at most 60 characters."""
    if hasattr(value, "dtype"):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return ascii(value) if isinstance(value, str | int | float) and len(str(value)) <= 60 else reprlib.repr(value)
