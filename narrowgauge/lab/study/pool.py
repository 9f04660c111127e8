"""Process pool of a study: starts, stops and restarts runs.

exit code 0                    finished
5                              non-finite numbers: a result of the study; other runs continue
9                              out of memory: retried once, alone, after all others have ended; then
                               failed
signal, 75, 130                killed from outside: resumed from its newest checkpoint, up to KILLS
                               times
2, 3, 4, 7, 8, 10              settings, data or disk: every run would fail alike, so the study
                               stops
any other                      failed; other runs continue
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from narrowgauge.errors import (
    EXIT_INTERRUPTED,
    EXIT_PREEMPTED,
    BusyError,
    CheckpointError,
    ConfigError,
    DataError,
    DriftError,
    NumericsError,
    OutOfMemoryError,
    StorageError,
)
from narrowgauge.lab.study import room
from narrowgauge.storage import reading

if TYPE_CHECKING:
    from narrowgauge.lab.study.plan import Job
    from narrowgauge.train.signals import StopRequest

CONSOLE = "console.txt"  # standard output and error of a run
SAID = reading.Kind(
    most_bytes=4 * reading.GIB, step="Remove it, and start the study again.", error=StorageError
)
TAIL_BYTES = 2**16
KILLS = 3
POLL_S = 0.2
STOP_S = 600.0  # time for all runs to finish a step and save, after a request to stop
# Exit code -> error class, for failures that every run would repeat.
OF_ALL = {
    each.exit_code: each
    for each in (ConfigError, DataError, CheckpointError, BusyError, StorageError, DriftError)
}


@dataclass
class Running:
    """A started run.

    device     GPU of the run; '' for the CPU
    was_alone  True if no other run overlapped it
    """

    job: Job
    process: subprocess.Popen[bytes]
    device: str
    was_alone: bool


@dataclass
class Pool:
    """Runs the jobs passed to `run`.

    most         concurrent runs at most
    devices      GPUs, one for each concurrent run; [] for the CPU
    ask          writes a job's settings for a device, and returns the file
    peak         returns the largest memory of a run of this study so far, None if unknown; used for
                 runs on the CPU only
    show         called with the running jobs, a few times a second
    ended        called with a job and '' or its reason of failure
    environment  additional environment variables of a run
    command      command line of a run, before its settings file
    """

    most: int
    devices: list[str]
    ask: Callable[[Job, str], Path]
    peak: Callable[[], int | None] | None
    show: Callable[[list[Job]], None]
    ended: Callable[[Job, str], None]
    environment: dict[str, str] = field(default_factory=dict)
    command: Sequence[str] = (sys.executable, "-m", "narrowgauge.lab.study.worker", "train")
    running: list[Running] = field(default_factory=list)
    poll_s: float = POLL_S
    kills: Counter[str] = field(default_factory=Counter)
    out_of_memory: list[Job] = field(default_factory=list)

    def run(self, jobs: list[Job], stop: StopRequest) -> None:
        """Runs until all jobs have ended, or have stopped after a request.

        Raises errors that end the study.
        """
        waiting = list(jobs)
        try:
            while (waiting or self.running or self.out_of_memory) and not stop.requested:
                if not waiting and not self.running:
                    # Only out-of-memory runs are left: retry them one at a time.
                    waiting, self.out_of_memory, self.most = self.out_of_memory, [], 1
                while waiting and self._has_room():
                    self._start(waiting.pop(0))
                self._reap(waiting)
                self.show([each.job for each in self.running])
                time.sleep(self.poll_s)
        finally:
            # In a finally: an exception must not leave processes behind.
            self.stop(signal.SIGTERM if stop.requested == "preempted" else signal.SIGINT)

    def _has_room(self) -> bool:
        if len(self.running) >= self.most:
            return False
        if self.peak is None or not self.running:
            return True
        peak = self.peak()
        resident = [room.resident_bytes(each.process.pid) for each in self.running]
        # Until the first run has logged its peak, no second one starts.
        return peak is not None and room.fits(peak, resident, room.available_bytes())

    def _start(self, job: Job) -> None:
        taken = Counter(each.device for each in self.running)
        # The least used GPU.
        device = min(self.devices, key=lambda name: taken[name]) if self.devices else ""
        settings = self.ask(job, device)
        with reading.opened_to_append(job.folder / CONSOLE, SAID) as said:
            # New session: the terminal sends Ctrl-C to the study alone, which then stops its runs.
            # stdin: the worker ends when this pipe closes, even if the study is killed.
            process = subprocess.Popen(
                [*self.command, str(settings)], stdin=subprocess.PIPE, stdout=said, stderr=said, start_new_session=True,
                env={**os.environ, **self.environment},
            )  # fmt: skip
        for other in self.running:
            other.was_alone = False
        self.running.append(Running(job, process, device, was_alone=not self.running))

    def _reap(self, waiting: list[Job]) -> None:
        for each in list(self.running):
            code = each.process.poll()
            if code is not None:
                self.running.remove(each)
                self._close(each)
                self._judge(each, code, waiting)

    def _judge(self, each: Running, code: int, waiting: list[Job]) -> None:
        """Decides what follows from a run's exit code: resume, retry, fail, or end the study."""
        job = each.job
        if code < 0 or code in (EXIT_PREEMPTED, EXIT_INTERRUPTED):
            self.kills[job.name] += 1
            if self.kills[job.name] <= KILLS:
                if code == -signal.SIGKILL and not each.was_alone and self.peak is not None:
                    # SIGKILL beside other runs is probably the kernel's out-of-memory killer.
                    self.most = max(1, self.most - 1)
                waiting.insert(0, job)
            else:
                self.ended(job, f"killed {self.kills[job.name]} times")
        elif code == OutOfMemoryError.exit_code and not each.was_alone:
            self.out_of_memory.append(job)
        elif code in OF_ALL:
            raise OF_ALL[code](f"{job.name}: {last_line(job)}")
        else:
            known = {
                0: "",
                NumericsError.exit_code: "not finite",
                OutOfMemoryError.exit_code: "out of memory",
            }
            self.ended(job, known.get(code, f"exit code {code}: {last_line(job)}"))

    def stop(self, number: signal.Signals) -> None:
        """Asks all runs to finish their step and save, and waits up to STOP_S.

        A second Ctrl-C, or the timeout, kills them.
        """
        try:
            for each in self.running:
                # The process may have ended since the last poll.
                with suppress(ProcessLookupError):
                    each.process.send_signal(number)
            until_s = time.monotonic() + STOP_S
            while (
                any(each.process.poll() is None for each in self.running)
                and time.monotonic() < until_s
            ):
                self.show([each.job for each in self.running if each.process.poll() is None])
                time.sleep(self.poll_s)
        finally:
            for each in self.running:
                each.process.kill()
                each.process.wait()
                self._close(each)
            self.running.clear()

    def _close(self, each: Running) -> None:
        if each.process.stdin is not None:
            each.process.stdin.close()


def last_line(job: Job) -> str:
    """Last line of a run's console output, usually the reason of a failure."""
    lines: list[str] = []
    with suppress(StorageError), reading.opened(job.folder / CONSOLE, SAID) as file:
        # A run's output can be large; its end suffices.
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
        lines = file.read(TAIL_BYTES).decode("utf-8", "replace").splitlines()
    said = next((line for line in reversed(lines) if line.strip()), "it said nothing")
    return said.removeprefix("narrowgauge: ")
