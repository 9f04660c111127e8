"""Recipes for some GEMMs of a layer, written as "RECIPE:PRODUCTS".

    convert(model, {"*": "fp8-current", "layers.1.down_proj": "bf16:grad_weight"})
    "fp8-row:output+grad_input", "bf16:backward"

Names are `output`, `grad_input` and `grad_weight`, or `forward` for output
and `backward` for both gradients. The other GEMMs follow the last earlier
pattern with a whole recipe, or the layer's recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from narrowgauge import recipes
from narrowgauge.errors import ConfigError, closest
from narrowgauge.recipe import GEMMS, Recipe

PRODUCTS = {
    "forward": GEMMS[:1],
    "backward": GEMMS[1:],
    **{product: (product,) for product in GEMMS},
}


@dataclass(frozen=True)
class Some:
    """Some GEMMs of a recipe."""

    recipe: Recipe
    products: tuple[str, ...]

    @property
    def name(self) -> str:
        return f"{self.recipe.name}:{'+'.join(self.products)}"


def parse(text: str, get: Callable[[str], Recipe] = recipes.get) -> Recipe | Some:
    """Parse "RECIPE" or "RECIPE:PRODUCTS".

    get  function that finds a recipe by its name

    Raises ConfigError for an unknown GEMM.
    """
    name, colon, words = text.partition(":")
    if not colon:
        return get(name)
    unknown = [word for word in words.split("+") if word not in PRODUCTS]
    if unknown:
        near = closest(unknown[0], PRODUCTS) or ", ".join(PRODUCTS)
        raise ConfigError(
            f"recipe {text!r}: {unknown[0]!r} names no product of a Linear. Closest: {near}.",
            code="products.unknown",
        )
    named = {product for word in words.split("+") for product in PRODUCTS[word]}
    return Some(get(name), tuple(product for product in GEMMS if product in named))


def composed(base: Recipe | None, parts: Iterable[Some], layer: str) -> Recipe:
    """Replace the GEMMs of `base` that `parts` name, one part after the other.

    Raises ConfigError if there is no base, or if the GEMMs do not form a valid recipe.
    """
    made = base
    for part in parts:
        if made is None:
            raise ConfigError(
                f"convert: {part.name!r} gives {layer!r} some products, and nothing gives it the others. Put a pattern with a whole "
                "recipe before it.",
                code="products.no-base",
            )
        try:
            made = mixed(made, part.recipe, part.products)
        except ConfigError as error:
            raise ConfigError(
                f"convert: {layer!r}: recipe {made.name!r} cannot have {', '.join(part.products)} of {part.recipe.name!r}: {error} "
                "Give it all products, output included, or these in bf16.",
                code="products.mixed",
            ) from None
    assert made is not None
    return made


def mixed(recipe: Recipe, other: Recipe, products: Iterable[str]) -> Recipe:
    """Return `recipe` with these GEMMs of `other`, named after both."""
    old, new = recipe.gemms(), other.gemms()
    taken = [name for name in GEMMS if name in products and new[name] != old[name]]
    if not taken:
        return recipe
    # Nothing of `recipe` is left: return `other` itself, under its own name.
    if all(name in taken or new[name] == old[name] for name in GEMMS):
        return other
    made = recipe.with_gemm(**{name: new[name] for name in taken})
    # `save` decides about x for grad_weight, so it follows that GEMM.
    save = other.save if "grad_weight" in taken else made.save
    return replace(made, name=f"{recipe.name}+{other.name}:{','.join(taken)}", save=save)
