"""Every operator that the library registers with torch passes torch.library.opcheck (exact): schema, shapes of fake tensors, tracing.

`block_mm` has no kernel for the CPU. There Triton's interpreter stands in (tests/ops/triton/interpreted_products.py).
"""

from __future__ import annotations

import torch

from tests.ops.registries import registries

NAMESPACE = "narrowgauge::"
INTERPRETED = {"narrowgauge::block_mm"}


def registered() -> set[str]:
    return {name for name in torch._C._dispatch_get_all_op_names() if name.startswith(NAMESPACE)}


def test_every_operator_is_checked() -> None:
    registries()  # imports all modules that may register one
    assert registered() == INTERPRETED
