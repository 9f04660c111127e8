"""`narrowgauge blame RUN [--at STEP]`: find inaccurate GEMMs of a run and confirm their effect."""

from __future__ import annotations

import json as json_format
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from narrowgauge.errors import ConfigError
from narrowgauge.train import checkpoint_ref
from narrowgauge.train.checkpoint_ref import CheckpointRef


def _flag(words: str) -> Parameter:
    return Parameter(help=words, show_default=True, negative=())


def blame(
    run: Path,
    /,
    *,
    at: Annotated[int, _flag("Step whose checkpoint is looked at; 0: the newest.")] = 0,
    steps: Annotated[
        int, _flag("Steps of a stretch that confirms a suspect; 0: by the gradient of one step.")
    ] = 50,
    baseline: Annotated[
        int, _flag("Step of a healthy checkpoint to compare with; 0: others of the kind.")
    ] = 0,
    device: Annotated[str, _flag("cpu, cuda or cuda:N; empty: as the run had it.")] = "",
    json: Annotated[bool, _flag("Print the answer as JSON.")] = False,
) -> int:
    """Find the inaccurate matrix products of a run, and print the setting that mends them.

    Suspects are confirmed, and the printed setting computes them in 16 bits. Reads a checkpoint of
    the run and the batches that follow it. Writes nothing. The run must not be training at the same
    time.

    Parameters
    ----------
    run
        Folder of the run.
    """
    if min(at, steps, baseline) < 0:
        raise ConfigError(
            f"blame: --at {at} --steps {steps} --baseline {baseline}: must be 0 or more.",
            code="blame.counts",
        )
    checkpoint_ref.settings_of(
        run
    )  # before the import of torch: a wrong folder is reported at once
    from narrowgauge.lab.blame_checkpoint import blame_checkpoint
    from narrowgauge.train.console import tell

    healthy = None
    if baseline:
        tell(f"Looking for a healthy step at the checkpoint of step {baseline} ...")
        healthy = blame_checkpoint(CheckpointRef(run, baseline), device, confirm=0)
    tell("Looking at one step and, of suspects, at stretches of steps ...")
    found = blame_checkpoint(CheckpointRef(run, at or None), device, steps=steps, baseline=healthy)
    print(json_format.dumps(found.as_dict(), indent=2) if json else found)
    return 0
