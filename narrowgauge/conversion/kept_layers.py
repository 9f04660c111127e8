"""Linears that keep their precision although a pattern matches them, and the reasons.

Output heads and routers, layers below one hardware tile, and classes that compute something else
than nn.Linear keep it (`reason_to_keep`). A recipe's `wide_blocks` keeps whole blocks in bf16 (`wide_by_policy`).
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING

from torch import nn

from narrowgauge.conversion.disguises import reason_to_leave
from narrowgauge.errors import Reason
from narrowgauge.nn.foreign_modules import why_foreign
from narrowgauge.nn.linear import QLinear
from narrowgauge.ops.mm.cublas import ALIGNMENT
from narrowgauge.structure import blocks, expanded, features

if TYPE_CHECKING:
    from narrowgauge.recipe import Recipe

HEADS = ("lm_head", "embed_out", "output_projection", "score", "classifier", "qa_outputs")
ROUTERS = ("router", "gate", "shared_expert_gate")
# Last part of a layer's name -> the reason why it keeps its precision.
KEPT = dict.fromkeys(HEADS, "output head") | dict.fromkeys(
    ROUTERS, "router: a small error flips which expert is chosen"
)
LEFT_BY = "_narrowgauge_left_by"  # attribute of an ordinary Linear: the pattern that leaves it so
SMALLEST = ALIGNMENT  # below one hardware tile, padding costs more than a low-precision GEMM saves


def wide_by_policy(model: nn.Module, recipe: Recipe, pattern: str) -> dict[str, str]:
    """Layer -> reason, for layers that the recipe's `wide_blocks` keeps in bf16.

    A pattern that names a block's number overrides the policy.
    """
    if recipe.wide_blocks is None:
        return {}
    # A part with a digit may stand for a block's number: "layers.5.*" does, "layers.*" does not.
    parts = {part for each in expanded(pattern) for part in each.split(".")}
    numbers = [part for part in parts if any(map(str.isdigit, part))]
    return {
        name: f"{block}: {recipe.name} keeps the {recipe.wide_blocks}"
        for name, block in blocks(model).items()
        if block.index in recipe.wide_blocks.indices(block.count)
        and not any(fnmatchcase(str(block.index), part) for part in numbers)
    }


def output_head(model: nn.Module) -> nn.Module | None:
    """Return the head that a transformers model declares (BERT: `cls.predictions.decoder`)."""
    find = getattr(model, "get_output_embeddings", None)
    return find() if callable(find) else None


def reason_to_keep(
    name: str, layer: nn.Module, matching: list[str], head: nn.Module | None
) -> str | None:
    """Return the reason why a Linear keeps its precision although a pattern matches it, or None.

    name      dotted name of the layer
    matching  patterns that match it
    head      the model's output head, if it declares one
    """
    if not isinstance(layer, QLinear) and (reason := why_foreign(layer)) is not None:
        return reason
    is_disguised = type(layer) is not nn.Linear and not isinstance(layer, QLinear)
    if is_disguised and (reason := reason_to_leave(layer)) is not None:
        return reason
    if min(features(layer)) < SMALLEST:
        return Reason("too-small", f"fewer than {SMALLEST} features on one side")
    last = name.rpartition(".")[2]
    # "lm_head" and "*.gate" name the layer in letters; "*" and "layers.*" do not.
    in_letters = any(
        character.isalnum() for pattern in matching for character in pattern.rpartition(".")[2]
    )
    return (
        Reason("kept", KEPT.get(last, "output head"))
        if (last in KEPT or layer is head) and not in_letters
        else None
    )


def reason_of_weight(module: nn.Module, reason: str) -> str:
    """Why a weight that no Linear holds has no recipe.

    reason  of `structure.other_weights`
    """
    if getattr(reason, "code", "") != "experts":
        return reason
    from narrowgauge.nn.experts import KEPT_BECAUSE, refuse  # only for mixtures of experts

    if refused := refuse(module):
        return refused
    left_by: str = module.__dict__.get(KEPT_BECAUSE, "")
    if left_by:
        return left_by
    sides = [side for each in module.parameters(recurse=False) for side in each.shape[1:]]
    if min(sides) < SMALLEST:
        return Reason("too-small", f"fewer than {SMALLEST} features on one side")
    return Reason("no-pattern", "no pattern named it")
