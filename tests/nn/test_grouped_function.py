"""Which stacks of experts are multiplied in one launch, and which one after another.

Numbers: tests/ops/triton/interpreted_grouped.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge import recipes
from narrowgauge.cuda_graphs import refuse_run
from narrowgauge.errors import Reason, ShapeError
from narrowgauge.nn import grouped_function
from narrowgauge.nn.experts import GroupedExperts
from narrowgauge.nn.frozen_experts import store_stack_as_codes
from narrowgauge.nn.grouped_linear import RowCounts
from narrowgauge.nn.linear import QLinear
from narrowgauge.ops.grouped import KERNELS
from narrowgauge.ops.registry import KernelChoice
from narrowgauge.recipe import Gemm
from tests.nn.test_grouped_linear import experts

[TRITON] = (kernel for kernel in KERNELS.kernels if kernel.name == "triton")
ROW, BLOCK = recipes.FP8_ROW, recipes.FP8_BLOCK


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels of a GPU take every stack, and no product of one expert is emulated."""
    own = QLinear.plan

    def plan(layer: QLinear, *given: Any) -> Any:
        found = own(layer, *given)
        return replace(found, w=replace(found.w, rows_expand=None, cols_expand=None, kernels={}))

    monkeypatch.setattr(grouped_function, "choose", lambda spec: KernelChoice(TRITON, ()))
    monkeypatch.setattr(QLinear, "plan", plan)


def converted(recipe: Any = "fp8-row") -> Any:
    model = nn.ModuleList([experts()])
    ng.convert(model, recipe)
    return model[0]


def asked(module: GroupedExperts, name: str = "gate_up_proj") -> str:
    """The kernel, or the code of the reason."""
    found = module.kernel_of(name)
    return found.code if isinstance(found, Reason) else found


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (ROW, "triton"),
        (BLOCK, "triton"),
        (BLOCK.with_gemm(grad_weight=Gemm()), "experts-formats"),
        (ROW.with_gemm(grad_weight=recipes.FP8_CURRENT.grad_weight), "experts-formats"),
        (
            ROW.with_gemm(grad_input=replace(ROW.grad_input, rhs=BLOCK.output.rhs)),
            "experts-formats",
        ),
        (recipes.FP8_CURRENT, "experts-formats"),
        (recipes.get("fp8-delayed"), "experts-state"),
        (recipes.get("quartet2"), "experts-state"),
        (recipes.get("int4-hq-bs"), "experts-state"),
    ],
    ids=lambda each: getattr(each, "name", each),
)
def test_a_recipe_whose_products_agree_is_grouped(on_a_gpu, recipe, expected):
    assert asked(converted(recipe)) == expected


def test_equal_recipes_of_a_stack_are_one(on_a_gpu):
    module = converted()
    for layer in module.slices("gate_up_proj"):
        layer.recipe = replace(ROW)
    assert asked(module) == "triton"


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda layer: setattr(layer, "recipe", BLOCK), "experts-recipes"),
        (lambda layer: setattr(layer, "is_suspended", True), "experts-recipes"),
        (lambda layer: setattr(layer, "observer", lambda *seen: None), "experts-watched"),
        (lambda layer: layer.register_forward_hook(lambda *seen: None), "experts-watched"),
        (lambda layer: layer.register_full_backward_hook(lambda *seen: None), "experts-watched"),
        (lambda layer: setattr(layer.state, "gathered", object()), "experts-codes"),
    ],
)
def test_one_expert_that_differs_means_the_loop(on_a_gpu, change, expected):
    module = converted()
    change(module.slices("gate_up_proj")[2])
    assert asked(module) == expected and asked(module, "down_proj") == "triton"
    assert module.why_looped().code == expected


@pytest.mark.parametrize(("recipe", "expected"), [("fp8-block", "triton"), ("fp8-row", "experts-codes")])  # fmt: skip
def test_frozen_codes_are_grouped_if_they_transpose(on_a_gpu, recipe, expected):
    """Numbers: tests/ops/triton/interpreted_grouped.py."""
    module = converted(recipe)
    module.down_proj.requires_grad_(False)
    store_stack_as_codes(module, "down_proj")
    assert asked(module, "down_proj") == expected and asked(module) == "triton"
    if expected == "triton":  # an expert whose codes come from elsewhere
        module.slices("down_proj")[1].put_submodule("frozen", None)
        module.slices("down_proj")[1].state.gathered = object()
        assert asked(module, "down_proj") == "experts-codes"


def test_other_memory_means_the_loop(on_a_gpu):
    module = converted()
    module.gate_up_proj.data = module.gate_up_proj.data.transpose(1, 2).contiguous().transpose(1, 2)
    assert asked(module) == "experts-memory"


def test_products_that_are_emulated_mean_the_loop(monkeypatch):
    """As after a self-check that a kernel for single Linears failed."""
    monkeypatch.setattr(grouped_function, "choose", lambda spec: KernelChoice(TRITON, ()))
    assert asked(converted()) == "experts-emulated"


def test_cuda_graphs_take_grouped_experts_and_no_loop(on_a_gpu):
    module = converted()
    model = nn.ModuleList([module])
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    assert "experts" not in [each.code for each in refuse_run(model, optimizer)]
    module.slices("down_proj")[0].register_forward_hook(lambda *seen: None)
    assert "experts" in [each.code for each in refuse_run(model, optimizer)]


def test_a_wrong_width_is_an_error_of_the_loop(on_a_gpu):
    """No launch reads beyond a row: neither with rows too short nor too long."""
    module = converted()
    for width in (16, 48):
        x, index = torch.randn(8, width), torch.zeros(8, 1, dtype=torch.int64)
        with pytest.raises(ShapeError):
            module(x, index, torch.ones(8, 1))


def test_rows_are_counted_with_those_without_an_expert():
    found = RowCounts.of(torch.tensor([3, 0, 3, 1, 9, 4, 3]), 4)
    assert found.on_device.tolist() == [1, 1, 0, 3, 2] and found.on_host == [1, 1, 0, 3]
    found = RowCounts.equal(14, 4, torch.device("cpu"))
    assert found.on_device.tolist() == [3, 3, 3, 3, 2] and found.on_host == [3, 3, 3, 3]
