"""Preparation of a run: the task's data, the number of steps, and notes on the settings."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from narrowgauge import recipes
from narrowgauge.errors import DataError
from narrowgauge.train.config import recipe_syntax
from narrowgauge.train.config.settings import NO_RECIPE, TrainConfig
from narrowgauge.train.console import tell_note
from narrowgauge.train.tasks import TrainTask, task_class

if TYPE_CHECKING:
    from narrowgauge.train.parallel.ranks import Ranks

# Above common learning rates of AdamW for full fine-tuning: 5e-5 for BERT and MiniLM, 1e-5 to 3e-4
# for others.
HIGH_FOR_PRETRAINED = 5e-4


def prepare_on_ranks(config: TrainConfig, ranks: Ranks) -> tuple[TrainConfig, TrainTask]:
    """Calls `prepare` on rank 0 first, then on the others, which find its result in the cache.

    Tells the notes. Raises DataError if ranks differ in data or number of steps.
    """
    found = ranks.first(lambda: prepare(config)) or prepare(config)
    tell_notes(*found)
    ranks.refuse_differences(found[1].identity | {"steps": found[0].steps}, "data", DataError)
    return found


def prepare(config: TrainConfig) -> tuple[TrainConfig, TrainTask]:
    """Prepares the task's data. Returns (configuration with epochs converted to steps, task)."""
    task = task_class(config.task).prepare(config)
    if config.epochs:
        config = replace(config, steps=task.steps(config.epochs), epochs=0)
    return config, task


def tell_notes(config: TrainConfig, task: TrainTask) -> None:
    """For those who begin a run. Readers of a run, such as `evaluate`, would only repeat them."""
    for note in (*task.notes, *notes(config)):
        tell_note(note)


def notes(config: TrainConfig) -> Iterator[str]:
    """Yields a sentence for each setting that is valid but may surprise.

    The steps of `config` must be known.
    """
    pretrained = config.model and not config.from_scratch
    if pretrained and config.optimizer == "adamw" and config.learning_rate > HIGH_FOR_PRETRAINED:
        yield (
            f"optimizer.learning_rate = {config.learning_rate:g} is one for random weights; pretrained ones may forget what they know. "
            "Fine-tuning usually takes 1e-5 to 3e-4, as --optimizer.learning-rate 5e-5."
        )
    if config.warmup_steps >= config.steps:
        yield (
            f"optimizer.warmup_steps = {config.warmup_steps} does not end within the {config.steps} steps of the run: the learning rate "
            "rises to the last step. Lower warmup_steps, or train longer."
        )
    for name in dict.fromkeys((config.recipe, config.compare)):
        if name in recipes.SHORTHANDS:
            stands_for, why = recipes.SHORTHANDS[name]
            yield f"recipe {name!r} stands for {stands_for!r}: {why}."
    own, other = (
        recipes.SHORTHANDS.get(name, (name,))[0] for name in (config.recipe, config.compare)
    )
    if own == other and not (
        config.layers_recipe
        or config.embedding_codes
        or config.attention
        or config.switch
        or config.save
    ):
        yield (
            f"compare = {config.compare!r} is the recipe of the run itself: the same numbers are computed twice. Name another, as bf16."
        )
    names = recipe_syntax.names(config.recipe, config.layers_recipe) - {recipes.AUTO, NO_RECIPE}
    sampling = sorted(name for name in names if recipes.get(name).samplers())
    if config.compile and sampling:
        yield (
            f"device.compile = true with {', '.join(sampling)}: code is made anew whenever a layer begins or ceases to sample its rows, "
            "and after eight times PyTorch leaves the model uncompiled. Leave compile out, or take a recipe that samples nothing, "
            "as int4-hq-bs."
        )
