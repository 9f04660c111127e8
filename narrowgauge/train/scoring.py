"""Evaluation in the run's recipe and in 16 bits.

Most users of trained weights compute in 16 bits. Weights that were trained in FP8 can score lower
there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from narrowgauge.nn.converted_model import quantized_embeddings, suspended
from narrowgauge.nn.linear import QLinear
from narrowgauge.recipe import Gemm

Metrics = dict[str, Any]


def narrow_forward(model: nn.Module) -> dict[tuple[str, str], str]:
    """Low-precision parts of the forward pass. If there are none, both scores are identical.

    (layer, "output")    -> name of its recipe
    (embedding, "rows")  -> format of its codes
    """
    layers = {name: each for name, each in model.named_modules() if isinstance(each, QLinear)}
    found = {
        (name, "output"): each.recipe.name
        for name, each in layers.items()
        if each.recipe is not None and each.recipe.output != Gemm() and not each.is_suspended
    }
    looked_up = {
        (name, "rows"): str(each.format)
        for name, each in quantized_embeddings(model)
        if not each.is_suspended
    }
    return found | looked_up


def wide(model: nn.Module, evaluate: Callable[[], Metrics]) -> Metrics:
    """Result of `evaluate` with all recipes of the model's Linears and embeddings suspended.

    Recipe states and generators are unchanged.
    """
    with suspended(model):
        return evaluate()


def words(found: Mapping[str, Any], other: Mapping[str, Any] | None) -> str:
    """Formats the metrics for the console, with the 16-bit scores in parentheses."""
    return ", ".join(
        f"{name.replace('_', ' ')} {value:.4f}"
        + ("" if other is None else f" ({other[name]:.4f} in 16 bits)")
        for name, value in found.items()
        if isinstance(value, float)
    )
