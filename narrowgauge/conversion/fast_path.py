"""torch's fused kernel for nn.TransformerEncoderLayer, which reads the weights of Linears without calling them."""

from __future__ import annotations

import torch.nn.functional as F
from torch import nn

from narrowgauge.nn.linear import QLinear


def refuse_fast_path(model: nn.Module) -> None:
    """nn.TransformerEncoderLayer in eval() without gradients reads its Linears' weights in one fused kernel, which knows no recipe.

    Layers with a recipe compute by their modules, as in training; the others as torch decides. torch has no switch of one layer for
    it but the number that says which activation the kernel would compute: 0, none that it knows. False in its place says that there
    was one.

    nn.TransformerEncoder, which packs what is not padding into a nested tensor for those kernels, leaves that to them; None in its
    switch says that it was on.
    """
    for encoder in model.modules():
        if isinstance(encoder, nn.TransformerEncoder) and getattr(encoder, "use_nested_tensor", False) is not False:
            has_recipe = any(isinstance(each, QLinear) and each.recipe for each in encoder.modules())
            encoder.use_nested_tensor = None if has_recipe else True  # type: ignore[assignment]
    for layer in model.modules():
        if isinstance(layer, nn.TransformerEncoderLayer):
            own, number = layer.activation, layer.activation_relu_or_gelu
            has_recipe = any(isinstance(each, QLinear) and each.recipe for each in (layer.linear1, layer.linear2))
            if has_recipe and number:
                layer.activation_relu_or_gelu = False
            elif number is False and not has_recipe:
                is_relu, is_gelu = own is F.relu or isinstance(own, nn.ReLU), own is F.gelu or isinstance(own, nn.GELU)
                layer.activation_relu_or_gelu = 1 if is_relu else 2 if is_gelu else 0
