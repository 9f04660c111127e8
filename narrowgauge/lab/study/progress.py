"""Progress of a study: steps over all runs, the active runs, and the remaining time.

It is read from the tails of the runs' logs, so it is also correct after a resumption. The remaining
time is the remaining steps at each recipe's average pace, divided by the number of concurrent runs.
Runs that have not started also count the average overhead of earlier runs: imports, data and
report.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from narrowgauge.diagnose.forms import refuse
from narrowgauge.diagnose.runs import EVENTS, METRICS, decode
from narrowgauge.errors import ConfigError
from narrowgauge.storage import reading
from narrowgauge.train.console import clock, tell

if TYPE_CHECKING:
    from narrowgauge.lab.study.plan import Job

TAIL_BYTES = 2**16
EVERY_S = 30.0  # between lines, without a terminal
BAR_EVERY_S = 0.5


@dataclass(frozen=True)
class Reached:
    """Last step in a run's log, its training time and its peak memory."""

    step: int = 0
    elapsed_s: float = 0.0
    peak_bytes: int = 0


def reached(job: Job) -> Reached:
    """Last logged step of a run; step 0 if there is none."""
    try:
        with reading.opened(job.folder / "metrics.jsonl", METRICS) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
            # [:-1]: the last piece is empty, or a line that is still being written.
            lines = file.read(TAIL_BYTES).split(b"\n")[:-1]
    except ConfigError:  # reported when the finished run is read
        return Reached()
    for line in reversed(lines):
        try:
            event = decode(line)
        except (ValueError, TypeError):  # the tail begins inside of a line
            continue
        if event.get("event") not in ("resume", "step") or refuse(event, EVENTS[event["event"]]):
            continue
        if event["event"] == "resume":
            return Reached(step=event["step"])
        if event["event"] == "step":
            return Reached(event["step"], event.get("elapsed_s", 0.0), event.get("peak_bytes", 0))
    return Reached()


class StudyProgress:
    """Shows progress: a bar on a terminal, else a line every EVERY_S seconds.

    jobs   all runs of the study
    steps  steps of each run
    most   concurrent runs
    over   {run name: '' or reason of failure} for runs that have ended
    """

    def __init__(self, jobs: Sequence[Job], steps: int, most: int) -> None:
        self.jobs, self.steps, self.most = jobs, steps, most
        self.over: dict[str, str] = {}
        self._said_at_s = time.monotonic()
        # Run name -> (clock, seconds of training logged before) when the run was first seen active.
        self._began_at_s: dict[str, tuple[float, float]] = {}
        self._ended: dict[str, Reached] = {}  # final state of ended runs; their logs do not change
        self._beside_s: list[float] = []  # seconds that ended runs spent outside of training steps
        self._bar: Any = _bar(steps * len(jobs)) if sys.stderr.isatty() else None

    def __enter__(self) -> Self:
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar:
            self._bar.stop()

    def say(self, text: str) -> None:
        """Prints a line above the bar, or on standard error."""
        if self._bar:
            self._bar.console.print(text, soft_wrap=True)
        else:
            tell(text)

    def peak_bytes(self) -> int | None:
        """Largest peak memory of all runs so far; None if none has been logged."""
        return max((self._reached(job).peak_bytes for job in self.jobs), default=0) or None

    def end(self, job: Job, why: str) -> None:
        """Records that a run has ended. why: '' or the reason of its failure."""
        self.over[job.name] = why
        began_at_s, trained_s = self._began_at_s.pop(job.name, (time.monotonic(), 0.0))
        spent_s = time.monotonic() - began_at_s
        self._beside_s.append(max(0.0, spent_s - max(0.0, reached(job).elapsed_s - trained_s)))

    def show(self, running: Sequence[Job]) -> None:
        """Updates the display; called often, draws rarely."""
        now_s = time.monotonic()
        for job in running:
            if job.name not in self._began_at_s:
                self._began_at_s[job.name] = (now_s, reached(job).elapsed_s)
        if now_s - self._said_at_s < (BAR_EVERY_S if self._bar else EVERY_S):
            return
        self._said_at_s = now_s
        found = {job.name: self._reached(job) for job in self.jobs}
        done = sum(
            self.steps if job.name in self.over else min(found[job.name].step, self.steps)
            for job in self.jobs
        )
        left = clock(self.left_s(found)) if any(each.elapsed_s for each in found.values()) else "?"
        words = "; ".join(f"{job.name}: step {found[job.name].step}" for job in running) or "-"
        count = f"{len(self.over)} of {len(self.jobs)} runs"
        if self._bar:
            self._bar.update(
                self._bar.task_ids[0], completed=done, description=words, count=count, left=left
            )
        else:
            tell(f"{count} | {words} | {left} left")

    def _reached(self, job: Job) -> Reached:
        if job.name not in self._ended:
            found = reached(job)
            if job.name not in self.over:
                return found
            self._ended[job.name] = found
        return self._ended[job.name]

    def left_s(self, found: Mapping[str, Reached]) -> float:
        """Estimated remaining seconds. found: {run name: state}."""
        paces: dict[str, list[float]] = {}
        for job in self.jobs:
            each = found[job.name]
            if each.step and each.elapsed_s:
                paces.setdefault(job.recipe, []).append(each.elapsed_s / each.step)
        every = [pace for listed in paces.values() for pace in listed]
        total, longest = 0.0, 0.0
        for job in self.jobs:
            if job.name not in self.over:
                pace = statistics.fmean(paces.get(job.recipe) or every or [0.0])
                own = pace * max(0, self.steps - found[job.name].step)
                own += (
                    statistics.fmean(self._beside_s or [0.0])
                    if job.name not in self._began_at_s
                    else 0.0
                )
                total, longest = total + own, max(longest, own)
        # At the end the longest run determines the time, however many run at once.
        return max(total / self.most, longest)


def _bar(total_steps: int) -> Any:
    from rich import console, progress

    columns: list[Any] = [
        progress.TextColumn("{task.fields[count]}"),
        progress.BarColumn(),
        progress.TextColumn("{task.fields[left]} left  {task.description}"),
    ]
    target = console.Console(stderr=True, highlight=False, markup=False, emoji=False)
    bar = progress.Progress(*columns, console=target, redirect_stdout=False, redirect_stderr=False)
    bar.add_task("", total=total_steps, completed=0, count="", left="?")
    return bar
