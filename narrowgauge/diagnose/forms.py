"""Validate the values of a JSON file against a form; an error names the place and the value.

EVAL = record({"step": number(1, whole=True), "loss": number()}, {"tokens": number(0, whole=True)})
refuse({"step": -1, "loss": 8.3}, EVAL)   ->  "step = -1 is not a whole number of at least 1"
refuse({"step": 1, "loss": 8.3}, EVAL)    ->  ""
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

# Returns '' for a valid value, else the end of a clause such as " = -1 is not a whole number".
Form = Callable[[Any], str]


def refuse(value: Any, form: Form) -> str:
    """Clause that describes the error in `value`, or ''."""
    return form(value).removeprefix(".").strip()


def leaf(valid: Callable[[Any], bool], words: str) -> Form:
    """A value for which `valid` is true; the error reads "is not <words>"."""
    return lambda value: "" if valid(value) else f" = {shown(value)} is not {words}"


def parts(kind: type, words: str, split: Callable[[Any], Iterable[tuple[str, Form, Any]]]) -> Form:
    """A container of type `kind`; each of its parts (place, form, value) must match its form."""

    def check(value: Any) -> str:
        if not isinstance(value, kind):
            return f" = {shown(value)} is not {words}"
        return next(
            (place + wrong for place, form, each in split(value) if (wrong := form(each))), ""
        )

    return check


def number(
    low: float = -math.inf, high: float = math.inf, *, whole: bool = False, finite: bool = True
) -> Form:
    """A number from `low` to `high`. finite=False allows NaN and infinity."""
    limits = f" of at least {low:g}" if high == math.inf else f" from {low:g} to {high:g}"

    def valid(value: Any) -> bool:
        if not isinstance(value, int if whole else int | float) or isinstance(value, bool):
            return False
        # `not value < low` lets NaN pass and still refuses -inf for numbers of at least `low`.
        return low <= value <= high if math.isfinite(value) else not finite and not value < low

    return leaf(valid, f"a {'whole ' if whole else ''}number{limits if low > -math.inf else ''}")


def one_of(*choices: Any) -> Form:
    return leaf(lambda value: value in choices, f"one of {', '.join(map(repr, choices))}")


def either(*forms: Form) -> Form:
    """Any of the forms; the first one describes an error."""
    return lambda value: "" if any(not form(value) for form in forms) else forms[0](value)


def listed(form: Form) -> Form:
    return parts(
        list,
        "a list",
        lambda value: ((f"[{place}]", form, each) for place, each in enumerate(value)),
    )


def table(form: Form) -> Form:
    """A mapping with any keys, whose values match one form."""
    return parts(
        Mapping, "a table", lambda value: ((f".{key}", form, each) for key, each in value.items())
    )


def record(required: Mapping[str, Form], optional: Mapping[str, Form] | None = None) -> Form:
    """A mapping with `required` and `optional` keys; other keys may have any value."""
    forms = {**required, **(optional or {})}

    def split(value: Mapping[str, Any]) -> Iterator[tuple[str, Form, Any]]:
        if missing := [key for key in required if key not in value]:
            yield "", lambda _: f" has no {', '.join(map(repr, missing))}", None
        yield from ((f".{key}", form, value[key]) for key, form in forms.items() if key in value)

    return parts(Mapping, "a table", split)


def shown(value: Any) -> str:
    """Short text for a value, at most 60 characters; dtype and shape for a tensor."""
    if hasattr(value, "dtype"):
        return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    return (
        ascii(value)
        if isinstance(value, str | int | float) and len(str(value)) <= 60
        else reprlib.repr(value)
    )


text = leaf(lambda value: isinstance(value, str), "text")
anything = leaf(lambda value: True, "anything")
