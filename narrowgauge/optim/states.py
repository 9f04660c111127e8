"""Names of state formats: one name for both moments, or "first/second" for any pair.

    name    first moment        second moment          bytes of one moment per parameter
    fp32    float32             float32                4
    fp16    float16, nearest    float16, stochastic    2.008
    8bit    e5m2                tapered8               1.008
    fp8     E4M3 of x^k         E4M3 of x^k            1.023
    e4m3    E4M3                E4M3                   1.008
    4bit    dynamic4            linear4                0.516

    8bit = "8bit/8bit", and so on; fp8-lm = "e4m3/fp16"; `states="4bit/fp16"` is another pair. A
    rule with one moment takes one name.

Both moments use the smaller of their two tiles (moments.py): beside fp8 or 4bit, a scale of two
bytes serves 128 elements instead of 256. The setting `states` of a run takes the same names, in a
file and on the command line.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

from narrowgauge.errors import OptionError, closest
from narrowgauge.optim import moments
from narrowgauge.optim.moments import Moment, States

FIRST: dict[str, Moment] = {
    "fp32": moments.WIDE, "fp16": moments.FP16_FIRST, "8bit": moments.E5M2, "fp8": moments.E4M3_FIRST,
    "e4m3": moments.E4M3, "4bit": moments.DYNAMIC4,
}  # fmt: skip
SECOND: dict[str, Moment] = {
    "fp32": moments.WIDE, "fp16": moments.FP16, "8bit": moments.TAPERED8, "fp8": moments.E4M3_SECOND,
    "e4m3": moments.E4M3_POSITIVE, "4bit": moments.LINEAR4,
}  # fmt: skip


@cache
def named(name: str) -> States:
    """Return the States of a name that `refuse` accepts."""
    if name in moments.STATES:
        return moments.STATES[name]
    first, slash, second = name.partition("/")
    kept = FIRST[first], SECOND[second if slash else first]
    return States(first=kept[0], second=kept[1], tile=min(each.tile for each in kept))


def is_known(name: str) -> bool:
    """Return True if `named` accepts the name."""
    first, slash, second = name.partition("/")
    return name in moments.STATES or (first in FIRST and (second if slash else first) in SECOND)


def refuse(kind: str, name: object, moments_of_rule: int) -> None:
    """Raise ConfigError for an unknown name, or for more moments than the rule keeps.

    kind: class name of the optimizer, for the message.
    """
    given = name if isinstance(name, str) else ""
    if given not in moments.STATES:
        parts: tuple[tuple[str, Mapping[str, object]], ...] = tuple(
            zip(given.split("/"), (FIRST, SECOND), strict=False)
        )
        wrong = [part for part, known in parts if part not in known]
        if not given or given.count("/") > 1 or wrong:
            names = [*moments.STATES, *(each for each in FIRST if each not in moments.STATES)]
            near = closest(str(wrong[0] if given and wrong else name), names) or ", ".join(
                map(repr, names)
            )
            pair = " A pair is 'first/second', as '8bit/fp16'." if "/" in given else ""
            raise OptionError(
                f"{kind}: no states {name!r}. Closest: {near}.{pair}", code="optim.states"
            )
    if "/" in given and moments_of_rule < 2:
        raise OptionError(
            f"{kind}: states = {name!r} names two moments, and the rule keeps {moments_of_rule}. Give one: states = "
            f"{given.partition('/')[0]!r}.",
            code="optim.two-moments",
        )


def same(one: object, other: object) -> bool:
    """Return True if two names mean the same states, such as "8bit" and "8bit/8bit"."""
    if one == other or not (isinstance(one, str) and isinstance(other, str)):
        return one == other
    try:
        return named(one) == named(other)
    # The state was saved elsewhere, with a name unknown here.
    except KeyError:
        return False
