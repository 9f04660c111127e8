"""`narrowgauge recipes [NAME]`: which number format each matrix product uses."""

from collections.abc import Sequence

from narrowgauge.cli import flags


def main(arguments: Sequence[str]) -> int:
    return flags.run(recipes, "recipes", arguments)


def recipes(name: str = "", /) -> int:
    """List the recipes, or say which number format each matrix product of one of them uses.

    Parameters
    ----------
    name
        One recipe; all of them without it.
    """
    from narrowgauge import recipes as registry

    if name:
        recipe = registry.get(name)
        print(f"{name}: {registry.SUMMARIES[name]}")
        for product, gemm in recipe.gemms().items():
            print(f"  {product:12} {gemm}")
    else:
        for each in registry.names():
            print(f"{each:16} {registry.SUMMARIES[each]}")
    return 0
