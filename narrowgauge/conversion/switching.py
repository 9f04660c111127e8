"""switch: give layers a recipe of higher precision during training, in forward, backward or both.

    switch(model, "fp8-current")                                  every layer, all three GEMMs
    switch(model, "bf16", products=FORWARD)                       forward alone: output
    switch(model, "bf16", layers="layers.[0-3].*")                chosen layers
    with switched(model, "bf16", "layers.1.down_proj", ["grad_weight"]):                temporarily

Four-bit runs that end in higher precision lose less: forward in bf16 for
the last 18 % halves the gap of NVFP4 (arXiv 2509.25149, appendix D),
backward in bf16 ends "FP4 All the Way" (arXiv 2505.19115).

A switch only raises precision: a GEMM whose operands have more bits than in the new recipe keeps
them, so a switch to FP8 leaves blocks in bf16. Weights, gradients and optimizer state do not
change. Amax histories of delayed scaling start empty.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

from torch import nn

from narrowgauge import recipes
from narrowgauge.conversion.kept_layers import wide_by_policy
from narrowgauge.conversion.products import mixed
from narrowgauge.errors import ConfigError, closest
from narrowgauge.nn.linear import QLinear
from narrowgauge.recipe import GEMMS, Gemm, Recipe
from narrowgauge.structure import matches, require_module

FORWARD = ("output",)
BACKWARD = ("grad_input", "grad_weight")
HIGH_PRECISION_BITS = 16


def switch(
    model: nn.Module, recipe: str | Recipe, layers: str = "*", products: Iterable[str] = GEMMS
) -> list[str]:
    """Give `recipe` to the matching layers, where it has more bits; return the changed layers.

    layers    pattern
    products  GEMMs that may change

    Raises ConfigError if the pattern matches no converted layer, or if nothing would change.
    """
    require_module(model, "switch")
    quantized = {name: layer for name, layer in model.named_modules() if isinstance(layer, QLinear)}
    now = {name: layer.recipe for name, layer in quantized.items() if layer.recipe is not None}
    changes = widened(model, now, recipe, layers, products)
    for name, chosen in changes.items():
        quantized[name].recipe = chosen
    return list(changes)


@contextmanager
def switched(
    model: nn.Module,
    recipe: str | Recipe = "bf16",
    layers: str = "*",
    products: Iterable[str] = GEMMS,
) -> Iterator[list[str]]:
    """`switch` inside the block. Afterwards the layers have their recipes and state again.

    State is amax histories, learned steps and samplers. Yields the names of the changed layers.
    Steps inside the block may update the state.

    Raises ConfigError as `switch` does, and for a recipe with state, which would start empty.
    """
    target = recipes.get(recipe) if isinstance(recipe, str) else recipe
    if isinstance(target, Recipe) and target.has_state:
        raise ConfigError(
            f"switched: {target.name!r} remembers amax, steps or readings from step to step, and would begin without. Name a recipe that "
            "remembers nothing, as bf16 or fp8-current.",
            code="switched.has-memory",
        )
    quantized = {name: layer for name, layer in model.named_modules() if isinstance(layer, QLinear)}
    before = {name: layer.recipe for name, layer in quantized.items() if layer.recipe is not None}
    changes = widened(model, before, recipe, layers, products)
    is_ending = sys.is_finalizing  # a local: module globals are None at interpreter exit
    try:
        for name, chosen in changes.items():
            # Unlike the setter of `recipe`, compute_as keeps the state of the layer's own recipe.
            quantized[name].compute_as(chosen)
        yield list(changes)
    finally:
        for name in () if is_ending() else changes:  # nothing computes at interpreter exit
            quantized[name].compute_as(before[name])


def widened(
    model: nn.Module,
    now: Mapping[str, Recipe],
    recipe: str | Recipe,
    layers: str = "*",
    products: Iterable[str] = GEMMS,
) -> dict[str, Recipe]:
    """Layer -> next recipe, for the layers that `switch` would change. Changes nothing.

    now  layer -> its current recipe
    """
    target = recipes.get(recipe) if isinstance(recipe, str) else recipe
    chosen = (products,) if isinstance(products, str) else tuple(products)  # one name, not letters
    if not isinstance(target, Recipe):
        raise ConfigError(
            f"switch: {target!r} is not a recipe for products of a Linear. Give a recipe or its name.",
            code="switch.not-a-recipe",
        )
    if set(chosen) - set(GEMMS) or not chosen:
        raise ConfigError(
            f"switch: products = {chosen!r}: must be some of {GEMMS}. Name those that get the recipe.",
            code="switch.products",
        )
    named = [name for name in now if any(matches(each, layers) for each in _names(model, name))]
    if not named:
        near = closest(layers, now)
        raise ConfigError(
            f"switch: pattern {layers!r} names no converted layer. "
            + (f"Closest: {near}." if near else "narrowgauge.describe(model) lists them."),
            code="pattern.no-match",
        )
    if target.learned_steps():
        raise ConfigError(
            f"switch: {target.name!r} learns steps, parameters that an optimizer made before does not know. "
            "Train with it from the start, or switch to a recipe without them.",
            code="switch.learned-steps",
        )
    wide = wide_by_policy(model, target, layers)
    shared: dict[tuple[Recipe, Recipe], Recipe] = {}  # equal layers share one Recipe object
    changes = {}
    for name in named:
        # A policy of the target (`wide_blocks`) keeps some blocks in bf16, as in `convert`.
        goal = recipes.BF16 if name in wide else target
        pair = (now[name], goal)
        mixed = shared.setdefault(pair, _mixed(*pair, chosen))
        if mixed.gemms() != now[name].gemms():
            changes[name] = mixed
    if not changes:
        raise ConfigError(
            f"switch: {target.name!r} would change nothing: in {', '.join(chosen)} the {len(named)} layers that {layers!r} "
            "names have it already, or are wider. Name a wider recipe, other products or other layers.",
            code="switch.no-change",
        )
    return changes


def _names(model: nn.Module, name: str) -> tuple[str, ...]:
    layer = model.get_submodule(name)
    return layer.names(name) if isinstance(layer, QLinear) else (name,)


def _mixed(recipe: Recipe, wider: Recipe, products: tuple[str, ...]) -> Recipe:
    """Return `recipe` with the named GEMMs from `wider`, where they have at least as many bits."""
    old, new = recipe.gemms(), wider.gemms()
    try:
        return mixed(
            recipe, wider, [name for name in products if bits(new[name]) >= bits(old[name])]
        )
    except ConfigError:
        raise ConfigError(
            f"switch: {recipe.name!r} computes its gradients on the codes of its forward product, so {', '.join(products)} alone cannot "
            f"follow {wider.name!r}. Switch all products, output included, or these to bf16.",
            code="switch.straight-through",
        ) from None


def bits(gemm: Gemm) -> int:
    """Bits of the GEMM's narrower operand."""
    return min(
        HIGH_PRECISION_BITS if cast is None else cast.format.bits for cast in (gemm.lhs, gemm.rhs)
    )
