"""`narrowgauge compare A B [...]`: compare the curves of runs and branches, judged by a control."""

from pathlib import Path

from narrowgauge.errors import EXIT_CANNOT_TELL


def compare(*runs: Path) -> int:
    """Say whether runs that share batches, such as a run and its branches, have the same curve.

    Parameters
    ----------
    runs
        Folders. The first is the reference; two that differ in micro_batches alone are the control.
    """
    from narrowgauge.diagnose import lineage

    found = lineage.compare(runs)
    print(found.text)
    for each in found.judged:
        print(each.pair.verdict.sentence)
    return EXIT_CANNOT_TELL if any(each.is_insensitive for each in found.judged) else 0
