"""Open a run at a checkpoint, as a `Trainer` that writes nothing.

Used by branches (`branch`) and by probes from a checkpoint (`debug`, `blame_checkpoint`). One
process, without torch.compile.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowgauge import manifest
from narrowgauge.errors import ConfigError
from narrowgauge.lab import run_guard
from narrowgauge.train.checkpoint_ref import BEST, CheckpointRef, existing, steps_of
from narrowgauge.train.device import threads
from narrowgauge.train.parallel.followers import FollowersLog
from narrowgauge.train.run_folder import RunFolder
from narrowgauge.train.trainer import Trainer

if TYPE_CHECKING:
    from narrowgauge.train.config.settings import TrainConfig
    from narrowgauge.train.tasks import TrainTask

# Settings for one process that reads every step. They leave the arithmetic of a step alone but not
# its memory.
PLAIN: dict[str, Any] = {
    "parallel": "",
    "compile": False,
    "cuda_graph": False,
    "checkpointing": "none",
}


def silent_log() -> FollowersLog:
    """A log that writes nothing and contains nothing."""
    return FollowersLog(Path(os.devnull))


@contextmanager
def reopened(
    place: CheckpointRef, config: TrainConfig, task: TrainTask, device: str = "cpu"
) -> Iterator[Trainer]:
    """Yields a Trainer of the run, restored from the checkpoint at `place`.

    No other process can train the run meanwhile.

    config  the run's own settings (`checkpoint_ref.settings_of`)
    task    the prepared task, with the same data
    device  where the model is built

    Raises BusyError while the run is being trained, and ConfigError for a step without a
    checkpoint. Damaged checkpoints and checkpoints of another model or other data raise as in
    resuming.
    """
    with RunFolder.reading(place.run) as folder, threads(config.threads):
        step, has_all = _step_of(place, folder)
        folder.at = step if has_all else 0
        if config.epochs:
            config = replace(config, steps=task.steps(config.epochs), epochs=0)
        plain = replace(config, device=device, output=str(place.run), **PLAIN)
        trainer = Trainer(plain, folder, task, silent_log(), plugins=[run_guard.plugin])
        if step is not None and not has_all:
            trainer.start_from_best(step)
        yield trainer


def _step_of(place: CheckpointRef, folder: RunFolder) -> tuple[int | None, bool]:
    """Returns (step, None for the newest; True if its whole checkpoint exists).

    Of the best evaluation, weights may be all that is left.
    """
    steps = steps_of(place.run)
    if not steps:
        raise ConfigError(
            f"{place}: {existing(place.run)} Train it to its first checkpoint, or name another run.",
            code="run.no-checkpoint",
        )
    if place.step is None:
        return None, True
    if place.step == BEST:
        kept = [manifest.read(path).step for path in manifest.newest_first(folder.best)]
        if not kept:
            raise ConfigError(
                f"{place}: the run has kept no best weights (see --task.best). {existing(place.run)}",
                code="run.no-best",
            )
        # Two exist if a kill came before the older was removed: use the newer
        return kept[0], kept[0] in steps
    if place.step not in steps:
        raise ConfigError(
            f"{place}: no checkpoint of step {place.step}. {existing(place.run)}",
            code="run.no-checkpoint",
        )
    return int(place.step), True
