"""Layers whose recipe has no effect where the user expects one.

Weights may be read without calling their layer, and GEMMs may be emulated. torch's fused kernel for
nn.TransformerEncoderLayer is switched off around layers with a recipe; `warn` reports the others.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch.nn.functional as F
from torch import nn

from narrowgauge import errors
from narrowgauge.nn.linear import QLinear
from narrowgauge.ops.mm import why_emulated
from narrowgauge.ops.mm.spec import OTHER_GPUS, without_kernels
from narrowgauge.structure import read_weights


def is_read_by_owner(model: nn.Module, name: str) -> bool:
    """True if the module that holds a Linear multiplies by its weight without calling the layer.

    It is enough that one branch of the module's forward does so.
    """
    owner, _, own = name.rpartition(".")
    return own in read_weights(model.get_submodule(owner))


def warn(model: nn.Module, layers: Iterable[tuple[str, QLinear]]) -> None:
    """Warn of weights that are read without calling their layer, and of emulated GEMMs.

    Emulation is reported on a GPU only, MPS and XPU included: a CPU emulates everything except
    integers. It is not detected for a model that has not moved to the GPU yet.
    """
    read: list[str] = []
    emulated: dict[tuple[str, str], dict[str, None]] = {}
    for name, layer in layers:
        if layer.recipe is None:
            continue
        if is_read_by_owner(model, name):
            read.append(name)
        # Once per recipe and reason, not per layer: a model has hundreds of layers.
        type_of_gpu = layer.weight.device.type
        if type_of_gpu != "cuda" and type_of_gpu not in OTHER_GPUS:
            continue
        for product, gemm in layer.recipe.gemms().items():
            if (reason := why_emulated(gemm, layer.weight.device)) is not None:
                # On a GPU without kernels all products have one reason.
                words = without_kernels(type_of_gpu) or f"{product}: {reason}"
                emulated.setdefault((layer.recipe.name, words), {})[name] = None
    if read:
        kind = type(model.get_submodule(read[0].rpartition(".")[0])).__name__
        others = f" (and so for {len(read) - 1} more layers)" if len(read) > 1 else ""
        errors.warn(
            f"convert: {kind}.forward multiplies by the weight of {read[0]!r} without calling it{others}, where the recipe takes no "
            "effect. Give these layers None, or change that forward to call them; describe says which they are.",
            code="convert.bypassed",
            stacklevel=3,
        )
    for (recipe, reason), of_layers in emulated.items():
        names = [*of_layers]
        errors.warn(
            f"convert: products of recipe {recipe} are emulated here, no faster than in bfloat16 ({reason}; in {names[0]!r} and "
            f"{len(names) - 1} more layers). narrowgauge info lists what this machine computes natively.",
            code="convert.emulated",
            stacklevel=3,
        )


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
            has_recipe = any(isinstance(each, QLinear) and each.recipe for each in layer.modules())
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
