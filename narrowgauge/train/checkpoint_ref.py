"""Names of a run's checkpoints on the command line, and the settings that a branch may change.

    RUN         the newest intact checkpoint
    RUN@STEP    the checkpoint of a step
    RUN@best    the checkpoint of the best evaluation; if only its weights are left, these with a
                fresh optimizer

Imports no torch: the command line refuses wrong names and settings before it loads torch.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from narrowgauge import manifest
from narrowgauge.errors import ConfigError
from narrowgauge.train.config import toml
from narrowgauge.train.config.settings import (
    TrainConfig,
    differences,
    former_key,
    key_of,
    resolved,
)
from narrowgauge.train.run_folder import MAY_CHANGE, RunFolder, is_numbered

BEST = "best"

# Settings that a branch may change, besides those that a resumed run may change: numerics, and the
# size of a step. Model, data, data order, seed and update rule stay, since the parent's state is
# meaningless under others.
NUMBERS = frozenset(
    {"recipe", "layers_recipe", "embedding_codes", "attention", "switch", "precision", "keep_float32", "fuse", "save", "states"}
    | {"embedding_states", "master", "loss", "compress_activations", "clip_by", "held_gradients", "gradients", "weights", "activations"}
)  # fmt: skip
STEPS = frozenset(
    {
        "learning_rate",
        "min_learning_rate",
        "warmup_steps",
        "rate_schedule",
        "decay_steps",
        "weight_decay",
        "betas",
        "epsilon",
        "clip",
    }
)
# Changing the first setting resets these settings of the parent unless they are given, as in the
# reference run of `compare`.
REPLACES = {
    "recipe": ("layers_recipe", "embedding_codes", "attention", "switch", "save", "guard"),
    "precision": ("master", "keep_float32"),
}
NOT_INHERITED = ("output", "resume", "parent", "compare")


@dataclass(frozen=True)
class CheckpointRef:
    """Name of a run and one checkpoint of this run.

    step  None: the newest; BEST: the best evaluation
    """

    run: Path
    step: int | str | None = None

    @classmethod
    def of(cls, text: str) -> CheckpointRef:
        """Parses "RUN", "RUN@STEP" or "RUN@best". A folder with an @ in its name is a RUN."""
        found = re.fullmatch(r"(.+)@([0-9]{1,8}|best)", text)
        if found is None or Path(text).is_dir():
            return cls(Path(text))
        return cls(Path(found[1]), BEST if found[2] == BEST else int(found[2]))

    def of_newest(self) -> CheckpointRef:
        """The same checkpoint, and for runs/latest the run that it names now."""
        if not self.run.is_symlink():
            return self
        return replace(self, run=self.run.parent / os.readlink(self.run))

    def __str__(self) -> str:
        return str(self.run) if self.step is None else f"{self.run}@{self.step}"


def settings_of(run: Path) -> TrainConfig:
    """Settings of a run. Raises ConfigError if the folder is missing or holds no run."""
    return resolved(toml.load_stored(config_of(run)))


def config_of(run: Path) -> Path:
    """Path of a run's config.toml. Raises ConfigError if there is none."""
    folder = RunFolder(run)
    if not os.path.lexists(folder.config):
        what = "has no config.toml" if run.is_dir() else "is not there"
        raise ConfigError(
            f"{run}: {what}. Name the folder of a run, perhaps with one of its steps, as runs/first@100.",
            code="run.place",
        )
    return folder.config


def steps_of(run: Path) -> list[int]:
    """Steps with a checkpoint, in ascending order, including damaged checkpoints."""
    return [
        int(path.name.partition("-")[2])
        for path in reversed(manifest.newest_first(RunFolder(run).checkpoints))
    ]


def at_or_before(run: Path, step: int) -> CheckpointRef:
    """The last checkpoint up to a step. Raises ConfigError if there is none."""
    earlier = [each for each in steps_of(run) if each <= step]
    if not earlier:
        later = "Name a later step" if steps_of(run) else "Train it to its first checkpoint"
        raise ConfigError(
            f"{run}@{step}: no checkpoint at or before step {step}. {existing(run)} {later}, or name another run.",
            code="run.no-checkpoint",
        )
    return CheckpointRef(run, earlier[-1])


def existing(run: Path) -> str:
    """A sentence on the checkpoints of a run."""
    steps = steps_of(run)
    if not steps:
        return f"{run} has no checkpoint."
    return f"{run} has checkpoints of step {', '.join(map(str, steps))}; --checkpoint.keep says how many are kept."


# The settings of a branch


def branched(parent: str, output: str, **changes: Any) -> TrainConfig:
    """Settings of a branch: its parent's settings with changes.

    parent   "RUN", "RUN@STEP" or "RUN@best"
    changes  field names and values
    """
    given = {"output": output, "parent": parent, **changes}
    entries = {name: toml.Entry(value, name) for name, value in given.items()}
    config = resolved(toml.build(inherited(CheckpointRef.of(parent).run, changes), entries))
    refuse(settings_of(CheckpointRef.of(parent).run), config)
    return config


def inherited(parent: Path, given: Collection[str]) -> toml.Given:
    """Settings that a branch inherits from its parent.

    given  names of the fields that the user sets. Some reset inherited settings (REPLACES)
    """
    dropped = {*NOT_INHERITED, *(name for cause in given for name in REPLACES.get(cause, ()))}
    return {
        name: entry
        for name, entry in toml.read_stored(config_of(parent)).items()
        if name not in dropped
    }


def refuse(parent: TrainConfig, config: TrainConfig) -> None:
    """Raises ConfigError if a branch of a run with settings `parent` cannot have `config`."""
    own = Path(config.output)
    is_new = is_numbered(own) and not config.resume
    if not is_new and own.resolve() == CheckpointRef.of(config.parent).run.resolve():
        raise ConfigError(
            f"from = {config.parent!r}: a branch has a folder and a log of its own, and output is its parent's. Choose another --output.",
            code="branch.output",
        )
    free = NUMBERS | STEPS | MAY_CHANGE
    wrong = differences(
        config,
        parent,
        "the parent",
        lambda each: not each.metadata["free"] and each.name not in free,
    )
    if wrong:
        allowed = ", ".join(
            key_of(each) for each in fields(TrainConfig) if each.name in NUMBERS | STEPS
        )
        raise ConfigError(
            f"from = {config.parent!r}: a branch cannot have {'; '.join(wrong)}. Drop the change, or train anew. It may differ in "
            f"{allowed}.",
            code="branch.changed",
        )


def changes(parent: TrainConfig, config: TrainConfig) -> dict[str, list[object]]:
    """Former key -> [parent's value, branch's value] of settings that may change the numbers."""
    counts = NUMBERS | STEPS | {"micro_batches", "steps", "parallel", "compile", "device"}
    return {
        former_key(each): [getattr(parent, each.name), getattr(config, each.name)]
        for each in fields(TrainConfig)
        if each.name in counts and getattr(parent, each.name) != getattr(config, each.name)
    }
