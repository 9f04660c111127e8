"""`narrowgauge train [CONFIG] [FLAGS]`: train a model, with a flag for every setting."""

from typing import Annotated, Any

from narrowgauge.cli.flags import FILE, configuration, refuse_unknown_recipes, signature_of
from narrowgauge.train import first_look, liveness


def train(config: Annotated[str, FILE] = "", **given: Any) -> int:
    """Train a Transformer in low precision.

    Flags override the file: the key hidden_size of the table [model] is --model.hidden-size.
    """
    with liveness.watched():  # before torch is imported: a rank may die at any time
        settings = configuration(config, given)
        first_look.refuse(settings)
        refuse_unknown_recipes(settings)  # before data are read
        from narrowgauge.lab import training

        return training.run(settings)


train.__signature__ = signature_of(train)  # type: ignore[attr-defined]
