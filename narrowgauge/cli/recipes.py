"""`narrowgauge recipes [NAME]`: the number format of each matrix product."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from narrowgauge.recipe import Recipe

LEGEND = "A cast reads: format, the tile that shares a scale, the rule of the scale. Products are lhs x rhs: see docs/recipes.md."


def recipes(name: str = "", /) -> int:
    """Say which number format each recipe gives to the operands of a Linear's three matrix products.

    Parameters
    ----------
    name
        One recipe; all of them without it.
    """
    from narrowgauge import recipes as registry

    chosen = (name,) if name else registry.names()
    found = [registry.get(each) for each in chosen]
    print("\n\n".join(_block(recipe, registry.SUMMARIES[recipe.name]) for recipe in found))
    for shorthand, (recipe_name, why) in registry.SHORTHANDS.items():
        print(f"\n  {shorthand} stands for {recipe_name}: {why}.", end="")
    print(f"\n  {registry.AUTO} chooses, {registry.AUTO_SUMMARY}.", end="")
    print(f"\n\n{LEGEND}")
    return 0


def _block(recipe: Recipe, summary: str) -> str:
    lines = [f"{recipe.name}: {summary}"]
    for product, gemm in recipe.gemms().items():
        lines.append(f"    {product:<12} {gemm}" + (", fast accumulation" if gemm.fast_accumulate else ""))
    if recipe.save == "quantized":
        lines.append(f"    {'kept':<12} x as codes")
    return "\n".join(lines)
