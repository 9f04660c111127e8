"""`narrowgauge debug RUN --at STEP`: replay steps of a run under one change after another."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from narrowgauge.train import checkpoint_ref


def debug(
    run: Path,
    /,
    *,
    at: Annotated[
        int,
        Parameter(
            help="Step in question; the last checkpoint at or before it is where the rungs begin."
        ),
    ],
    steps: Annotated[int, Parameter(help="Steps after it.")] = 100,
    device: Annotated[
        str, Parameter(help="auto, cpu, cuda or cuda:N; empty: that of the run.")
    ] = "",
) -> int:
    """Find out whether the number format causes a fault of a run, and which change removes it.

    Parameters
    ----------
    run
        Folder of the run. Only RUN/debug-STEP.json, .txt and .html are written.
    """
    checkpoint_ref.settings_of(
        run
    )  # before the import of torch: a wrong folder is reported at once
    from narrowgauge.lab.debug import debug as climb

    found = climb(run, at, steps, device)
    if not found.exit_code:
        print(found.text)
    return found.exit_code
