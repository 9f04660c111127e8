"""`narrowgauge study`: continues a study from its current state and computes the verdicts.

study = Study(
    config=toml.load(Path("cola.toml")), recipes=("bf16", "fp8-current"),
    seeds=(0, 1, 2, 3, 4), output=Path("runs/study"),
)
result = run(study)
[each.outcome for each in result.verdicts]
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from narrowgauge import recipes, storage
from narrowgauge.diagnose.seeds import NOT_FINITE
from narrowgauge.errors import ConfigError
from narrowgauge.lab.study import room
from narrowgauge.lab.study.conclusion import StudyResult, conclude, ending
from narrowgauge.lab.study.plan import Job, Study, StudyFolder, refuse_metric
from narrowgauge.lab.study.pool import Pool
from narrowgauge.lab.study.progress import StudyProgress
from narrowgauge.train import preparation
from narrowgauge.train.config import toml
from narrowgauge.train.config.settings import NO_RECIPE
from narrowgauge.train.console import tell
from narrowgauge.train.parallel.ranks import under_torchrun
from narrowgauge.train.signals import StopRequest


def run(study: Study) -> StudyResult:
    """Trains missing runs, computes the verdicts, and writes the report.

    Exit codes:

        0        success; diverged runs are a result, too
        1, 9     some runs failed (9: all out of memory); the next start retries them
        11       the runs have not learnt enough for a verdict (`diagnose.sensitivity`); more seeds
                 would not help
        75, 130  stopped on request

    Raises ConfigError, DataError and others before the first step, or if every run would fail
    alike. Trained runs are kept.
    """
    _refuse_recipes(study)
    if under_torchrun():
        raise ConfigError(
            "study: starts its own processes. Run it without torchrun.", code="study.torchrun"
        )
    folder = StudyFolder(study.output)
    with folder.claimed(), StopRequest() as stop:
        stored = folder.stored()
        folder.refuse(study, stored)
        tell(f"Reading {study.config.data} ...")
        # Before any run starts: faulty data are reported once, and the cache is filled.
        config, task = preparation.prepare(study.settings_of(study.jobs()[0]))
        preparation.tell_notes(config, task)
        identity = dict(task.identity)
        folder.refuse_data(stored, identity)
        before = stored or {}
        study = replace(
            study, metric=study.metric or before.get("metric", "") or task.best or "loss"
        )
        study = replace(study, margin=study.margin or before.get("margin", ""))
        # Control runs that exist stay part of the study.
        study = replace(study, control=study.control or before.get("control", False))
        refuse_metric(study.config, study.metric)
        # Frees the data before the runs need the memory.
        del task
        devices = room.devices(study.config.device)
        jobs = study.jobs()
        most = study.parallel or min(
            len(jobs), len(devices) or max(1, room.cores() // (study.config.threads or 1))
        )
        facts = _facts(study, stored, config.steps, most)
        facts["identity"] = identity
        folder.write(facts, study.config)
        _train(study, facts, config.steps, most, devices, stop)
        if stop.requested:
            tell("Continue: the same command.")
            return StudyResult(stop.exit_code)
        return conclude(study, folder, facts)


def _refuse_recipes(study: Study) -> None:
    """Raises ConfigError for unknown recipes, two names of one recipe, and "auto"."""
    known: dict[str, str] = {}
    for name in study.recipes:
        if name == recipes.AUTO:
            raise ConfigError(
                "recipes: 'auto' chooses by a measurement, so the runs of a study could differ in recipe. Name recipes.",
                code="study.auto",
            )
        full = name if name == NO_RECIPE else recipes.get(name).name
        if full in known:
            raise ConfigError(
                f"recipes: {known[full]!r} and {name!r} are the same recipe. Name each once.",
                code="study.same-recipe",
            )
        known[full] = name


def _facts(study: Study, stored: dict[str, Any] | None, steps: int, most: int) -> dict[str, Any]:
    """Contents of study.json."""
    before = stored or {}
    config = study.config
    # Kept over restarts: another number of threads sums in another order and changes the last bits.
    threads = before.get("threads") or config.threads or max(1, room.cores() // most)
    margins = list(dict.fromkeys([*before.get("margins", []), str(study.chosen_margin)]))
    return before | {
        "recipes": list(study.recipes), "seeds": list(study.seeds), "metric": study.metric, "margin": str(study.chosen_margin),
        "control": study.control, "margins": margins, "looks": before.get("looks", []),
        "threads": threads, "steps": steps, "failed": before.get("failed", {}),
    }  # fmt: skip


def _train(
    study: Study,
    facts: dict[str, Any],
    steps: int,
    most: int,
    devices: list[str],
    stop: StopRequest,
) -> None:
    """Trains missing runs; adds failures to `facts`."""
    folder, jobs, threads = StudyFolder(study.output), study.jobs(), facts["threads"]
    with StudyProgress(jobs, steps, most) as progress:
        progress.over = {job.name: why for job in jobs if (why := ending(job)) is not None}
        missing = [job for job in jobs if job.name not in progress.over]
        words = (
            f"{len(progress.over)} of {len(jobs)} runs are done already; " if progress.over else ""
        )
        where = (
            f"{len(devices)} GPU{'s' * (len(devices) > 1)}"
            if devices
            else f"{threads} thread{'s' * (threads > 1)} each"
        )
        if missing:
            progress.say(
                f"{words}{len(missing)} to go, {min(most, len(missing))} at a time, {where}."
            )

        def ask(job: Job, device: str) -> Path:
            storage.make_folder(job.folder)
            path = job.folder / "asked.toml"
            storage.replace_file(path, toml.dump(study.settings_of(job, threads, device)))
            return path

        def ended(job: Job, why: str) -> None:
            progress.end(job, why)
            facts["failed"].pop(job.folder.name, None)
            if why and why != NOT_FINITE:
                facts["failed"][job.folder.name] = why
            folder.write(facts, study.config)
            left = len(jobs) - len(progress.over)
            progress.say(f"{job.name}: {why or 'finished'}{f'; {left} to go' if left else ''}")

        measured = None if devices or study.parallel else progress.peak_bytes
        Pool(
            most,
            devices,
            ask,
            measured,
            progress.show,
            ended,
            {"OMP_NUM_THREADS": str(threads)} if threads else {},
        ).run(missing, stop)
