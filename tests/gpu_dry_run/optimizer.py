"""A step of AdamW on four Linears of 4096 by 4096, its states in each form, and the casts of weights that follow it.

Counted is the third step. "+ fp8-delayed, cast after": the step, `advance`, and the cast of each weight both ways; "cast in step": the
step's kernel leaves the casts (`cast_weights`), and the layers take them up.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn

import narrowgauge as ng
from tests.gpu_dry_run import log, tally
from tests.gpu_dry_run.log import Summary
from tests.gpu_dry_run.operator_bytes import OperatorBytes
from tests.gpu_dry_run.tally import Case, Numbers

LAYERS, WIDTH = 4, 4096
STATES = {  # of AdamW: states, type of the weights, master
    "fp32, float32": ("fp32", torch.float32, None),
    "8bit, float32": ("8bit", torch.float32, None),
    "8bit, bfloat16, stochastic": ("8bit", torch.bfloat16, "stochastic"),
    "8bit, bfloat16, bf16-remainder": ("8bit", torch.bfloat16, "bf16-remainder"),
    "4bit, bfloat16, bf16-remainder": ("4bit", torch.bfloat16, "bf16-remainder"),
    "fp8-lm, bfloat16, fp16-scaled": ("fp8-lm", torch.bfloat16, "fp16-scaled"),
    "fp8, float32": ("fp8", torch.float32, None),
}
WITH_CASTS = "8bit, bfloat16, stochastic"


def measured(states: str, recipe: str = "", together: bool = False) -> tuple[Summary, Numbers]:
    kind, dtype, master = STATES[states]
    layers = [
        nn.Linear(WIDTH, WIDTH, bias=False, device="cuda", dtype=dtype) for _ in range(LAYERS)
    ]
    model = nn.Sequential(*layers)
    if recipe:
        ng.convert(model, recipe, weight_codes="step")
    optimizer = ng.optim.AdamW(
        model.parameters(), lr=1e-4, states=kind, master=master, backend="triton"
    )
    left = optimizer.cast_weights(model) if together else {}
    if any("taken after" not in words for words in left.values()):
        raise RuntimeError(f"the step leaves nothing for some layers:\n{left}")
    for weight in model.parameters():
        weight.grad = torch.zeros_like(weight)

    from narrowgauge.cuda_graphs import cast_weight

    def step() -> None:
        optimizer.step()
        if recipe:
            ng.advance(model)
            for layer in model:
                cast_weight(layer)

    for _ in range(2):
        step()
    with log.recorded() as seen:
        step()
    with OperatorBytes() as operators:
        step()
    return seen, {"torch_gb": round(operators.moved_bytes / 1e9, 3)}


CASES: dict[str, Case] = {
    **{name: partial(measured, name) for name in STATES},
    **{
        f"{WITH_CASTS} + {recipe}, cast {'in step' if together else 'after'}": partial(
            measured, WITH_CASTS, recipe, together
        )
        for recipe in ("fp8-delayed", "fp8-current")
        for together in (False, True)
    },
}

if __name__ == "__main__":
    tally.told(CASES)
