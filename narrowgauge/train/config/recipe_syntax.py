"""Parser of the setting `recipes`: other recipes for matching layers, or for their matmuls.

In a file, as a table or as a list:

    [recipes]
    "lm_head" = "bf16"
    "layers.1.down_proj" = "bf16:grad_weight"

    recipe.layers = ["lm_head=bf16", "layers.1.down_proj=bf16:grad_weight"]

On the command line:

    --recipe.layers lm_head=bf16 --recipe.layers layers.1.down_proj=bf16:grad_weight

Matmuls are named as in `switch` and joined with `+`: `forward` is output, `backward` means both
gradients. Recipe names are checked later, because that imports torch.
"""

from collections.abc import Iterable, Mapping

from narrowgauge.errors import closest

ALL = ("output", "grad_input", "grad_weight")
PRODUCTS = {"forward": ALL[:1], "backward": ALL[1:], **{product: (product,) for product in ALL}}


def table(entries: Iterable[str], form: str = "pattern=recipe") -> dict[str, str]:
    """Parses 'pattern=recipe' entries, or those of another form, as 'name=column'.

    Raises ValueError for a malformed entry or a repeated pattern.
    """
    found: dict[str, str] = {}
    for entry in entries:
        # Splits at the first =; patterns contain none.
        pattern, equals, recipe = entry.partition("=")
        if not equals or pattern in found:
            raise ValueError(
                f"{entry!r} is not {form!r}, or names its {form.partition('=')[0]} twice"
            )
        found[pattern] = recipe
    return found


def recipe_of(value: str) -> str:
    """The recipe's name in 'RECIPE' or 'RECIPE:PRODUCTS'."""
    return value.partition(":")[0]


def names(recipe: str, layers_recipe: Mapping[str, str]) -> set[str]:
    """Recipe names in the settings `recipe` and `recipes`."""
    return {recipe, *map(recipe_of, layers_recipe.values())}


def refuse(value: str) -> str:
    """Reason why the part after the colon of 'RECIPE:PRODUCTS' is invalid, or ''."""
    name, colon, words = value.partition(":")
    for word in words.split("+") if colon else ():
        if word not in PRODUCTS:
            near = closest(word, PRODUCTS, limit=1)
            return f"must name products of a Linear after the colon of {value!r}: " + (
                f"{word!r} is none. Closest: {near}"
                if near
                else f"some of {', '.join(PRODUCTS)}, with + between"
            )
    return (
        f"must name a recipe with numbers of its own before the colon of {value!r}"
        if colon and name in ("", "none", "auto")
        else ""
    )
