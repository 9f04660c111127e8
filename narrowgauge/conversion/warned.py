"""What `convert` warns of: weights that are read without their layer, and emulated products."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from torch import nn

from narrowgauge.nn.linear import QLinear
from narrowgauge.ops.mm import why_emulated
from narrowgauge.structure import read_weights


def is_read_by_owner(model: nn.Module, name: str) -> bool:
    """Whether the module that holds a Linear multiplies by its weight without calling it, at least in some branch."""
    owner, _, own = name.rpartition(".")
    return own in read_weights(model.get_submodule(owner))


def warn(model: nn.Module, layers: Iterable[tuple[str, QLinear]]) -> None:
    """Warns of weights that are read without their layer, and of emulated products.

    Of emulation on a GPU, where nobody expects it; a CPU emulates all but integers. Not known of a model that is still on its way
    to the GPU.
    """
    read: list[str] = []
    emulated: dict[tuple[str, str], list[str]] = {}
    for name, layer in layers:
        if layer.recipe is None:
            continue
        if is_read_by_owner(model, name):
            read.append(name)
        for product, gemm in layer.recipe.gemms().items() if layer.weight.is_cuda else ():
            if (reason := why_emulated(gemm, layer.weight.device)) is not None:
                emulated.setdefault((layer.recipe.name, f"{product}: {reason}"), []).append(name)
    if read:
        kind = type(model.get_submodule(read[0].rpartition(".")[0])).__name__
        others = f" (and so for {len(read) - 1} more layers)" if len(read) > 1 else ""
        warnings.warn(
            f"convert: {kind}.forward multiplies by the weight of {read[0]!r} without calling it{others}, where the recipe takes no "
            "effect. Give these layers None, or change that forward to call them; describe says which they are.",
            stacklevel=3,
        )
    for (recipe, reason), names in emulated.items():
        warnings.warn(
            f"convert: products of recipe {recipe} are emulated here, no faster than in bfloat16 ({reason}; in {names[0]!r} and "
            f"{len(names) - 1} more layers). narrowgauge info lists what this GPU computes natively.",
            stacklevel=3,
        )
