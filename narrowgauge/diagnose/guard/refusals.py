"""What a guard of a loop cannot work with, or would go wrong without a word: refused before the first step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from narrowgauge.conversion.switching import HIGH_PRECISION_BITS, bits
from narrowgauge.errors import ConfigError
from narrowgauge.nn.linear import QLinear
from narrowgauge.recipe import Recipe


def is_narrow(recipe: Recipe | None) -> bool:
    """Whether a product of it is on narrow numbers."""
    return recipe is not None and any(bits(gemm) < HIGH_PRECISION_BITS for gemm in recipe.gemms().values())


def refuse(model: nn.Module, optimizers: Iterable[Any], also: Iterable[Any]) -> None:
    """Raises ConfigError with the reason."""
    recipes = [each.recipe for each in model.modules() if isinstance(each, QLinear) and each.recipe is not None]
    if not any(map(is_narrow, recipes)):
        raise ConfigError(
            "Guard: no product of the model is narrower than 16 bits, so there is nothing to judge. "
            "Call narrowgauge.convert(model, ...) with a narrow recipe first."
        )
    learns = any(recipe.steps() for recipe in recipes)
    if learns and any(getattr(each, "find_unused_parameters", True) is False for each in model.modules()):
        raise ConfigError(
            "Guard: in BF16 the learned steps of the recipe have no gradient, for which DistributedDataParallel would wait. "
            "Wrap the model with find_unused_parameters=True."
        )
    scheduler = torch.optim.lr_scheduler.LRScheduler
    held = any(isinstance(getattr(each, "scheduler", each), scheduler) for each in also)
    for optimizer in optimizers:
        if hasattr(optimizer.step, "_wrapped_by_lr_sched") and not held:
            raise ConfigError(
                "Guard: a scheduler moves the learning rate of the optimizer, and steps of a check would move it further. "
                "Hand it over: Guard(..., also=[scheduler])."
            )
