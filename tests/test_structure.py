"""Which names a pattern means (exact)."""

from __future__ import annotations

import pytest

from narrowgauge.errors import ConfigError
from narrowgauge.structure import expanded, matches
from tests.raising import raises


@pytest.mark.parametrize(
    ("name", "pattern", "expected"),
    [
        ("model.layers.0.mlp.up_proj", "mlp.up_proj", True),
        ("model.layers.0.mlp.up_proj", "layers.*", True),
        ("model.layers.0.mlp.up_proj", "up", False),
        ("model.layers.0.mlp.up_proj", "*up*", True),
        ("model.layers.3", "layers.0-3", True),
        ("model.layers.4", "layers.0-3", False),
        ("model.layers.13", "layers.0-3", False),
        ("model.layers.2.mlp", "layers.1-2.mlp", True),
        ("h.1.experts.7", "h.0-1.experts.5-8", True),
        ("model.layers.0-3", "layers.0-3", False),
    ],
)
def test_matching(name, pattern, expected):
    assert matches(name, pattern) is expected


def test_a_range_is_each_of_its_numbers():
    assert expanded("a.2-4.b") == ["a.2.b", "a.3.b", "a.4.b"]
    assert expanded("a.7-7") == ["a.7"]
    assert expanded("a-1.b") == ["a-1.b"]


@pytest.mark.parametrize("pattern", ["layers.3-1", "layers.0-99999999"])
def test_a_range_that_makes_no_sense_is_refused(pattern):
    with raises(ConfigError, "pattern.range"):
        expanded(pattern)
