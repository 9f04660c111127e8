"""Cast a Linear's weight before a step's first forward pass, for CUDA graphs that share it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowgauge.nn.operands import Casts, find
from narrowgauge.nn.rotation import Rotation
from narrowgauge.nn.weight_cache import WeightCache

if TYPE_CHECKING:
    from narrowgauge.nn.linear import QLinear


def keeps_casts(layer: QLinear) -> bool:
    """True if a cast of the weight serves a whole optimizer step and needs no input."""
    if (
        layer.recipe is None
        or layer.is_suspended
        or layer.steps is not None
        or layer.code_source is not None
    ):
        return False
    return any(layer.plan(layer.weight.device).w.serves_a_step)


def cast_weight(layer: QLinear) -> Casts:
    """Cast the weight now. The result is empty if `keeps_casts` is False."""
    # A cache of its own: the casts that the layer holds now stay as they are.
    cache = WeightCache()
    weight: Tensor = layer.weight
    if type(weight).__name__ == "DTensor":
        from narrowgauge.nn.sharded import plain

        weight = plain(weight)
    if not keeps_casts(layer):
        return cache.casts
    with torch.no_grad():
        context = layer.context(weight, cache)
        operand, plan = (
            find("w", weight, context, (True, True), layer.amax_state("w")),
            context.plan.w,
        )
        rows, cols = plan.serves_a_step
        if rows:
            operand.rows(Rotation.draw(plan.rows_rotate, weight))
        if cols and layer.recipe is not None and layer.recipe.backward == "recast":
            # Straight-through recipes have no cols of their own: backward reads the codes of rows.
            operand.cols(Rotation.draw(plan.cols_rotate, weight.T), operand)
    return cache.casts
