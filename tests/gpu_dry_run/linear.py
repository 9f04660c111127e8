"""One Linear, eager, forward and backward: 8,192 tokens, 4096 by 4096, in bfloat16.

Counted is the third step, the first that is warm: kernels are compiled, windows and caches filled. x needs a gradient, so all three
products are computed. On a B200 or an RTX 5090 other recipes are asked: those parts are named after them. "+ bias": the layer has
one; "+ step": weight_codes="step", where backward finds what forward has cast.
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

TOKENS, WIDTH = 8192, 4096
BLACKWELL = ["bf16", "fp8-current", "fp8-delayed", "fp8-row", "fp8-block", "mxfp8", "nvfp4"]
NAMES = [
    "bf16", "fp8-current", "fp8-delayed", "fp8-block", "fp8-row", "int8",
    *(f"{recipe} + step" for recipe in ("fp8-current", "fp8-delayed", "fp8-block", "fp8-row")),
    *(f"{recipe} + bias" for recipe in ("bf16", "fp8-current", "fp8-block", "fp8-row")),
]  # fmt: skip


def measured(name: str) -> tuple[Summary, Numbers]:
    recipe, _, option = name.partition(" + ")
    model = nn.Sequential(
        nn.Linear(WIDTH, WIDTH, bias=option == "bias", device="cuda", dtype=torch.bfloat16)
    )
    if recipe != "bf16":
        ng.convert(model, recipe, weight_codes="step" if option == "step" else "auto")
    x = torch.randn(TOKENS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn_like(x)

    def step() -> None:
        model(x).backward(grad)

    def end() -> None:
        ng.advance(model)
        model.zero_grad(set_to_none=True)
        x.grad = None

    for _ in range(2):
        step()
        end()
    with log.recorded() as seen:
        step()
    end()
    with log.recorded() as again, OperatorBytes() as operators:
        step()
    assert again.launches == seen.launches, (
        "torch's operators take another path while they are watched"
    )
    return seen, {"torch_gb": round(operators.moved_bytes / 1e9, 3)}


IS_BLACKWELL = runtime.played() in ("b200", "rtx5090")
CASES: dict[str, Case] = {
    name: partial(measured, name) for name in (BLACKWELL if IS_BLACKWELL else NAMES)
}

if __name__ == "__main__":
    tally.told(CASES)
