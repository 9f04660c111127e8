"""Disable torch's fused kernel for nn.TransformerEncoderLayer around layers with a recipe."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from narrowgauge.nn.linear import QLinear


def refuse_fast_path(model: nn.Module) -> None:
    """Make encoder layers with a recipe call their Linears in eval mode.

    Without gradients, nn.TransformerEncoderLayer reads its Linears' weights
    in one fused kernel, which ignores recipes. Layers without a recipe use
    that kernel as torch decides. nn.TransformerEncoder packs unpadded
    tokens into a nested tensor for the kernel, which is switched off too.
    """
    for encoder in model.modules():
        if (
            isinstance(encoder, nn.TransformerEncoder)
            and getattr(encoder, "use_nested_tensor", False) is not False
        ):
            has_recipe = any(
                isinstance(each, QLinear) and each.recipe for each in encoder.modules()
            )
            # None is falsy, so it switches nesting off, and it marks that the switch was on before.
            encoder.use_nested_tensor = None if has_recipe else True  # type: ignore[assignment]
    for layer in model.modules():
        if isinstance(layer, nn.TransformerEncoderLayer):
            own, number = layer.activation, layer.activation_relu_or_gelu
            has_recipe = any(
                isinstance(each, QLinear) and each.recipe for each in (layer.linear1, layer.linear2)
            )
            # torch has no switch for one layer. The kernel runs only if this
            # number names an activation that it implements: 1 relu, 2 gelu.
            # False disables it and marks that there was a number.
            if has_recipe and number:
                layer.activation_relu_or_gelu = False
            elif number is False and not has_recipe:
                is_relu, is_gelu = (
                    own is F.relu or isinstance(own, nn.ReLU),
                    own is F.gelu or isinstance(own, nn.GELU),
                )
                layer.activation_relu_or_gelu = 1 if is_relu else 2 if is_gelu else 0
