"""Every operator that the library registers with torch passes torch.library.opcheck (exact): schema, shapes of fake tensors, tracing.

`cast` and `cast_delayed` are checked in test_compiled_casts.py. `block_mm` and `int4_mm` have no kernel for the CPU. Triton's interpreter
stands in (tests/ops/triton/interpreted_products.py), and threads of the CPU (test_int4_units.py).
"""

from __future__ import annotations

import pytest
import torch

from narrowgauge.distributed import codes_in_graphs
from tests.ops.registries import registries

NAMESPACE = "narrowgauge::"


def registered() -> set[str]:
    return {name for name in torch._C._dispatch_get_all_op_names() if name.startswith(NAMESPACE)}


def test_every_operator_is_checked() -> None:
    registries()  # imports all modules that may register one
    names = ("block_mm", "cast", "cast_delayed", "gathered_codes", "int4_mm", "scaled_mm")
    assert registered() == {f"{NAMESPACE}{name}" for name in names}


@pytest.mark.parametrize("is_at_hand", [False, True])
def test_gathered_codes(is_at_hand: bool) -> None:
    class Weight:
        at_hand, others = torch.ones(6, 5, dtype=torch.uint8), torch.zeros(6, 5, dtype=torch.uint8)

        def bytes_of(self, which: str, records: bool) -> torch.Tensor:
            return self.at_hand if is_at_hand else self.others

    weight = Weight()
    given = (weight.at_hand, codes_in_graphs.numbered(weight), torch.randn(3, 6), "cols", True)
    torch.library.opcheck(torch.ops.narrowgauge.gathered_codes.default, given)


def test_scaled_mm() -> None:
    """Of the kinds that a CPU multiplies: one scale per tensor. The check of schemas multiplies FP8 by numbers, which torch does not."""
    lhs, rhs = (torch.randn(rows, 32).to(torch.float8_e4m3fn) for rows in (16, 48))
    kind, scale = torch.nn.functional.ScalingType.TensorWise.value, torch.ones(())
    given = (lhs, rhs, [scale], [kind], [], [scale], [kind], [], None, torch.bfloat16)
    torch.library.opcheck(torch.ops.narrowgauge.scaled_mm.default, given, test_utils=("test_faketensor",))
