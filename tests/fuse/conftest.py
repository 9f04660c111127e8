"""Fixtures of the tests of fusing."""

from __future__ import annotations

import pytest

from narrowgauge.ops.attention16 import cpp as attention
from narrowgauge.ops.cross_entropy import cpp as loss
from narrowgauge.ops.norm_act import cpp
from narrowgauge.ops.rotary import cpp as rotary


@pytest.fixture
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where no compiler is installed: no kernel runs on a CPU."""
    for each in (cpp, rotary, attention, loss):
        monkeypatch.setitem(vars(each.LIBRARY), "missing", "switched off by a test")
