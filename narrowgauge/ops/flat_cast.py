"""Encode a Cast as a tuple of strings and numbers.

torch.compile accepts no frozen dataclass as an argument of a constant function before torch 2.13,
and operator schemas accept none in any version. Both take this tuple instead.

The tuple describes `plain(cast)`: a kernel depends neither on the source of the amax nor on the
rounding mode. Formats and scale rules that narrowgauge does not define cannot be encoded.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from narrowgauge.formats import ALL
from narrowgauge.recipe import CURRENT, Cast
from narrowgauge.scaling import RULES

FlatCast = tuple[str, tuple[int, int], str, float]

_FORMATS = {each.name: each for each in ALL}
_RULES = {each.name: each for each in RULES}


def plain(cast: Cast) -> Cast:
    """Return the cast with current scaling and rounding to nearest, as self-checks use it."""
    return replace(cast, calibrate=CURRENT, rounding="nearest")


def is_flattenable(cast: Cast) -> bool:
    """Return True if narrowgauge defines the format and the scale rule under these names."""
    # Compared by value: a user's format may have the name of one of ours.
    return (
        _FORMATS.get(cast.format.name) == cast.format and _RULES.get(cast.scale.name) == cast.scale
    )


def flatten_cast(cast: Cast) -> FlatCast:
    """Return (format name, tile, name of the scale rule, headroom)."""
    return cast.format.name, cast.tile, cast.scale.name, cast.headroom


@cache
def unflatten_cast(format: str, tile: tuple[int, int], rule: str, headroom: float) -> Cast:
    """Return the cast that the tuple describes, in the form of `plain`."""
    return Cast(format=_FORMATS[format], tile=tile, scale=_RULES[rule], headroom=headroom)
