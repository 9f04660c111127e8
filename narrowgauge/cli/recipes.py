"""`narrowgauge recipes [NAME]`: the number format of each matrix product."""

LEGEND = "A cast reads: format, the tile that shares a scale, the rule of the scale. Products are lhs x rhs: see docs/recipes.md."


def recipes(name: str = "", /) -> int:
    """Say which number format each recipe gives to the operands of a Linear's three matrix products.

    Parameters
    ----------
    name
        One recipe; all of them without it.
    """
    from narrowgauge import recipes as registry

    for recipe in map(registry.get, (name,) if name else registry.names()):
        print(f"{recipe.name}: {registry.SUMMARIES[recipe.name]}")
        for product, gemm in recipe.gemms().items():
            print(f"    {product:<12} {gemm}" + (", fast accumulation" if gemm.fast_accumulate else ""))
        if recipe.save == "quantized":
            print(f"    {'kept':<12} x as codes")
        print()
    for shorthand, (recipe_name, why) in registry.SHORTHANDS.items():
        print(f"  {shorthand} stands for {recipe_name}: {why}.")
    print(f"  {registry.AUTO} chooses, {registry.AUTO_SUMMARY}.\n\n{LEGEND}")
    return 0
