"""`narrowgauge recipes [NAME]`: which number format each matrix product uses."""

from collections.abc import Sequence

from narrowgauge.cli import flags


def main(arguments: Sequence[str]) -> int:
    return flags.run(recipes, "recipes", arguments)


def recipes(name: str = "", /) -> int:
    """List the recipes: which number format each matrix product uses.

    Parameters
    ----------
    name
        One recipe; all of them without it.
    """
    from narrowgauge import recipes as registry

    print("\n".join(str(registry.get(each)) for each in ([name] if name else registry.names())))
    return 0
