"""Where products read FP8 codes in every layout (10.x), a tensor is cast once: the numbers of a layer stay (exact), and what it moves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import narrowgauge as ng
from narrowgauge.conversion.measure import LinearWorkload
from narrowgauge.conversion.predict import counted
from narrowgauge.nn.linear import QLinear
from narrowgauge.ops.mm import KERNELS, cublas
from narrowgauge.ops.registry import KernelChoice
from narrowgauge.ops.timing.cards import card
from tests.compare import assert_same

[NATIVE] = (kernel for kernel in KERNELS.kernels if kernel.name == "native")
RECIPES = ["fp8-current", "fp8-delayed", "fp8-current-fast"]


def trained(recipe: str, turns_freely: bool, codes: str, monkeypatch: Any) -> list[Tensor]:
    """Two steps of two micro-batches of a Linear whose products are torch's, on codes; and the gradients of each."""
    own = QLinear.plan

    def plan(layer: QLinear, *given: Any) -> Any:
        found = own(layer, *given)
        products = ("output", "grad_input", "grad_weight")
        ours = {
            name: replace(getattr(found, name), choice=KernelChoice(NATIVE, ()), expand=None)
            for name in products
        }
        changes = {"rows_expand": None, "cols_expand": None, "turns_freely": turns_freely}
        changes |= {"pairs": True, "transposes": True}
        operands = {
            role: replace(getattr(found, role), kernels={}, **changes) for role in ("x", "w", "gy")
        }
        return replace(found, **ours, **operands)

    monkeypatch.setattr(QLinear, "plan", plan)
    monkeypatch.setattr(cublas, "takes_every_layout", lambda device: turns_freely)
    torch.manual_seed(2)
    layer = torch.nn.Linear(96, 80, dtype=torch.bfloat16)
    model = torch.nn.Sequential(layer)
    ng.convert(model, recipe, weight_codes=codes)
    found = []
    for _ in range(2):
        for _ in range(2):
            x = torch.randn(64, 96, dtype=torch.bfloat16, requires_grad=True)
            y = model(x)
            y.backward(torch.randn_like(y))
            found += [y.detach(), x.grad, model[0].weight.grad.clone()]
        ng.advance(model)
    return found


@pytest.mark.parametrize("codes", ["recast", "step"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_layer_computes_the_same(recipe, codes, monkeypatch):
    seen = []
    run = torch._scaled_mm

    def watched(a: Tensor, b: Tensor, *given: Any, **named: Any) -> Tensor:
        seen.append(a.stride(1) != 1 or b.stride(0) != 1)
        return run(a, b, *given, **named)

    monkeypatch.setattr(torch, "_scaled_mm", watched)
    plain = trained(recipe, False, codes, monkeypatch)
    assert not any(seen), "codes of one orientation were read as a view"
    seen.clear()
    for ours, theirs in zip(trained(recipe, True, codes, monkeypatch), plain, strict=True):
        assert_same(ours, theirs)
    # grad_input reads w so, grad_weight gy and x.
    assert sum(seen) >= 8, seen


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_a_linear_moves_on_a_b200(recipe):
    """Codes of x and gy once, as bytes; on an H100 twice."""
    tokens, width = 8192, 4096
    workload = LinearWorkload(tokens=tokens, inputs=width, outputs=width, dtype=torch.bfloat16)
    moved = [
        sum(each.nbytes for each in counted(workload, recipe, card(key)) if each.kind == "casts")
        for key in ("h100", "b200", "rtx-5090")
    ]
    assert moved[0] - moved[1] == 2 * tokens * width
    assert moved[2] == moved[0], "cuBLAS of 12.x takes one layout"


def test_codes_that_have_to_be_filled_up_are_stored(monkeypatch):
    """Sizes that are no multiple of 16, where the product pads its operands."""
    monkeypatch.setattr(cublas, "takes_every_layout", lambda device: True)
    cast = ng.recipes.get("fp8-current").output.lhs
    a, b = (ng.quantize(torch.randn(size, 33), cast) for size in (40, 24))
    a, b = (each.compact() if each.is_expanded else each for each in (a, b))
    views = [replace(each, data=each.data.t().contiguous().t()) for each in (a, b)]
    given = None, torch.float32, True
    assert_same(cublas.run_scaled(*views, *given), cublas.run_scaled(a, b, *given))
