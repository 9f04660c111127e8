"""The kernel of rotary embedding, compiled without spilled registers; interpreted.py and interpreted_products.py run it."""

from __future__ import annotations

import pytest
import torch

from narrowgauge.ops import rotary
from tests.ops.triton.compiling import TARGETS, compiled


@pytest.mark.slow
@pytest.mark.parametrize(
    ("head", "sm", "inverse"),
    [(head, sm, inverse) for head in (128, 80) for sm in TARGETS for inverse in (False, True)],
)
def test_it_compiles_without_spills(head, sm, inverse):
    q, k = (
        torch.empty(2, 512, heads, head, dtype=torch.bfloat16).transpose(1, 2) for heads in (32, 8)
    )
    cos, sin = (torch.empty(1, 512, head, dtype=torch.bfloat16) for _ in range(2))
    dtypes = (torch.bfloat16, torch.bfloat16)
    found = compiled([rotary], sm, lambda: rotary.run_triton(q, k, cos, sin, dtypes, inverse))
    assert list(found) == ["rotary"] and found["rotary"].spills == 0
    names = found["rotary"].instructions()
    # Below 9.0 a bfloat16 product or sum is an fma with zero or one.
    contracted = {name for name in names if name.startswith("fma")} - (
        {"fma.rn.bf16", "fma.rn.bf16x2"} if sm < 90 else set()
    )
    assert not contracted, "products are rounded before they are added"
    if head != 80:
        assert any(name.startswith("ld.global.v4") for name in names), "16 bytes per load"
