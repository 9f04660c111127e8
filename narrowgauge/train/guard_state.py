"""State of a guard in a run's checkpoints, as runs without a guard and evaluations read it.

The guard itself is in `narrowgauge.lab`, which this package does not import.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from narrowgauge import manifest
from narrowgauge.diagnose.runs import decode
from narrowgauge.errors import ConfigError
from narrowgauge.train.callback import Callback
from narrowgauge.train.checkpoint import state
from narrowgauge.train.recipe_schedule import RecipeSwitch, chosen_recipe, with_switch

if TYPE_CHECKING:
    from narrowgauge.train.config.settings import TrainConfig
    from narrowgauge.train.trainer import Trainer

KEY = "guard"  # key in the facts of a checkpoint


def known_of(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Guard state in the facts of a checkpoint; {} if it has none."""
    if KEY not in facts:
        return {}
    with state.unusable(f"{manifest.FACTS}: {KEY}"):
        return decode(facts[KEY])


def with_given(
    switches: list[RecipeSwitch], model: nn.Module, config: TrainConfig, facts: Mapping[str, Any]
) -> list[RecipeSwitch]:
    """The recipe switches of a run, including a guard's switch to a recipe of higher precision."""
    if (switched := known_of(facts).get("switched")) is None:
        return switches
    step, name = switched
    return with_switch(switches, model, chosen_recipe(config, name), step, f"guard: {name}@{step}")


class Unguarded(Callback):
    """A run without a guard that may have had one before.

    It keeps the recipe of higher precision that the guard gave it.
    """

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._before: dict[str, Any] = {}

    def before_load(self, facts: Mapping[str, Any]) -> None:
        known = known_of(facts)
        if known.get("wide"):
            raise ConfigError(
                f"output = {self.trainer.config.output!r}: the guard of this run has put it into BF16 until its next check. Resume with "
                "--guard as it was, as --guard then=stay with its other keys.",
                code="guard.left-in-bf16",
            )
        if known.get("switched") is not None:
            trainer = self.trainer
            trainer.switch_recipes(
                with_given(list(trainer.switches), trainer.model, trainer.config, facts)
            )
            self._before = {KEY: facts[KEY]}

    def state(self) -> dict[str, Any]:
        return self._before
