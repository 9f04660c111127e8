"""Strips of spreads: a box for each octave, at its place and as dark as its share (exact)."""

from __future__ import annotations

import re

from narrowgauge.report.spread_table import BOX, WIDEST, axis, natural, strip

SPREAD = {"lowest_exponent": -1, "counts": [1, 2, 1]}


def boxes(svg: str) -> list[tuple[float, float]]:
    """(place, opacity) of each box."""
    found = re.findall(r'<rect x="([\d.-]+)" .*?opacity="([\d.]+)"', svg)
    return [(float(place), float(opacity)) for place, opacity in found]


def test_every_octave_has_its_box():
    """The area of the ink is the share: its opacity is the root, 1/4 and 1/2 here."""
    assert boxes(strip(SPREAD, (-1, 1))) == [(0, 0.5), (BOX, 0.71), (2 * BOX, 0.5)]
    assert f'width="{3 * BOX}"' in strip(SPREAD, (-1, 1))


def test_what_lies_beyond_the_axis_is_counted_at_its_ends():
    assert boxes(strip(SPREAD, (0, 0))) == [(0, 1.0)]
    assert boxes(strip(SPREAD, (0, 4))) == [(0, 0.87), (BOX, 0.5)]


def test_strips_of_a_column_share_an_axis_that_is_not_too_wide():
    assert axis([SPREAD, {"lowest_exponent": 3, "counts": [4, 1]}]) == (-1, 4)
    assert axis([SPREAD, {"lowest_exponent": 30, "counts": [4]}]) == (30 - WIDEST + 1, 30)
    assert axis([{"lowest_exponent": 0, "counts": []}]) == (0, 0)


def test_layers_are_in_the_order_of_their_numbers():
    names = ["layers.10.up", "layers.2.up", "layers.2.down"]
    assert sorted(names, key=natural) == ["layers.2.down", "layers.2.up", "layers.10.up"]
