"""What settings bring about that is right for some runs and a surprise in others: notes before the first step, never refusals."""

from __future__ import annotations

from collections.abc import Iterator

from narrowgauge import recipes
from narrowgauge.train.config.settings import NO_RECIPE, TrainConfig

# Above what pretrained weights are fine-tuned with by AdamW, all of them: 5e-5 for BERT and MiniLM, 1e-5 to 3e-4 elsewhere.
HIGH_FOR_PRETRAINED = 5e-4


def notes(config: TrainConfig) -> Iterator[str]:
    """Of a configuration whose steps are known."""
    pretrained = config.model and not config.from_scratch
    if pretrained and config.optimizer == "adamw" and config.learning_rate > HIGH_FOR_PRETRAINED:
        yield (
            f"learning_rate = {config.learning_rate:g} is one for random weights; pretrained ones may forget what they know. "
            "Fine-tuning usually takes 1e-5 to 3e-4, as --learning-rate 5e-5."
        )
    if config.warmup_steps >= config.steps:
        yield (
            f"warmup_steps = {config.warmup_steps} does not end within the {config.steps} steps of the run: the learning rate "
            "rises to the last step. Lower warmup_steps, or train longer."
        )
    sampling = sorted(name for name in _recipes(config) if recipes.get(name).samples())
    if config.compile and sampling:
        yield (
            f"compile = true with {', '.join(sampling)}: code is made anew whenever a layer begins or ceases to sample its rows, "
            "and after eight times PyTorch leaves the model uncompiled. Leave compile out, or take a recipe that samples nothing, "
            "as int4-hq-bs."
        )


def _recipes(config: TrainConfig) -> set[str]:
    return {config.recipe, *config.layers_recipe.values()} - {recipes.AUTO, NO_RECIPE}
