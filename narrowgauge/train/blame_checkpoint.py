"""Blame at a checkpoint of a run that has ended, or was stopped: `blame_run` of the run as it stood there, which writes nothing."""

from __future__ import annotations

from narrowgauge.diagnose.blame import CONFIRMED, Blame
from narrowgauge.diagnose.blame.judge import Baseline
from narrowgauge.train.blamed import STEPS, blame_run, logged_baseline
from narrowgauge.train.loop import prepare
from narrowgauge.train.place import Place, settings_of
from narrowgauge.train.reopen import reopened
from narrowgauge.train.run_folder import RunFolder


def blame_checkpoint(
    place: Place,
    device: str = "",
    *,
    steps: int = STEPS,
    confirm: int = CONFIRMED,
    baseline: Blame | Baseline | None = None,
) -> Blame:
    """What `blame_run` finds there; nobody may train the run in the meantime.

    device    "" as the run had it
    baseline  a healthy step; None: the last one that the run has logged before

    Raises as `blame_run` and `reopen.reopened`: without a checkpoint, while it is trained, and where data or model are others.
    """
    config = settings_of(place.run)
    config, task = prepare(config)
    with reopened(place, config, task, device or config.device) as trainer:
        healthy = baseline or logged_baseline(RunFolder(place.run).metrics, trainer.step)
        return blame_run(trainer, steps=steps, baseline=healthy, confirm=confirm)
