"""The kernel of rotary embedding: its proof in Triton's interpreter (exact), and compiled without spilled registers."""

from __future__ import annotations

import pytest
import torch

from narrowgauge.ops import rotary
from tests.ops.triton.compiling import TARGETS, compiled
from tests.processes import PYTHON, run_ok

from narrowgauge.ops.triton import launch as launching  # isort: skip

PROOF = """
import torch
from narrowgauge.ops import rotary
wide, half = torch.float32, torch.float16
for dtypes in ((wide,) * 4, (half,) * 4, (half, half, wide, wide)):
    for head in (8, 80):
        worst, reason = rotary.compare(dtypes, head, torch.device("cpu"))
        assert reason is None, (dtypes, head, reason)
rotary.ELEMENTS = 32  # two heads at a time, of five and two
worst, reason = rotary.compare((half,) * 4, 8, torch.device("cpu"))
assert reason is None, reason
print("passed")
"""


def test_it_passes_its_proof_in_the_interpreter(monkeypatch):
    """Heads of a power of two and others, more of them than a program takes at a time; not bfloat16, to which it rounds wrongly."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert "passed" in run_ok([PYTHON, "-W", "ignore", "-c", PROOF], timeout_s=280).stdout


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("sm", TARGETS)
@pytest.mark.parametrize("head", [128, 80])
def test_it_compiles_without_spills(head, sm, inverse):
    q, k = (torch.empty(2, 512, heads, head, dtype=torch.bfloat16).transpose(1, 2) for heads in (32, 8))
    cos, sin = (torch.empty(1, 512, head, dtype=torch.bfloat16) for _ in range(2))
    dtypes = (torch.bfloat16, torch.bfloat16)
    found = compiled([launching], sm, lambda: rotary.in_triton(q, k, cos, sin, dtypes, inverse))
    assert list(found) == ["rotary"] and found["rotary"].spills == 0
    names = found["rotary"].instructions()
    # Below 9.0 a bfloat16 product or sum is an fma with zero or one.
    contracted = {name for name in names if name.startswith("fma")} - (
        {"fma.rn.bf16", "fma.rn.bf16x2"} if sm < 90 else set()
    )
    assert not contracted, "products are rounded before they are added"
    if head != 80:
        assert any(name.startswith("ld.global.v4") for name in names), "16 bytes per load"
