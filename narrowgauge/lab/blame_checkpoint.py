"""Blame at a checkpoint: `blame_run` on a run that has ended or was stopped. Writes nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING

from narrowgauge.lab.blame import CONFIRMED, Blame
from narrowgauge.lab.blamed import STEPS, blame_run, logged_baseline
from narrowgauge.lab.reopen import reopened
from narrowgauge.train.checkpoint_ref import CheckpointRef, settings_of
from narrowgauge.train.preparation import prepare
from narrowgauge.train.run_folder import RunFolder

if TYPE_CHECKING:
    from narrowgauge.lab.blame.judge import Baseline


def blame_checkpoint(
    place: CheckpointRef,
    device: str = "",
    *,
    steps: int = STEPS,
    confirm: int = CONFIRMED,
    baseline: Blame | Baseline | None = None,
) -> Blame:
    """Result of `blame_run` at a checkpoint. No other process can train the run meanwhile.

    device    "": the device in the run's settings
    baseline  a step without suspects; None: the last one that the run logged before this checkpoint

    Raises like `blame_run` and `reopen.reopened`: without a checkpoint, while the run is being
    trained, and for another model or other data.
    """
    config = settings_of(place.run)
    config, task = prepare(config)
    with reopened(place, config, task, device or config.device) as trainer:
        healthy = baseline or logged_baseline(RunFolder(place.run).metrics, trainer.step)
        return blame_run(trainer, steps=steps, baseline=healthy, confirm=confirm)
