"""`narrowgauge recipes [NAME]`: print the number format of each matrix product."""

LEGEND = "A cast reads: format, the tile that shares a scale, the rule of the scale. Products are lhs x rhs: see docs/recipes.md."


def recipes(name: str = "", /) -> int:
    """List the number formats of the operands of a Linear's matrix products, for each recipe.

    Parameters
    ----------
    name
        A recipe. All recipes if it is left out.
    """
    from narrowgauge import recipes as registry

    shown = [registry.get(each) for each in ((name,) if name else registry.names())]
    for recipe in shown:
        print(f"{recipe.name}: {recipe.summary}")
        for product, gemm in recipe.gemms().items():
            print(
                f"    {product:<12} {gemm}"
                + (", fast accumulation" if gemm.fast_accumulate else "")
            )
        if recipe.saves_codes:
            print(f"    {'kept':<12} x as codes")
        print()
    for shorthand, (recipe_name, why) in registry.SHORTHANDS.items():
        if recipe_name in [recipe.name for recipe in shown]:
            print(f"  {shorthand} stands for {recipe_name}: {why}.")
    if not name:
        print(f"  {registry.AUTO} chooses, {registry.AUTO_SUMMARY}.\n")
    print(LEGEND)
    return 0
