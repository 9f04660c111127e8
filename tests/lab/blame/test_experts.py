"""A fault in one expert of a mixture is named by expert and product (exact)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge import recipes
from narrowgauge.formats import E2M1
from narrowgauge.lab.blame import blame
from narrowgauge.recipe import GEMMS, Cast
from tests.lab.blame.planted import dropping, recast
from tests.selection import quick

transformers = pytest.importorskip("transformers", minversion="5")

IDS = torch.arange(96).reshape(4, 24) * 7 % 48
EXPERT = "model.layers.1.mlp.experts.2.down_proj"


def mixture(recipe: str = "fp8-current") -> nn.Module:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=48, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        num_local_experts=4, num_experts_per_tok=2, initializer_range=0.2, use_cache=False,
    )  # fmt: skip
    return ng.convert(transformers.MixtralForCausalLM(config), recipe)


def compute(model: nn.Module) -> Callable[[], Tensor]:
    def step() -> Tensor:
        logits = model(input_ids=IDS).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
        loss.backward()
        return loss.detach()

    return step


def expert_of(model: nn.Module) -> Any:
    return model.get_submodule(EXPERT)


@pytest.mark.parametrize("recipe", quick(["fp8-current"], recipes.names()))
def test_healthy_experts_have_no_suspect(recipe: str) -> None:
    model = mixture(recipe)
    found = blame(model, compute(model), confirm=0)
    assert not found.suspects, found
    named = {each.layer for each in found.findings}
    assert {
        f"model.layers.{layer}.mlp.experts.{expert}.{matrix}"
        for layer in (0, 1)
        for expert in range(4)
        for matrix in ("gate_up_proj", "down_proj")
    } <= named


@pytest.mark.parametrize("product", quick(["grad_input"], GEMMS))
@pytest.mark.parametrize("side", quick(["lhs"], ["lhs", "rhs"]))
def test_an_operand_of_too_few_bits_is_named_with_its_expert(product: str, side: str) -> None:
    model = mixture()
    recast(expert_of(model), product, side, Cast(format=E2M1))
    found = blame(model, compute(model), confirm=0)
    assert [each.name for each in found.suspects] == [f"{EXPERT}:{product}"]
    assert found.setting == f'recipe.layers = ["{EXPERT}=bf16:{product}"]'


@pytest.mark.parametrize("product", quick(["output"], GEMMS))
def test_a_kernel_that_drops_columns_of_one_expert_is_the_kernel(product: str) -> None:
    model = mixture()
    with dropping(expert_of(model), product, columns=8):
        found = blame(model, compute(model), confirm=0)
    [suspect] = found.suspects
    assert suspect.name == f"{EXPERT}:{product}" and suspect.reason.code == "kernel"


def test_the_line_that_blame_proposes_ends_the_fault() -> None:
    """The setting reaches one product of one expert, and no other."""
    model = mixture()
    expert = expert_of(model)
    recast(expert, "output", "rhs", Cast(format=E2M1))
    found = blame(model, compute(model))
    [confirmation] = found.confirmations
    assert confirmation.products == (f"{EXPERT}:output",) and confirmation.hurts is not False
    name, _, value = found.recipes[0].partition("=")
    mended = ng.convert(mixture(), {"*": "fp8-current", name: value})
    assert expert_of(mended).recipe.output == recipes.BF16.output
    assert expert_of(mended).recipe.grad_input == recipes.get("fp8-current").grad_input
    other = mended.get_submodule(EXPERT.replace(".2.", ".3."))
    assert other.recipe == recipes.get("fp8-current")
