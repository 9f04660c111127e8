"""`narrowgauge report [RUN]`: writes RUN/report.html."""

from pathlib import Path

from narrowgauge.train.config.settings import TrainConfig


def report(run: Path = Path(TrainConfig.output), /) -> int:
    """Write the page that shows how a run went, and print its path.

    Parameters
    ----------
    run
        Folder of the run.
    """
    from narrowgauge.report import page

    print(page.write(run))
    return 0
