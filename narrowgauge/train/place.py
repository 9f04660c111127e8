"""A run and one of its checkpoints, as a user names them; and what a branch that starts there may change.

    RUN         the newest checkpoint that is intact
    RUN@STEP    that of a step
    RUN@best    that of the best evaluation; where only the best weights are left, those, with a fresh optimizer

Without torch: the command line refuses wrong places and settings before it is imported.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from narrowgauge import manifest
from narrowgauge.errors import ConfigError
from narrowgauge.train.config import toml
from narrowgauge.train.config.settings import TrainConfig, key_of, resolved, shown
from narrowgauge.train.run_folder import MAY_CHANGE, RunFolder

BEST = "best"

# What may differ between a branch and its parent besides what may change on resuming: numbers, and how far a step goes.
# The model, the data and their order, the seed and the rule of the updates stay: without them the parent's state means nothing.
NUMBERS = frozenset(
    {"recipe", "layers_recipe", "embedding_codes", "switch", "precision", "keep_float32", "fuse", "save", "states", "embedding_states"}
    | {"master", "loss", "compress_activations", "step_in_backward", "clip_by", "held_gradients", "gradients", "weights", "activations"}
)  # fmt: skip
STEPS = frozenset(
    {"learning_rate", "min_learning_rate", "warmup_steps", "weight_decay", "beta1", "beta2", "epsilon", "clip"}
)
# Of the parent's, what another value of the first does away with unless it is given: as the reference of `compare` leaves it out.
REPLACES = {
    "recipe": ("layers_recipe", "embedding_codes", "switch", "save", "guard"),
    "precision": ("master", "keep_float32"),
}
NOT_INHERITED = ("output", "resume", "parent", "compare")


@dataclass(frozen=True)
class Place:
    """A run and one of its checkpoints. step: None is the newest, `BEST` that of the best evaluation."""

    run: Path
    step: int | str | None = None

    @classmethod
    def of(cls, text: str) -> Place:
        """Reads "RUN", "RUN@STEP" or "RUN@best"; an existing folder's name may hold an @."""
        found = re.fullmatch(r"(.+)@([0-9]{1,8}|best)", text)
        if found is None or Path(text).is_dir():
            return cls(Path(text))
        return cls(Path(found[1]), BEST if found[2] == BEST else int(found[2]))

    def __str__(self) -> str:
        return str(self.run) if self.step is None else f"{self.run}@{self.step}"


def settings_of(run: Path) -> TrainConfig:
    """The settings of a run. ConfigError if the folder is not there, or is none of a run."""
    return resolved(toml.load_stored(config_of(run)))


def config_of(run: Path) -> Path:
    """The file of a run's settings. ConfigError if there is none."""
    folder = RunFolder(run)
    if not os.path.lexists(folder.config):
        what = "has no config.toml" if run.is_dir() else "is not there"
        raise ConfigError(f"{run}: {what}. Name the folder of a run, perhaps with one of its steps, as runs/first@100.")
    return folder.config


def steps_of(run: Path) -> list[int]:
    """The steps that have a checkpoint, in order; damaged ones count too."""
    return [int(path.name.partition("-")[2]) for path in reversed(manifest.newest_first(RunFolder(run).checkpoints))]


def at_or_before(run: Path, step: int) -> Place:
    """The last checkpoint up to a step. ConfigError if all are later, or there is none."""
    earlier = [each for each in steps_of(run) if each <= step]
    if not earlier:
        later = "Name a later step" if steps_of(run) else "Train it to its first checkpoint"
        raise ConfigError(
            f"{run}@{step}: no checkpoint at or before step {step}. {existing(run)} {later}, or name another run."
        )
    return Place(run, earlier[-1])


def existing(run: Path) -> str:
    """A sentence on the checkpoints that a run has."""
    steps = steps_of(run)
    if not steps:
        return f"{run} has no checkpoint."
    return f"{run} has checkpoints of step {', '.join(map(str, steps))}; --keep says how many are kept."


# The settings of a branch


def branched(parent: str, output: str, **changes: Any) -> TrainConfig:
    """The settings of a branch, from Python: those of the run that `parent` ("RUN", "RUN@STEP", "RUN@best") names, with changes."""
    given = {"output": output, "parent": parent, **changes}
    keys = {key_of(TrainConfig.__dataclass_fields__[name]): (value, name) for name, value in given.items()}
    config = resolved(toml.build(inherited(Place.of(parent).run, changes), keys))
    refuse(settings_of(Place.of(parent).run), config)
    return config


def inherited(parent: Path, given: Collection[str]) -> toml.Given:
    """The parent's settings for a branch. given: names of the fields that its user gives, which may do away with others."""
    known = {key_of(each): each.name for each in fields(TrainConfig)}
    dropped = {*NOT_INHERITED, *(name for cause in given for name in REPLACES.get(cause, ()))}
    return {key: value for key, value in toml.read_stored(config_of(parent)).items() if known[key] not in dropped}


def refuse(parent: TrainConfig, config: TrainConfig) -> None:
    """ConfigError if a branch of a run with the settings `parent` cannot have `config`."""
    if Path(config.output).resolve() == Place.of(config.parent).run.resolve():
        raise ConfigError(
            f"from = {config.parent!r}: a branch has a folder and a log of its own, and output is its parent's. Choose another --output."
        )
    free = NUMBERS | STEPS | MAY_CHANGE
    wrong = [
        f"{key_of(each)} = {shown(getattr(config, each.name))}, but the parent has {shown(getattr(parent, each.name))}"
        for each in fields(TrainConfig)
        if each.metadata["group"] != "run"
        and each.name not in free
        and getattr(config, each.name) != getattr(parent, each.name)
    ]
    if wrong:
        allowed = ", ".join(key_of(each) for each in fields(TrainConfig) if each.name in NUMBERS | STEPS)
        raise ConfigError(
            f"from = {config.parent!r}: a branch cannot have {'; '.join(wrong)}. Drop the change, or train anew. It may differ in "
            f"{allowed}."
        )


def changes(parent: TrainConfig, config: TrainConfig) -> dict[str, list[object]]:
    """Key -> the parent's value and the branch's, of what may change the numbers."""
    counts = NUMBERS | STEPS | {"micro_batches", "steps", "parallel", "compile", "device"}
    return {
        key_of(each): [getattr(parent, each.name), getattr(config, each.name)]
        for each in fields(TrainConfig)
        if each.name in counts and getattr(parent, each.name) != getattr(config, each.name)
    }
