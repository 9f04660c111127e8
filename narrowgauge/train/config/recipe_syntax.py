"""The setting `recipes`: another recipe, or some products of one, for the layers that a pattern names.

    [recipes]                                               recipes = ["lm_head=bf16", "layers.1.down_proj=bf16:grad_weight"]
    "lm_head" = "bf16"
    "layers.1.down_proj" = "bf16:grad_weight"               --recipes lm_head=bf16 --recipes layers.1.down_proj=bf16:grad_weight

Products are named as in a switch, several with `+` between: `forward` is output, `backward` both gradients. What a recipe is called is
looked up later, with torch.
"""

from collections.abc import Iterable, Mapping

from narrowgauge.errors import closest

ALL = ("output", "grad_input", "grad_weight")
PRODUCTS = {"forward": ALL[:1], "backward": ALL[1:], **{product: (product,) for product in ALL}}


def table(entries: Iterable[str]) -> dict[str, str]:
    """'pattern=recipe' entries as a table. ValueError for what is not of the form, or names a pattern twice."""
    found: dict[str, str] = {}
    for entry in entries:
        pattern, equals, recipe = entry.partition("=")
        if not equals or pattern in found:
            raise ValueError(f"{entry!r} is not 'pattern=recipe', or names its pattern twice")
        found[pattern] = recipe
    return found


def recipe_of(value: str) -> str:
    """The recipe's name in 'RECIPE' or 'RECIPE:PRODUCTS'."""
    return value.partition(":")[0]


def names(recipe: str, layers_recipe: Mapping[str, str]) -> set[str]:
    """All that the settings `recipe` and `recipes` name."""
    return {recipe, *map(recipe_of, layers_recipe.values())}


def refuse(value: str) -> str:
    """What is wrong with the products in 'RECIPE:PRODUCTS', or ''."""
    name, colon, words = value.partition(":")
    for word in words.split("+") if colon else ():
        if word not in PRODUCTS:
            near = closest(word, PRODUCTS, limit=1)
            return f"must name products of a Linear after the colon of {value!r}: " + (
                f"{word!r} is none. Closest: {near}" if near else f"some of {', '.join(PRODUCTS)}, with + between"
            )
    return (
        f"must name a recipe with numbers of its own before the colon of {value!r}"
        if colon and name in ("", "none", "auto")
        else ""
    )
