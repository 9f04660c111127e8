"""Fixtures of the tests of fusing."""

from __future__ import annotations

import pytest

from narrowgauge.ops.norm_act import cpp


@pytest.fixture
def no_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where no compiler is installed: no kernel computes norms and activations on a CPU."""
    monkeypatch.setitem(vars(cpp.LIBRARY), "missing", "switched off by a test")
