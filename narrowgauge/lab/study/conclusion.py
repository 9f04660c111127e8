"""Conclusion of a study: how its runs ended, the verdicts over seeds, and the report.

conclude         runs that `narrowgauge study` trained
conclude_runs    run folders of any loop, as `integrations.RunFolder` writes them
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowgauge.diagnose import seeds_text
from narrowgauge.diagnose.seeds import NOT_FINITE, Margin, SeedComparison
from narrowgauge.errors import EXIT_CANNOT_TELL, OutOfMemoryError
from narrowgauge.report import groups, several
from narrowgauge.report.run_data import read_alone
from narrowgauge.train.console import tell
from narrowgauge.train.metrics import MetricsLog

if TYPE_CHECKING:
    from narrowgauge.lab.study.plan import Job, Study, StudyFolder


@dataclass(frozen=True)
class StudyResult:
    """Outcome of a study.

    exit_code  see `run`
    verdicts   comparison of each other recipe with the reference; [] if the study was stopped
    failed     {run folder: reason}
    """

    exit_code: int
    verdicts: list[SeedComparison] = field(default_factory=list)
    failed: Mapping[str, str] = field(default_factory=dict)


def ending(job: Job) -> str | None:
    """'' for a finished run, NOT_FINITE for a diverged one; None if it must be trained."""
    if not os.path.lexists(job.folder / "run.json"):
        return None
    _, why = groups.final(read_alone(job.folder), "loss")
    return why if why in ("", NOT_FINITE) else None


def conclude(study: Study, folder: StudyFolder, facts: dict[str, Any]) -> StudyResult:
    """Computes the verdicts, prints and logs them, and writes the report."""
    # The numbers of seeds at which verdicts were computed: repeated looks weaken the evidence.
    facts["looks"] = list(dict.fromkeys([*facts["looks"], len(study.seeds)]))
    folder.write(facts, study.config)
    found = several.of_study(folder.path)
    verdicts = found.verdicts()
    with MetricsLog(folder.metrics) as log:
        numbers = [each.numbers() for each in verdicts]
        log.write(
            "study",
            facts["steps"],
            metric=found.metric,
            reference=found.groups[0].name,
            verdicts=numbers,
        )
        log.sync()
    _tell(found, verdicts, facts)
    tell(f"Report: {several.write(found, folder.path / 'report.html', facts)}")
    failed = facts["failed"]
    code = (
        OutOfMemoryError.exit_code
        if failed and set(failed.values()) <= {"out of memory"}
        else int(bool(failed) or bool(found.apart))
    )
    if not code and any(each.is_insensitive for each in verdicts):
        code = EXIT_CANNOT_TELL
    for name, why in failed.items():
        tell(f"{name} failed: {why}. The same command tries it again.")
    return StudyResult(code, verdicts, failed)


def conclude_runs(
    folders: Sequence[Path], output: Path, reference: str = "", metric: str = "", margin: str = ""
) -> StudyResult:
    """Computes the verdicts on finished run folders, prints them, and writes OUTPUT/report.html.

    reference  recipe; '': that of the first run
    metric     of the last evaluation; '': what chose the best weights, else the loss
    margin     as of `Study`

    Who trained the runs has to give pairs of one seed the same batches: tokens of each step are
    compared, and the data where run.json names them. Raises ConfigError if OUTPUT is a run or a
    study, which has a page of its own. Exit codes are those of `runner.run`; 1 also
    if some runs cannot be compared.
    """
    chosen = Margin.parse(margin) if margin else None
    several.refuse_other_page(output / "report.html")
    found = groups.gather(folders, reference, metric, chosen)
    verdicts = found.verdicts()
    _tell(found, verdicts, {})
    tell(f"Report: {several.write(found, output / 'report.html')}")
    code = int(bool(found.apart))
    if not code and any(each.is_insensitive for each in verdicts):
        code = EXIT_CANNOT_TELL
    return StudyResult(code, verdicts)


def _tell(
    found: groups.Gathered, verdicts: Sequence[SeedComparison], facts: Mapping[str, Any]
) -> None:
    """Prints the verdicts and their limits; on standard error the runs that are in none."""
    for each in verdicts:
        print(seeds_text.verdict(each).text(each.runs.name))
    for words in several.limits(found, facts):
        print(words)
    for recorded, why in found.apart:
        tell(f"{recorded.folder.name} is left out of the verdicts: {why}.")
    for group in found.groups:
        if group.reason:
            names = ", ".join(each.folder.name for each in group.runs)
            tell(f"{names} has no verdict: {group.reason}.")
