"""Run each job in a process of its own and within its limit; every job gets one flushed line.

multiprocessing's fork server starts the processes. It has imported torch and narrowgauge, and has
never asked for a device: a process starts in a tenth of a second, with a CUDA context of its own.

    beside     jobs that are not `alone` run several at a time. One that fails is run once more by
               itself, and that result counts; its first one stands in the line. One that then
               passes is `unsteady`
    probe      after a fault or a hang, a small job asks whether the card still answers. If it does
               not, the jobs that are left are not begun, and their lines name the culprit
    deadline   a job is begun only if its whole limit fits into the time of the report
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from narrowgauge.diagnose.runs import decode, encode
from narrowgauge.lab.card import process
from narrowgauge.lab.card.process import (
    CULPRITS,
    FAILED,
    FAULT,
    HANG,
    LEFT_OUT,
    PASS,
    UNSTEADY,
    CardJob,
)

# Imported once, by the fork server.
PRELOAD = ("torch", "narrowgauge", "narrowgauge.lab.card.checks", "narrowgauge.lab.card.timings")
OUTPUT_BYTES = 4096  # of a job that did not pass, the last ones
ENDING_S = 10.0  # that a killed process gets to disappear
PROBES, PROBE_PAUSE_S = 3, 2.0

OWN = ("job", "part", "status", "driver")  # values that this package has written itself

Line = dict[str, Any]


@dataclass
class _Running:
    job: CardJob
    process: BaseProcess
    place: Path
    started_at_s: float
    limit_s: float
    beside: bool = False  # True if another job ran at the same time

    @property
    def ends_at_s(self) -> float:
        return self.started_at_s + self.limit_s


@dataclass(kw_only=True)
class Runner:
    """Runs jobs until the report's time is over.

    folder     of lines.jsonl, and of the processes' files while they run
    ends_at_s  time.monotonic() at which the last job has to be over
    workers    jobs that run at a time, if they are not `alone`
    probe      job that asks whether the card answers; None: not asked
    most_s     largest limit of a job; None: each has its own
    preload    modules that a process imports before its job
    conditions driver, clocks, temperature, asked at the end of each job
    clean      takes what is private out of a text
    tell       prints a line on the console
    """

    folder: Path
    ends_at_s: float
    workers: int = 1
    probe: CardJob | None = None
    most_s: float | None = None
    preload: tuple[str, ...] = ()
    conditions: Callable[[], Mapping[str, Any]] = dict
    clean: Callable[[str], str] = str
    tell: Callable[[str], None] = print
    lines: list[Line] = field(default_factory=list)
    _running: list[_Running] = field(default_factory=list)
    _first: dict[str, Line] = field(default_factory=dict)
    _begun: int = 0
    _lost: str = ""  # why the card does not answer

    def __post_init__(self) -> None:
        # Not fork: pytest or a notebook has threads. Not spawn: each process would import torch.
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([*PRELOAD, *self.preload])

    def run(self, jobs: Iterable[CardJob], begins_by_s: float | None = None) -> None:
        """Run the jobs; each adds a line to `lines` and to lines.jsonl.

        begins_by_s  latest time.monotonic() at which a job begins; None: the end of the report
        """
        waiting = deque(jobs)
        latest_s = self.ends_at_s if begins_by_s is None else min(begins_by_s, self.ends_at_s)
        try:
            while waiting or self._running:
                while waiting and self._has_place(waiting[0]):
                    self._begin(waiting.popleft(), latest_s)
                for ended in self._wait():
                    again = self._finish(ended)
                    waiting.extend(again)
        finally:
            self.end()

    def end(self) -> None:
        """End every process that still runs."""
        for each in self._running:
            _kill(each.process)
        self._running.clear()

    def ask(self, job: CardJob) -> Line:
        """Run a job by itself, and return how it ended; it gets no line."""
        asked = self._start(job, self.limit_of(job))
        asked.process.join(asked.limit_s)
        return self._outcome(asked)

    def limit_of(self, job: CardJob) -> float:
        return job.limit_s if self.most_s is None else min(job.limit_s, self.most_s)

    # --- one job ---

    def _has_place(self, job: CardJob) -> bool:
        if not self._running:
            return True
        return (
            not job.alone and not self._running[0].job.alone and len(self._running) < self.workers
        )

    def _begin(self, job: CardJob, latest_s: float) -> None:
        now_s, limit_s = time.monotonic(), self.limit_of(job)
        # Begun too late, it would be ended at the report's end, and be called a hang.
        # A card that answers no more would fault in every job that is left.
        why = self._lost
        if not why and (now_s > latest_s or now_s + limit_s > self.ends_at_s):
            why = f"no time was left for it: it may take {limit_s:.0f} s"
        if why:
            self._write(job, {"status": LEFT_OUT, "why": why})
            return
        for each in self._running:
            each.beside = True
        started = self._start(job, limit_s)
        started.beside = bool(self._running)
        self._running.append(started)

    def _start(self, job: CardJob, limit_s: float) -> _Running:
        self._begun += 1
        place = self.folder / f"job-{self._begun}"
        place.mkdir(parents=True)
        given = replace(job, limit_s=limit_s), str(place), self.preload
        started = self._context.Process(target=process.main, args=given, daemon=False)
        started.start()
        return _Running(job, started, place, time.monotonic(), limit_s)

    def _wait(self) -> list[_Running]:
        """Jobs that have ended, or whose limit is over: these are killed."""
        if not self._running:
            return []
        first_s = min(each.ends_at_s for each in self._running)
        connection.wait(
            # A process that is stuck in the driver may never end, so its limit bounds this wait.
            [each.process.sentinel for each in self._running],
            timeout=max(first_s - time.monotonic(), 0.0),
        )
        now_s = time.monotonic()
        ended = [
            each for each in self._running if not each.process.is_alive() or now_s >= each.ends_at_s
        ]
        self._running = [each for each in self._running if each not in ended]
        return ended

    def _finish(self, ended: _Running) -> list[CardJob]:
        """Write the line of an ended job, or return the job if it has to run once more, alone."""
        line = self._outcome(ended)
        job = ended.job
        # Beside other processes a kernel may be slow, or short of memory, through no fault of its own.
        if line["status"] in CULPRITS and ended.beside and job.name not in self._first:
            self._first[job.name] = line
            self._probe(job)
            return [replace(job, alone=True)]
        if (first := self._first.get(job.name)) is not None:
            kept = {key: first[key] for key in ("status", "why", "at") if key in first}
            line["beside_others"] = kept
            if line["status"] == PASS:
                line |= {"status": UNSTEADY, "why": f"beside other processes: {first.get('why')}"}
        self._write(job, line)
        if line["status"] in (FAULT, HANG):
            self._probe(job)
        return []

    def _outcome(self, ended: _Running) -> Line:
        timed_out = ended.process.is_alive()
        gone = _kill(ended.process) if timed_out else True
        _kill_session(ended.process)  # compilers that the job has left behind
        ended.process.join(ENDING_S)
        seconds = time.monotonic() - ended.started_at_s
        found = _progress(ended.place)
        stages = [each["at"] for each in found if "at" in each]
        at = stages[-1] if stages else "start"
        line: Line = {"seconds": seconds, "at": at}
        code = ended.process.exitcode
        # A process that wrote its result and then hung at its end has passed.
        if found and "status" in found[-1]:
            line |= found[-1]
        elif timed_out:
            left = "" if gone else ", and the process could not be ended"
            line |= {
                "status": HANG,
                "why": f"it was ended after {ended.limit_s:.0f} s, at '{at}'{left}",
            }
        elif code is not None and code < 0:
            line |= {"status": FAULT, "why": f"its process died of {_signal(-code)}, at '{at}'"}
        else:
            line |= {"status": FAILED, "why": f"its process ended with {code}, at '{at}'"}
        if line["status"] in CULPRITS:
            line["output"] = _tail(ended.place / "output.txt")
        # An output holds paths and names until it is cleaned, so it stays in no file.
        shutil.rmtree(ended.place, ignore_errors=True)
        return line

    def _probe(self, after: CardJob) -> None:
        """Ask the card for a sign of life; if there is none, nothing more is begun."""
        if self.probe is None or self._lost:
            return
        for trial in range(PROBES):
            if trial:
                time.sleep(PROBE_PAUSE_S)
            if self.ask(self.probe)["status"] == PASS:
                return
        self._lost = f"the card answers no more, after '{after.name}'"

    def _write(self, job: CardJob, line: Line) -> None:
        whole = {
            "job": job.name, "part": job.part, "arguments": dict(job.arguments), **line,
            "limit_s": self.limit_of(job), **self.conditions(),
        }  # fmt: skip
        cleaned = {
            key: value if key in OWN else _cleaned(value, self.clean)
            for key, value in whole.items()
        }
        text = encode(cleaned)
        self.lines.append(decode(text))
        with (self.folder / "lines.jsonl").open("a", encoding="utf-8") as file:
            file.write(text + "\n")
            file.flush()
            os.fsync(file.fileno())
        why = f": {self.lines[-1]['why']}" if line.get("why") else ""
        self.tell(f"{line['status']:9} {job.name}  {line.get('seconds', 0.0):.1f} s{why}")


def _cleaned(value: Any, clean: Callable[[str], str]) -> Any:
    """The value with every text cleaned."""
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, Mapping):
        return {key: _cleaned(each, clean) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_cleaned(each, clean) for each in value]
    return value


def _progress(place: Path) -> list[Line]:
    """Whole lines that the process has written; a cut one is left out."""
    found = []
    # The last line may have been cut when the process died.
    with contextlib.suppress(OSError, ValueError):
        for text in (place / "progress.jsonl").read_text(encoding="utf-8").splitlines():
            found.append(decode(text))
    return found


def _tail(path: Path) -> str:
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(path.stat().st_size - OUTPUT_BYTES, 0))
        return file.read(OUTPUT_BYTES).decode("utf-8", "replace")
    return ""


def _kill(started: BaseProcess) -> bool:
    """Kill a process and its session, compilers included; True if it is gone."""
    _kill_session(started)
    with contextlib.suppress(ProcessLookupError):
        started.kill()
    started.join(ENDING_S)
    return not started.is_alive()


def _kill_session(started: BaseProcess) -> None:
    # Its session has the number of the process: killpg(0) would end this one.
    if started.pid:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(started.pid, signal.SIGKILL)


def _signal(number: int) -> str:
    with contextlib.suppress(ValueError):
        return signal.Signals(number).name
    return f"signal {number}"
