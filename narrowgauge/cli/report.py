"""`narrowgauge report [RUN ...]`: write RUN/report.html, or one page on several runs or a study."""

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from narrowgauge.errors import ConfigError
from narrowgauge.train.config.settings import TrainConfig


def report(
    *runs: Path,
    output: Annotated[
        str,
        Parameter(
            help="File of a page on several runs. [report.html beside the first run]",
            show_default=False,
        ),
    ] = "",
    reference: Annotated[
        str,
        Parameter(
            help="Recipe that the others are compared with. [that of the first run]",
            show_default=False,
        ),
    ] = "",
    metric: Annotated[
        str,
        Parameter(
            help="What is judged. [what chose the best weights, or the loss]", show_default=False
        ),
    ] = "",
    margin: Annotated[
        str,
        Parameter(help="As 0.25% or 0.003. [0.25% of a loss, 0.01 of a score]", show_default=False),
    ] = "",
) -> int:
    """Write an HTML page on one run, or on several runs side by side, and print its path.

    Parameters
    ----------
    runs
        Folders of runs, or the folder of a study. [runs/latest]
    """
    from narrowgauge.report import page, several

    folders = runs or (Path(TrainConfig.output),)
    # These options would be ignored silently for a single run.
    if len(folders) == 1 and not several.is_study(folders[0]):
        if given := [
            key
            for key, value in (
                ("output", output),
                ("reference", reference),
                ("metric", metric),
                ("margin", margin),
            )
            if value
        ]:
            raise ConfigError(
                f"report: {', '.join(given)} is of several runs, and one is named. Name more, or leave it out.",
                code="report.one-run",
            )
        print(page.write(folders[0]))
        return 0
    print(
        several.write_folders(folders, Path(output) if output else None, reference, metric, margin)
    )
    return 0
