"""Every operator that the library registers with torch passes torch.library.opcheck (exact): schema, shapes of fake tensors, tracing.

`block_mm` has no kernel for the CPU. There Triton's interpreter stands in, in a process of its own.
"""

from __future__ import annotations

import pytest
import torch

from tests.ops.registries import registries
from tests.processes import PYTHON, run_ok

NAMESPACE = "narrowgauge::"
INTERPRETED = {"narrowgauge::block_mm"}

CHECK_BLOCK_MM = """
import torch
from narrowgauge.ops.mm import triton
torch.library.impl("narrowgauge::block_mm", "CPU", triton.launch)
for m, n, k, tiles in ((33, 70, 130, (1, 128, 128, 128)), (40, 20, 200, (1, 64, 64, 64))):
    for bias in (None, torch.randn(n)):
        operands = [torch.randn(rows, k) for rows in (m, n)]
        scales = [torch.rand(-(-rows // a), -(-k // b)) for rows, (a, b) in ((m, tiles[:2]), (n, tiles[2:]))]
        given = (operands[0], scales[0], operands[1], scales[1], bias, list(tiles), torch.bfloat16)
        torch.library.opcheck(torch.ops.narrowgauge.block_mm.default, given)
print("passed")
"""


def registered() -> set[str]:
    return {name for name in torch._C._dispatch_get_all_op_names() if name.startswith(NAMESPACE)}


def test_every_operator_is_checked() -> None:
    registries()  # imports all modules that may register one
    assert registered() == INTERPRETED


def test_the_triton_product_keeps_torchs_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "passed" in run_ok([PYTHON, "-W", "ignore", "-c", CHECK_BLOCK_MM]).stdout
