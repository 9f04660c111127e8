"""Warnings of `convert`: weights that are read without calling their layer, and emulated GEMMs."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from torch import nn

from narrowgauge import errors
from narrowgauge.ops.mm import why_emulated
from narrowgauge.structure import read_weights

if TYPE_CHECKING:
    from narrowgauge.nn.linear import QLinear


def is_read_by_owner(model: nn.Module, name: str) -> bool:
    """True if the module that holds a Linear multiplies by its weight without calling the layer.

    It is enough that one branch of the module's forward does so.
    """
    owner, _, own = name.rpartition(".")
    return own in read_weights(model.get_submodule(owner))


def warn(model: nn.Module, layers: Iterable[tuple[str, QLinear]]) -> None:
    """Warn of weights that are read without calling their layer, and of emulated GEMMs.

    Emulation is reported on a GPU only: a CPU emulates everything except integers. It is not
    detected for a model that has not moved to the GPU yet.
    """
    read: list[str] = []
    emulated: dict[tuple[str, str], list[str]] = {}
    for name, layer in layers:
        if layer.recipe is None:
            continue
        if is_read_by_owner(model, name):
            read.append(name)
        # Once per recipe and reason, not per layer: a model has hundreds of layers.
        for product, gemm in layer.recipe.gemms().items() if layer.weight.is_cuda else ():
            if (reason := why_emulated(gemm, layer.weight.device)) is not None:
                emulated.setdefault((layer.recipe.name, f"{product}: {reason}"), []).append(name)
    if read:
        kind = type(model.get_submodule(read[0].rpartition(".")[0])).__name__
        others = f" (and so for {len(read) - 1} more layers)" if len(read) > 1 else ""
        errors.warn(
            f"convert: {kind}.forward multiplies by the weight of {read[0]!r} without calling it{others}, where the recipe takes no "
            "effect. Give these layers None, or change that forward to call them; describe says which they are.",
            code="convert.bypassed",
            stacklevel=3,
        )
    for (recipe, reason), names in emulated.items():
        errors.warn(
            f"convert: products of recipe {recipe} are emulated here, no faster than in bfloat16 ({reason}; in {names[0]!r} and "
            f"{len(names) - 1} more layers). narrowgauge info lists what this GPU computes natively.",
            code="convert.emulated",
            stacklevel=3,
        )
