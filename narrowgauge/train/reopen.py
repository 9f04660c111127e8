"""A run as it stood at one of its checkpoints: a `Trainer` that reads the run's folder and writes nothing.

For a branch (`branch`), and for steps from there that do not count (`debug`). One process, and code that is not compiled.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from narrowgauge import manifest
from narrowgauge.errors import CheckpointError, ConfigError
from narrowgauge.train import guarded
from narrowgauge.train.checkpoint import store
from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.device import threads
from narrowgauge.train.parallel.followers import FollowersLog
from narrowgauge.train.place import BEST, Place, existing, steps_of
from narrowgauge.train.run_folder import RunFolder
from narrowgauge.train.tasks import TrainTask
from narrowgauge.train.trainer import Trainer

# Of one process that takes its steps one by one. What a step computes stays; what memory it takes is another matter.
PLAIN: dict[str, Any] = {"parallel": "", "compile": False, "cuda_graph": False, "checkpointing": "none"}


def silent_log() -> FollowersLog:
    """Writes nothing, and nothing was written."""
    return FollowersLog(Path(os.devnull))


@contextmanager
def reopened(place: Place, config: TrainConfig, task: TrainTask, device: str = "cpu") -> Iterator[Trainer]:
    """The run at that place; nobody can train it in the meantime.

    config  the run's own settings (`place.settings_of`); task: of the same data
    Raises BusyError while the run is being trained, ConfigError for a step without a checkpoint, and what resuming raises of a
    checkpoint that is damaged, or of another model or other data.
    """
    with RunFolder.reading(place.run) as folder, threads(config.threads):
        step, has_all = _step_of(place, folder)
        folder.at = step if has_all else 0
        if config.epochs:
            config = replace(config, steps=task.steps(config.epochs), epochs=0)
        plain = replace(config, device=device, output=str(place.run), **PLAIN)
        trainer = Trainer(plain, folder, task, silent_log(), watch=guarded.watch_of)
        if step is not None and not has_all:
            _take_weights(trainer, folder, step)
        yield trainer


def _step_of(place: Place, folder: RunFolder) -> tuple[int | None, bool]:
    """The step, None for the newest; and whether all of its checkpoint is there: of the best evaluation only the weights may be left."""
    steps = steps_of(place.run)
    if not steps:
        raise ConfigError(f"{place}: {existing(place.run)} Train it to its first checkpoint, or name another run.")
    if place.step is None:
        return None, True
    if place.step == BEST:
        kept = [manifest.read(path).step for path in manifest.newest_first(folder.best)]
        if not kept:
            raise ConfigError(f"{place}: the run has kept no best weights (see --best). {existing(place.run)}")
        return kept[0], kept[0] in steps  # of two the newer one: a kill came before the older was removed
    if place.step not in steps:
        raise ConfigError(f"{place}: no checkpoint of step {place.step}. {existing(place.run)}")
    return int(place.step), True


def _take_weights(trainer: Trainer, folder: RunFolder, step: int) -> None:
    """The best weights alone, at their place in the data: the optimizer, windows and generators are those of a run that begins."""
    weights = store.load(folder.best / f"step-{step:08}").tensors["weights"]
    own = trainer.model.state_dict()
    if wrong := [name for name, tensor in weights.items() if name not in own or own[name].shape != tensor.shape]:
        raise CheckpointError(
            f"{folder.best}: the best weights are of another model: {wrong[0]!r} does not fit. Name a checkpoint by its step."
        )
    with torch.no_grad():
        for name, tensor in weights.items():
            own[name].copy_(tensor)
    for stage in trainer.stages:
        if stage.step <= step:
            stage.apply(trainer.model)
    for done in range(step):  # a feed moves on by drawing
        trainer.feed.draw(done)
    trainer.step = trainer.saved_step = step
