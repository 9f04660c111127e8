"""The kernel of attention in E4M3, compiled without spilled registers; interpreted.py and tests/ptx run it."""

from __future__ import annotations

import pytest
import torch

from narrowgauge.ops import attention
from narrowgauge.ops.quantize import triton_launch
from tests.ops.triton.compiling import compiled


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sm", "width", "masked"),
    [(sm, 128, "bool") for sm in (89, 90, 100)] + [(100, 256, "causal")],
)
def test_it_compiles_without_spills(sm, width, masked):
    q, k, v = (torch.empty(1, heads, 512, width, dtype=torch.bfloat16) for heads in (8, 2, 2))
    mask = torch.ones(1, 1, 512, 512, dtype=torch.bool) if masked == "bool" else None
    found = compiled(
        [attention, triton_launch],
        sm,
        lambda: attention.run_triton(q, k, v, mask, mask is None, 0.125),
    )
    kernel = found["fp8_attention"]
    assert kernel.spills == 0, kernel.usage
    assert kernel.usage["SHARED"] <= (99 if sm == 89 else 227) * 1024
    # The products are the tensor cores', in FP8; tcgen05 has its formats in a descriptor.
    kinds = ("e4m3.e4m3", "kind::f8f6f4")
    assert any(
        "mma" in name and any(kind in name for kind in kinds) for name in kernel.instructions()
    )
