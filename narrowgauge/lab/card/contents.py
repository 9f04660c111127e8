"""What a report holds: the types and ranges of each fact and line that its page reads.

    refuse(report)    raises ConfigError that names the place, what stands there, and what belongs there

An archive comes from a stranger, so types are judged here, before the page is made. An exception of
the page after that is an error of the page, and stays one.

Keys that the page does not read are not judged: a later version may write more of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NamedTuple

from narrowgauge.lab.card import archive, steps
from narrowgauge.lab.card.process import PASS

if TYPE_CHECKING:
    from narrowgauge.lab.card.archive import Report

MOST = 1e18  # of any number: beyond it arithmetic in float64 may overflow
MOST_SIZE = 2**26  # of a number of rows, columns or tokens


class Kind(NamedTuple):
    """words  of what belongs there. holds  whether a value does."""

    words: str
    holds: Callable[[Any], bool]


def _is_number(value: Any) -> bool:
    # A bool is an int; NaN and infinity may be results.
    if isinstance(value, float):
        return not MOST < abs(value) < float("inf")
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) <= MOST


def _is_positive(value: Any) -> bool:
    return _is_number(value) and 1e-12 < value <= MOST


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MOST_SIZE


def _is_kernel(value: Any) -> bool:
    return isinstance(value, dict) and isinstance(value.get("name"), str) and _is_number(value.get("count"))  # fmt: skip


def _are_sizes(value: Any) -> bool:
    """Sizes of a Llama that can be built: whole heads, each of an even width."""
    if not isinstance(value, dict) or not value.keys() <= asdict(steps.Sizes()).keys():
        return False
    if not all(map(_is_size, value.values())):
        return False
    of = steps.Sizes(**value)
    return of.hidden % (2 * of.heads) == 0 and of.heads % of.key_heads == 0


def list_of(kind: Kind) -> Kind:
    return Kind(f"a list of {kind.words}s", lambda value: isinstance(value, list) and all(map(kind.holds, value)))  # fmt: skip


def or_null(kind: Kind) -> Kind:
    return Kind(f"{kind.words} or null", lambda value: value is None or kind.holds(value))


TEXT = Kind("a text", lambda value: isinstance(value, str))
NUMBER = Kind("a number", _is_number)
DURATION = Kind("a number from 0 on", lambda value: _is_number(value) and 0 <= value <= MOST)
POSITIVE = Kind("a number above 0", _is_positive)
SIZE = Kind(f"a whole number from 1 to {MOST_SIZE}", _is_size)
FLAG = Kind("true or false", lambda value: isinstance(value, bool))
OBJECT = Kind("an object", lambda value: isinstance(value, dict))
NUMBERS = Kind(
    "an object of numbers", lambda value: isinstance(value, dict) and all(map(_is_number, value.values()))
)  # fmt: skip
TEXTS = Kind(
    "an object of texts",
    lambda value: isinstance(value, dict) and all(each is None or isinstance(each, str) for each in value.values()),
)  # fmt: skip
KERNEL = Kind("kernel with name and count", _is_kernel)
SIZES = Kind("sizes of a Llama", _are_sizes)

Kinds = Mapping[str, Kind]

FACTS: Kinds = {"card": OBJECT, "versions": TEXTS, "started_at": TEXT}
CARD: Kinds = {
    "name": TEXT, "capability": list_of(NUMBER), "memory_bytes": POSITIVE, "processors": NUMBER, "cards": SIZE,
    "shows": TEXT,
}  # fmt: skip
# Where they are there.
OF_FACTS: Kinds = {"ended": TEXT}
OF_LINE: Kinds = {
    "why": TEXT, "at": TEXT, "output": TEXT, "seconds": DURATION, "driver": or_null(TEXT),
    "sm_mhz": or_null(NUMBER), "temperature_c": or_null(NUMBER), "power_w": or_null(NUMBER),
    "kernels": list_of(KERNEL), "backend": list_of(TEXT), "median_s": POSITIVE, "peak_bytes": POSITIVE, "parts_s": NUMBERS,
    "error_db": NUMBER, "arguments": OBJECT,
}  # fmt: skip
# Of a line with a measurement, by its part.
MEASURED = {"linear": "median_s", "layer": "median_s", "step": "median_s", "optimizer": "median_s", "communication": "hidden"}  # fmt: skip
NEEDED: Mapping[str, Kinds] = {
    "linear": {"arguments": OBJECT},
    "layer": {"arguments": OBJECT},
    "step": {"arguments": OBJECT},
    "optimizer": {"state_bytes": DURATION, "parameters": POSITIVE},
    "communication": {"hidden": NUMBER, "compute_s": NUMBER, "communication_s": NUMBER, "both_s": NUMBER},
    "rates": {"copy": POSITIVE, "bf16": POSITIVE, "fp8": or_null(POSITIVE)},
}  # fmt: skip
ARGUMENTS: Mapping[str, Kinds] = {
    "linear": {"tokens": SIZE, "inputs": SIZE, "outputs": SIZE, "contender": TEXT},
    "layer": {"compiled": FLAG, "contender": TEXT},
    "step": {"compiled": FLAG, "contender": TEXT},
}
OF_ARGUMENTS: Kinds = {"sizes": SIZES}


def refuse(report: Report) -> None:
    """Raises ConfigError for the first fact or line that no report of this version writes."""
    for problem in _problems(report):
        raise archive.damaged(report.source, problem)


def _problems(report: Report) -> Iterator[str]:
    yield from _needed(report.facts, FACTS, archive.REPORT)
    yield from _judged(report.facts, OF_FACTS, archive.REPORT)
    yield from _needed(report.facts["card"], CARD, f"{archive.REPORT}, card")
    for number, line in enumerate(report.lines, 1):
        part, place = line["part"], f"{archive.LINES}, line {number}"
        yield from _judged(line, OF_LINE, place)
        if line["status"] == PASS if part == "rates" else MEASURED.get(part) in line:
            yield from _needed(line, NEEDED[part], place)
            given = line.get("arguments", {})
            yield from _needed(given, ARGUMENTS.get(part, {}), f"{place}, arguments")
            yield from _judged(given, OF_ARGUMENTS, f"{place}, arguments")


def _needed(values: Mapping[str, Any], kinds: Kinds, place: str) -> Iterator[str]:
    for key in kinds:
        if key not in values:
            yield f"{place}: has no {key}"
    yield from _judged(values, kinds, place)


def _judged(values: Mapping[str, Any], kinds: Kinds, place: str) -> Iterator[str]:
    """A sentence for each key that is there and holds something else."""
    for key, kind in kinds.items():
        if key in values and not kind.holds(values[key]):
            yield f"{place}: {key} = {str(values[key])[:60]!r} is not {kind.words}"
