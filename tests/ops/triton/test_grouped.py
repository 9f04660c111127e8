"""The kernels of all experts compile for every GPU without a spill, and who refuses what.

Numbers: interpreted_grouped.py, tests/ptx/proof.py.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from narrowgauge import recipes
from narrowgauge.ops.grouped import GroupSpec, choose, launches
from narrowgauge.ops.quantize import triton_launch
from narrowgauge.ops.registry import Device
from tests.ops.triton.compiling import TARGETS, Compiled, caught
from tests.selection import quick

pytest.importorskip("triton", reason="triton is not installed: nothing is compiled here")

EXPERTS, N, K = 8, 512, 1024
H100 = Device("cuda", (9, 0), cuda=(12, 9))


@pytest.mark.parametrize(
    ("recipe", "sm"),
    quick(
        [(recipes.FP8_ROW, 90)],
        [
            (recipe, sm)
            for recipe in (recipes.FP8_ROW, recipes.FP8_BLOCK)
            for sm in TARGETS
            if sm >= 89
        ],
    ),
    ids=str,
)
def test_they_compile_without_spills(recipe, sm):
    """Sizes of a training step: a full grid, several tiles of every axis, sums that are fast and split."""
    narrow = {"dtype": torch.bfloat16}
    x, gy = (torch.zeros(4096, each, **narrow) for each in (K, N))
    w, bias = torch.zeros(EXPERTS, N, K, **narrow), torch.zeros(EXPERTS, N, **narrow)
    counts = torch.full((EXPERTS + 1,), 512, dtype=torch.int32)
    found: list[Compiled] = []
    with caught([launches, triton_launch], sm, found):
        launches.passes(x, w, bias, gy, counts, (recipe.output.lhs, recipe.output.rhs))
        launches.clear_rest(gy, counts)
    assert {each.name for each in found} >= {"cast_groups", "grouped_mm", "grouped_grad"}
    assert not [(each.name, each.usage) for each in found if each.spills]


def spec(**changes: object) -> GroupSpec:
    row = recipes.FP8_ROW.output
    made = GroupSpec(row.lhs, row.rhs, H100, (torch.bfloat16,) * 3, EXPERTS, (N, K), False)
    return replace(made, **changes)


BLOCK, CURRENT, MX = (recipes.get(name).output for name in ("fp8-block", "fp8-current", "mxfp8"))


@pytest.mark.parametrize(
    ("changes", "kernel", "code"),
    [
        ({}, "native", ""),
        ({"biased": True}, "triton", "shape"),
        ({"dtypes": (torch.bfloat16, torch.float32, torch.bfloat16)}, "triton", "dtype"),
        ({"sizes": (N, K + 8)}, "triton", "shape"),
        ({"device": replace(H100, capability=(10, 0))}, "triton", "capability"),
        ({"x": BLOCK.lhs, "w": BLOCK.rhs}, "triton", ""),
        ({"x": CURRENT.lhs, "w": CURRENT.rhs}, "reference", "tile"),
        ({"x": MX.lhs, "w": MX.rhs}, "reference", "tile"),
        ({"x": None, "w": None}, "reference", "tile"),
        ({"sizes": (N + 64, K)}, "reference", "shape"),
        ({"experts": 1024}, "reference", "shape"),
        ({"dtypes": (torch.float64,) * 3}, "reference", "dtype"),
        ({"device": replace(H100, capability=(8, 0))}, "reference", "capability"),
        ({"device": Device("cpu")}, "reference", "device"),
        ({"device": replace(H100, wrapper="FakeTensor")}, "reference", "wrapper"),
    ],
    ids=str,
)
def test_who_takes_a_stack_and_why_not_another(changes, kernel, code, monkeypatch):
    """code: of the last refusal by a kernel that is made for such casts."""
    monkeypatch.setattr("narrowgauge.ops.triton.unavailable", lambda: "")
    choice = choose(spec(**changes))
    assert choice.kernel.name == kernel
    codes = [refusal.code for _, refusal in choice.relevant]
    assert (codes or [""])[-1] == code


def test_slots_suffice_for_every_division_of_the_rows():
    """Each expert may leave its last tile nearly empty."""
    for counts in ((1,) * 8, (129, 0, 1, 256), (0, 0, 0), (127,) * 3):
        tiles = sum(-(-count // launches.TILE) for count in counts)
        assert tiles <= launches.slots_for(sum(counts), len(counts))
