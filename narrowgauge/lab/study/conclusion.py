"""Conclusion of a study: how its runs ended, the verdicts over seeds, and the report."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from narrowgauge.diagnose import seeds_text
from narrowgauge.diagnose.seeds import NOT_FINITE, SeedComparison
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
    for each in verdicts:
        print(seeds_text.verdict(each).text(each.runs.name))
    for words in several.limits(found, facts):
        print(words)
    for recorded, why in found.apart:
        tell(f"{recorded.folder.name} is left out of the verdicts: {why}.")
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
