"""`narrowgauge debug RUN --at STEP [--steps N]`: repeats a stretch of a run under one change after another, and says which mends it."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from narrowgauge.train import checkpoint_ref


def debug(
    run: Path,
    /,
    *,
    at: Annotated[
        int, Parameter(help="Step in question; the last checkpoint at or before it is where the rungs begin.")
    ],
    steps: Annotated[int, Parameter(help="Steps after it.")] = 100,
    device: Annotated[str, Parameter(help="auto, cpu, cuda or cuda:N; empty: that of the run.")] = "",
) -> int:
    """Find out whether a run's trouble is its number format, and which change mends it.

    Parameters
    ----------
    run
        Folder of the run. What is found goes to RUN/debug-STEP.json, .txt and .html; nothing else in it is touched.
    """
    checkpoint_ref.settings_of(run)  # before torch is imported
    from narrowgauge.train.debug import debug as climb

    found = climb(run, at, steps, device)
    if not found.exit_code:
        print(found.text)
    return found.exit_code
