"""The ladder of precisions (exact)."""

from __future__ import annotations

import pytest

from narrowgauge.errors import ConfigError
from narrowgauge.optim import PRECISIONS, precision


def test_every_rung_has_its_name_and_an_unknown_one_the_closest() -> None:
    assert list(PRECISIONS) == ["fp32", "amp-bf16", "amp-fp16", "bf16-o2", "bf16-o3"]
    with pytest.raises(ConfigError, match=r"no precision 'bf16-02'. Closest: 'bf16-o2'"):
        precision.get("bf16-02")
