"""State of earlier guards in a run's checkpoints, and the place for a copy of the state."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from narrowgauge import manifest
from narrowgauge.diagnose.guard.settings import GuardSettings
from narrowgauge.diagnose.runs import decode
from narrowgauge.errors import ConfigError, OutOfMemoryError
from narrowgauge.snapshot import NAME
from narrowgauge.snapshot.block_storage import require_free_space
from narrowgauge.train.callback import Callback
from narrowgauge.train.checkpoint import state
from narrowgauge.train.checkpoint_ref import NUMBERS, STEPS
from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.model import RecipeSwitch, chosen_recipe, with_switch
from narrowgauge.train.parallel.ranks import Ranks

if TYPE_CHECKING:
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


def terms(trainer: Trainer, settings: GuardSettings) -> dict[str, Any]:
    """Settings and batches that the losses of a check depend on.

    They change by resuming with other settings, in a branch, or when a spike's batch is skipped. A
    check in progress is dropped then: its BF16 steps are no reference for the run any more. Without
    this rule, a branch with ten times the learning rate was judged 1.17 nats better than its
    parent's reference.
    """
    of_run = {
        name: str(getattr(trainer.config, name)) for name in sorted(NUMBERS | STEPS | {"steps"})
    }
    return {
        "run": of_run,
        "left_out": trainer.feed.left_out,
        "every": settings.every,
        "steps": settings.steps,
    }


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


def place_of_copy(nbytes: int, folder: Path, ranks: Ranks) -> str | Path:
    """Chooses the place for a copy of the state: "host" or the folder of the run.

    Raises StorageError if neither has space.

    All ranks of a machine need their copies at the same time, so their sizes are added.
    """
    total = nbytes * (int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if ranks.world > 1 else 1)
    try:
        require_free_space(total, "host", NAME)
    except OutOfMemoryError:
        require_free_space(total, folder, NAME)
        return folder
    return "host"
