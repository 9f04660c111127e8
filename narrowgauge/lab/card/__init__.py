"""`narrowgauge card-report`: correctness and speed of a card's kernels, in one file to send back.

    process      one job in its process: limit, output, how it ended
    runner       runs jobs, one flushed line for each; names the culprit of a fault or a hang
    conditions   versions, driver, clocks, temperature
    checks       correctness of each kernel and form, at the self-check's size and at the full grid
    contenders   BF16, torchao, TransformerEngine and recipes
    timings      the card's rates, Linears, the optimizer
    steps        an 8B-shaped layer, and a step by its parts
    two_cards    an all-reduce beside a Linear
    archive      the file: written without what is private, read as a stranger's
    contents     types of what the page reads, of a stranger's archive
    page         the page of --read, with predictions beside the measurements

This file has the order of a report. Its own process asks CUDA for nothing: a card that hangs cannot
hang the report.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from narrowgauge.errors import ConfigError
from narrowgauge.lab.card import archive, checks, steps, timings, two_cards
from narrowgauge.lab.card.conditions import Sampler
from narrowgauge.lab.card.process import ABSENT, CULPRITS, PASS, CardJob
from narrowgauge.lab.card.runner import Line, Runner
from narrowgauge.ops.registry import Device

MINUTES = 30.0
CHECKS_SHARE = 0.45  # of the time, after which no check is begun: timings need the rest
MACHINE_S = 90.0
MOST_WORKERS = 4
MACHINE = CardJob(
    name="machine", part="machine", run="narrowgauge.lab.card.conditions:of_machine", limit_s=MACHINE_S, alone=True
)  # fmt: skip
PARTS = ("checks", "rates", "linear", "optimizer", "layer", "step", "communication")


@dataclass(frozen=True, kw_only=True)
class CardSettings:
    """Settings of a report.

    minutes   of the whole report
    most_s    largest limit of one process; None: each has its own
    workers   checks that run beside each other
    parts     which of PARTS are run
    device    where the jobs compute; another than "cuda:0" is for tests
    preload   modules that each process imports first, for tests
    machine   the job that asks for the card
    """

    minutes: float = MINUTES
    most_s: float | None = None
    workers: int = max(1, min(MOST_WORKERS, (os.cpu_count() or 2) // 2))
    parts: Sequence[str] = PARTS
    device: str = "cuda:0"
    preload: tuple[str, ...] = ()
    machine: CardJob = MACHINE


def report(
    output: Path | None,
    settings: CardSettings,
    tell: Callable[[str], None] = print,
    jobs: Callable[[Device, int, CardSettings], list[CardJob]] | None = None,
) -> tuple[Path, list[Line]]:
    """Make a report and return (archive, lines).

    output  file of the archive; None: narrowgauge-card-CARD.zip in the current folder. While the
            report runs, a folder of the same name holds what is known so far
    jobs    the jobs for a card, of their number; None: all of `settings.parts`

    Raises ConfigError where there is no CUDA device, or if an archive of this name exists.
    """
    started_at_s = time.monotonic()
    folder = Path(f"narrowgauge-card-{os.getpid()}") if output is None else output.with_suffix("")
    if folder.exists() or (output is not None and output.exists()):
        raise ConfigError(
            f"card-report: {output or folder} is there already. Remove it, or choose another --output.",
            code="card-report.exists",
        )
    folder.mkdir(parents=True)
    runner = Runner(
        folder=folder,
        ends_at_s=started_at_s + 60 * settings.minutes,
        workers=settings.workers,
        most_s=settings.most_s,
        preload=settings.preload,
        clean=archive.cleaner(),
        tell=tell,
    )
    facts = _facts(settings)
    # Without a card nothing is left behind; with one, every end writes the archive.
    try:
        archive.store(folder, facts)
        uuid = _machine(runner, settings, facts)
        archive.store(folder, facts)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    path = output or _free(f"narrowgauge-card-{_slug(facts['card']['name'])}")
    runner.conditions = Sampler(uuid)
    try:
        chosen = (jobs or all_jobs)(_device(facts), int(facts["card"]["cards"]), settings)
        _run(runner, chosen, settings, started_at_s)
        facts["ended"] = "finished"
    except KeyboardInterrupt:
        facts["ended"] = "stopped by Ctrl-C"
        raise
    finally:
        facts["seconds"] = time.monotonic() - started_at_s
        _pack(folder, path, facts, runner)
    return path, runner.lines


def write_page(path: Path, output: Path | None) -> Path:
    """Write the page of an archive, or of a report that was cut off, and return its path.

    output  None: beside the archive, as .html
    """
    # Imported here: the page needs jinja2, and a machine with a card may lack it.
    from narrowgauge.lab.card import page
    from narrowgauge.report import template

    output = output or path.with_suffix(".html")
    template.refuse_other_file(output)
    return page.write(archive.read(path), output)


def all_jobs(card: Device, cards: int, settings: CardSettings) -> list[CardJob]:
    """The jobs of a report in their order, of the parts that are asked for."""
    device = settings.device
    timed = timings.jobs(card, device)
    layers = steps.jobs(card, device)
    found = [
        *checks.jobs(card, device),
        *timed,
        *(job for job in layers if not job.arguments["compiled"]),
        *two_cards.jobs(card, cards),
        *(job for job in layers if job.arguments["compiled"]),
    ]
    return [job for job in found if job.part in settings.parts]


def culprits(lines: Sequence[Line]) -> list[Line]:
    """Lines of jobs that computed wrong numbers, faulted, hung or failed."""
    return [line for line in lines if line["status"] in CULPRITS]


def _run(runner: Runner, jobs: list[CardJob], settings: CardSettings, started_at_s: float) -> None:
    checked = [job for job in jobs if job.part == "checks"]
    # Checks of forms that few runs use come last, and are the ones that are left out.
    begins_by_s = started_at_s + 60 * settings.minutes * CHECKS_SHARE
    timed = [job for job in jobs if job.part != "checks"]
    runner.tell(f"{len(checked)} checks, {settings.workers} at a time, then {len(timed)} timings.")
    runner.run(checked, begins_by_s if timed else None)
    runner.run(timed)


def _machine(runner: Runner, settings: CardSettings, facts: dict[str, Any]) -> str:
    """Ask for the card, add it to the facts, and return its UUID, which is not recorded."""
    found = runner.ask(settings.machine)
    if found["status"] != PASS:
        reason = found.get("why", found["status"])
        words = "" if found["status"] == ABSENT else "the question which card is here failed: "
        raise ConfigError(
            f"card-report: {words}{reason}. It is about an NVIDIA GPU: run it where `nvidia-smi` lists one, with a CUDA build of torch. "
            "`narrowgauge info` says what this machine computes.",
            code="card-report.no-card",
        )
    facts |= {key: found[key] for key in ("card", "versions")}
    # From here on a fault or a hang is followed by a question to the card.
    device = settings.device
    runner.probe = CardJob(
        name="probe", part="machine", run="narrowgauge.lab.card.checks:probe", limit_s=checks.PROBE_S, arguments={"device": device}
    )  # fmt: skip
    return str(found.get("uuid", ""))


def _facts(settings: CardSettings) -> dict[str, Any]:
    return {
        "format": archive.FORMAT, "started_at": datetime.now(UTC).isoformat(timespec="seconds"), "ended": "not yet",
        "minutes": settings.minutes, "workers": settings.workers, "parts": list(settings.parts), "most_s": settings.most_s,
    }  # fmt: skip


def _device(facts: dict[str, Any]) -> Device:
    """The card without an index, so that no kernel is checked in this process."""
    major, minor = facts["card"]["capability"]
    cuda = str(facts["versions"].get("cuda") or "0.0").split(".")
    return Device("cuda", (int(major), int(minor)), cuda=(int(cuda[0]), int(cuda[1])))


def _pack(folder: Path, path: Path, facts: dict[str, Any], runner: Runner) -> None:
    size = archive.write(path, facts, runner.lines)
    shutil.rmtree(folder, ignore_errors=True)
    counts = Counter(line["status"] for line in runner.lines)
    words = ", ".join(f"{count} {status}" for status, count in counts.most_common())
    runner.tell(f"{words or 'Nothing was run'}; {facts['seconds'] / 60:.1f} minutes.")
    for line in culprits(runner.lines):
        runner.tell(f"{line['status']}: {line['job']}: {line.get('why', '')}")
    runner.tell(f"{path}: {size / 1e6:.2f} MB. Nothing was sent anywhere.")


def _free(name: str) -> Path:
    """A file of this name in the current folder that is not there yet."""
    names = (f"{name}.zip", *(f"{name}-{number}.zip" for number in range(2, 1000)))
    return next(path for each in names if not (path := Path(each).absolute()).exists())


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")
