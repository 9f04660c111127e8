"""`narrowgauge compare A B [...]`: runs and their branches on one axis, judged by a control among them."""

from pathlib import Path

from narrowgauge.errors import EXIT_CANNOT_TELL


def compare(*runs: Path) -> int:
    """Say whether runs that share batches, as a run and its branches, have the same curve.

    Parameters
    ----------
    runs
        Folders; the first is compared with each of the others. Two that differ in micro_batches alone are the control.
    """
    from narrowgauge.diagnose import lineage

    found = lineage.compare(runs)
    print(found.text)
    for each in found.judged:
        print(each.pair.verdict)
    return EXIT_CANNOT_TELL if any(each.cannot_tell for each in found.judged) else 0
