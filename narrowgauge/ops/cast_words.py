"""A cast in words and numbers: what torch.compile hands to functions of constants before torch 2.13, and to operators at all.

Of a cast a kernel sees what `plain` leaves: not where its amax came from, nor how it rounds. Formats and scale rules that are not
narrowgauge's own have no words.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from narrowgauge.formats import ALL
from narrowgauge.recipe import CURRENT, Cast
from narrowgauge.scaling import RULES

Words = tuple[str, tuple[int, int], str, float]

_FORMATS = {each.name: each for each in ALL}
_RULES = {each.name: each for each in RULES}


def plain(cast: Cast) -> Cast:
    """See the module."""
    return replace(cast, calibrate=CURRENT, rounding="nearest")


def has_words(cast: Cast) -> bool:
    """Whether words name the cast: format and scale rule are what narrowgauge has under these names."""
    return _FORMATS.get(cast.format.name) == cast.format and _RULES.get(cast.scale.name) == cast.scale


def as_words(cast: Cast) -> Words:
    """(format, tile, scale rule, headroom)"""
    return cast.format.name, cast.tile, cast.scale.name, cast.headroom


@cache
def of_words(format: str, tile: tuple[int, int], rule: str, headroom: float) -> Cast:
    """The cast behind the words, as `plain` has it."""
    return Cast(format=_FORMATS[format], tile=tile, scale=_RULES[rule], headroom=headroom)
