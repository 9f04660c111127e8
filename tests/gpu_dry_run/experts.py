"""The experts of one layer, eager, forward and backward: 8,192 tokens, in bfloat16.

Mixtral has 8 experts of 14,336 by 4,096, two for each token; Llama 4 Scout's sizes are 16 experts of 8,192 by 5,120, one for each token.
Counted is the third step. The router is left out: its choice is made before. bf16 is transformers' `grouped_mm`, with torch's grouped
products. The empty runtime has no numbers, so no loop over experts, whose launches depend on them, is counted.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

import narrowgauge as ng
from tests.gpu_dry_run import log, runtime, tally
from tests.gpu_dry_run.log import Summary
from tests.gpu_dry_run.operator_bytes import OperatorBytes
from tests.gpu_dry_run.tally import Case, Numbers

TOKENS = 8192
SIZES = {"mixtral": (8, 4096, 14_336, 2), "scout": (16, 5120, 8192, 1)}
RECIPES = ("bf16", "fp8-block", "fp8-row")


def measured(model: str, recipe: str) -> tuple[Summary, Numbers]:
    experts, hidden, _, chosen = SIZES[model]
    module = nn.ModuleList([experts_of(model)])
    if recipe != "bf16":
        ng.convert(module, recipe)
    x = torch.randn(TOKENS, hidden, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    index = torch.randint(experts, (TOKENS, chosen), device="cuda")
    weights = torch.rand(TOKENS, chosen, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(x)

    def step() -> None:
        module[0](x, index, weights).backward(grad)

    def end() -> None:
        if recipe != "bf16":
            ng.advance(module)
        module.zero_grad(set_to_none=True)
        x.grad = weights.grad = None

    for _ in range(2):
        step()
        end()
    with log.recorded() as seen:
        step()
    end()
    with OperatorBytes() as operators:
        step()
    return seen, {"torch_gb": round(operators.moved_bytes / 1e9, 3)}


def experts_of(model: str) -> nn.Module:
    """transformers' Mixtral experts in the sizes of a model."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralExperts

    experts, hidden, inner, _ = SIZES[model]
    config = MixtralConfig(
        hidden_size=hidden, intermediate_size=inner, num_local_experts=experts
    )  # fmt: skip
    config._experts_implementation = "grouped_mm"
    with torch.device("cuda"):
        return MixtralExperts(config).to(torch.bfloat16)


# `python -m tests.gpu_dry_run --gpu b200 --run -m tests.gpu_dry_run.experts` counts what a B200 takes.
if runtime.played() == "b200":
    RECIPES = ("bf16", "mxfp8")
CASES: dict[str, Case] = {
    f"{model} {recipe}": partial(measured, model, recipe) for model in SIZES for recipe in RECIPES
}

if __name__ == "__main__":
    tally.told(CASES)
