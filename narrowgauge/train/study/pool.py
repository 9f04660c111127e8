"""The processes of a study: started as they fit, watched, asked to stop, and started again after a kill.

exit code 0                    done
5                              its numbers were not finite: a result, and no other run is lost
9                              out of memory: tried once more, alone, when all others have ended; then it counts as failed
a signal, 75, 130              somebody killed it: it goes on from its newest checkpoint, up to KILLS times
2, 3, 4, 7, 8, 10              settings, data or the disk: all would end so, so the study stops, and says why
any other                      failed; the others go on
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
from narrowgauge.storage import reading
from narrowgauge.train.signals import StopRequest
from narrowgauge.train.study import room
from narrowgauge.train.study.plan import Job

CONSOLE = "console.txt"  # what a run said
SAID = reading.Kind(most_bytes=4 * reading.GIB, step="Remove it, and start the study again.", error=StorageError)
TAIL_BYTES = 2**16
KILLS = 3
POLL_S = 0.2
STOP_S = 600.0  # for a step and a checkpoint of all runs, after a request to stop
OF_ALL = {
    each.exit_code: each for each in (ConfigError, DataError, CheckpointError, BusyError, StorageError, DriftError)
}


@dataclass
class Running:
    job: Job
    process: subprocess.Popen[bytes]
    device: str
    was_alone: bool  # no other run began beside it


@dataclass
class Pool:
    """Runs the jobs that `run` is given.

    most      at a time
    devices   GPUs, one for each of the runs at a time; [] for the CPU
    ask       writes the settings of a job for a device, and returns the file
    peak      the most memory that a run of this study was seen to take; None: not known yet. Asked of runs on the CPU alone
    show      is called with the jobs that run now, a few times a second
    ended     is called with a job and how it ended: '' or why it failed
    command   of a run, before its file of settings
    """

    most: int
    devices: list[str]
    ask: Callable[[Job, str], Path]
    peak: Callable[[], int | None] | None
    show: Callable[[list[Job]], None]
    ended: Callable[[Job, str], None]
    environment: dict[str, str] = field(default_factory=dict)
    command: Sequence[str] = (sys.executable, "-m", "narrowgauge.train.study.worker", "train")
    running: list[Running] = field(default_factory=list)
    poll_s: float = POLL_S
    kills: Counter[str] = field(default_factory=Counter)
    out_of_memory: list[Job] = field(default_factory=list)

    def run(self, jobs: list[Job], stop: StopRequest) -> None:
        """Until all have ended, or those that run have stopped after a request. Raises what ends the study."""
        waiting = list(jobs)
        try:
            while (waiting or self.running or self.out_of_memory) and not stop.requested:
                if not waiting and not self.running:
                    waiting, self.out_of_memory, self.most = self.out_of_memory, [], 1
                while waiting and self._has_room():
                    self._start(waiting.pop(0))
                self._reap(waiting)
                self.show([each.job for each in self.running])
                time.sleep(self.poll_s)
        finally:
            self.stop(signal.SIGTERM if stop.requested == "preempted" else signal.SIGINT)

    def _has_room(self) -> bool:
        if len(self.running) >= self.most:
            return False
        if self.peak is None or not self.running:
            return True
        peak = self.peak()
        resident = [room.resident_bytes(each.process.pid) for each in self.running]
        return peak is not None and room.fits(peak, resident, room.available_bytes())

    def _start(self, job: Job) -> None:
        taken = Counter(each.device for each in self.running)
        device = min(self.devices, key=lambda name: taken[name]) if self.devices else ""
        settings = self.ask(job, device)
        with reading.opened_to_append(job.folder / CONSOLE, SAID) as said:
            # A session of its own: Ctrl-C on the terminal is the study's to pass on.
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
        """What becomes of a run that ended with this code."""
        job = each.job
        if code < 0 or code in (EXIT_PREEMPTED, EXIT_INTERRUPTED):
            self.kills[job.name] += 1
            if self.kills[job.name] <= KILLS:
                if code == -signal.SIGKILL and not each.was_alone and self.peak is not None:
                    self.most = max(1, self.most - 1)  # the system may have run out of memory
                waiting.insert(0, job)
            else:
                self.ended(job, f"killed {self.kills[job.name]} times")
        elif code == OutOfMemoryError.exit_code and not each.was_alone:
            self.out_of_memory.append(job)
        elif code in OF_ALL:
            raise OF_ALL[code](f"{job.name}: {last_line(job)}")
        else:
            known = {0: "", NumericsError.exit_code: "not finite", OutOfMemoryError.exit_code: "out of memory"}
            self.ended(job, known.get(code, f"exit code {code}: {last_line(job)}"))

    def stop(self, number: signal.Signals) -> None:
        """Asks all runs to finish their step and save, and waits for them. A second Ctrl-C, or patience, ends them at once."""
        try:
            for each in self.running:
                with suppress(ProcessLookupError):
                    each.process.send_signal(number)
            until_s = time.monotonic() + STOP_S
            while any(each.process.poll() is None for each in self.running) and time.monotonic() < until_s:
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
    """What a run said last: why it failed."""
    lines: list[str] = []
    with suppress(StorageError), reading.opened(job.folder / CONSOLE, SAID) as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - TAIL_BYTES))
        lines = file.read(TAIL_BYTES).decode("utf-8", "replace").splitlines()
    said = next((line for line in reversed(lines) if line.strip()), "it said nothing")
    return said.removeprefix("narrowgauge: ")
