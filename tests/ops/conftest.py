"""What tests of several ops share."""

from __future__ import annotations

import pytest
import torch

from narrowgauge.ops.registry import device_facts


@pytest.fixture
def exact_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exact torch._int_mm. On x86 without VNNI oneDNN adds pairs of products in 16 bits; there the registry takes another kernel."""
    if not device_facts("cpu", None).int8_gemm:
        monkeypatch.setattr(torch, "_int_mm", lambda a, b: a.to(torch.int32) @ b.to(torch.int32))
