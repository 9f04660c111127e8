"""Contenders of the timings: plain BF16, torchao, TransformerEngine and narrowgauge's recipes.

    bf16                                   the module as it is
    torchao-tensorwise, torchao-rowwise    torchao's float8 training
    te-delayed, te-current                 TransformerEngine's Linear under its autocast
    anything else                          a recipe of narrowgauge

A package that is not installed raises `NotHere`, so its line says what to install.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from narrowgauge import recipes
from narrowgauge.conversion import convert
from narrowgauge.lab.card.process import NotHere
from narrowgauge.ops.mm import KERNELS
from narrowgauge.ops.mm.spec import MmSpec

if TYPE_CHECKING:
    from narrowgauge.ops.registry import Device

BF16 = "bf16"
TORCHAO = ("torchao-tensorwise", "torchao-rowwise")
ENGINE = ("te-delayed", "te-current")
INSTALL = {
    "torchao": "torchao (pip install torchao)",
    "transformer_engine": "TransformerEngine (pip install transformer-engine[pytorch])",
    "bitsandbytes": "bitsandbytes (pip install bitsandbytes)",
}


def recipes_of(card: Device) -> list[str]:
    """Recipes whose three products this card multiplies natively."""
    found = []
    for recipe in recipes.ALL:
        gemms = recipe.gemms().values()
        if recipe.name != BF16 and all(
            gemm.lhs is not None
            and gemm.rhs is not None
            and KERNELS.choose(MmSpec(gemm.lhs, gemm.rhs, card)).kernel.name != "reference"
            for gemm in gemms
        ):
            found.append(recipe.name)
    return found


def package(name: str) -> Any:
    """Import a package that only some machines have."""
    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        known = INSTALL.get(name.partition(".")[0], name)
        raise NotHere(f"{known} is not installed") from error


def linear(contender: str, layer: nn.Linear, tokens: int) -> nn.Module:
    """The layer as a contender has it, with the same weight."""
    # A Sequential, because convert and torchao replace the children of a module.
    if contender in ENGINE:
        return EngineLinear(contender, layer)
    return model(contender, nn.Sequential(layer), tokens)[0]  # type: ignore[index]


def model(contender: str, module: nn.Module, tokens: int) -> nn.Module:
    """The model as a contender has it; its head `lm_head` keeps 16 bits everywhere.

    tokens  of a micro-batch, for recipes that choose by it
    """
    if contender == BF16:
        return module
    if contender in ENGINE:
        raise NotHere("TransformerEngine is timed as single Linears alone")
    if contender in TORCHAO:
        float8 = package("torchao.float8")
        config = float8.Float8LinearConfig.from_recipe_name(contender.removeprefix("torchao-"))

        def wanted(each: nn.Module, name: str) -> bool:
            return isinstance(each, nn.Linear) and not name.endswith("lm_head")

        found: nn.Module = float8.convert_to_float8_training(
            module, config=config, module_filter_fn=wanted
        )
        return found
    return convert(module, {"lm_head": "bf16", "*": contender} if hasattr(module, "lm_head") else contender, tokens=tokens)  # fmt: skip


class EngineLinear(nn.Module):
    """TransformerEngine's Linear, with its autocast around each forward pass."""

    def __init__(self, contender: str, layer: nn.Linear) -> None:
        super().__init__()
        self.engine = package("transformer_engine.pytorch")
        recipe = package("transformer_engine.common.recipe")
        kinds: dict[str, Callable[[], Any]] = {
            "te-delayed": recipe.DelayedScaling,
            "te-current": recipe.Float8CurrentScaling,
        }
        # One object for all steps: it holds the amax histories of delayed scaling.
        self.recipe = kinds[contender]()
        self.layer = self.engine.Linear(
            layer.in_features, layer.out_features, bias=False, params_dtype=layer.weight.dtype, device=layer.weight.device,
        )  # fmt: skip
        with torch.no_grad():
            self.layer.weight.copy_(layer.weight)

    @property
    def weight(self) -> nn.Parameter:
        found: nn.Parameter = self.layer.weight
        return found

    def forward(self, x: Tensor) -> Tensor:
        with self.engine.fp8_autocast(enabled=True, fp8_recipe=self.recipe):
            y: Tensor = self.layer(x)
        return y
