"""The process of one job: within its limit, with its output in a file, and with a last line that says how it ended.

    main(job, place)    runs "module:function" with the job's arguments, in a session of its own
    PLACE/progress.jsonl    {"at": ...} before each stage, then {"status": ..., ...}: flushed lines, so
                            a process that is killed has said where it was
    PLACE/output.txt        its standard output and error, with the stacks of all threads shortly
                            before the limit

A function gets `tell(at)` first, and returns a dictionary of JSON values, with a `status` unless it
passed. `judged` turns an exception into a status. A CUDA error stays in its process for ever, so each job has one of its own.

The process has an alarm a little after its limit, by which the kernel ends it even if the report
that started it is gone and Python hangs in a call.
"""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from narrowgauge.diagnose.runs import encode

# How a job ended.
PASS = "pass"
WRONG = "wrong"  # bits or sums that differ from the definition's
FAULT = "fault"  # an error of the device that stays, or a process that died of a signal
HANG = "hang"  # it was ended at its limit
REFUSED = "refused"  # the kernel, the library or the driver says no, and the device still answers
FAILED = "failed"  # an exception of another kind
ABSENT = "absent"  # it needs a package or a second card that is not here
LEFT_OUT = "left out"  # it was not begun
UNSTEADY = "unsteady"  # it failed beside other processes, and passed alone
STATUSES = (PASS, WRONG, FAULT, HANG, REFUSED, FAILED, UNSTEADY, ABSENT, LEFT_OUT)
CULPRITS = (WRONG, FAULT, HANG, FAILED, UNSTEADY)  # what the page begins with, and exit code 5

ALARM_S = 15.0  # after the limit
STACKS_BEFORE = 0.9  # of the limit

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class CardJob:
    """One process of the report.

    name       unique: what is run, as a reader should see it
    part       section of the page
    run        "module:function"
    arguments  of the function, JSON values
    limit_s    seconds after which it is ended
    alone      True if nothing may run beside it, as for whatever is timed
    """

    name: str
    part: str
    run: str
    limit_s: float
    arguments: Mapping[str, Any] = field(default_factory=dict)
    alone: bool = False


class NotHere(Exception):
    """A job needs something that this machine does not have; the text names it."""


def main(job: CardJob, place: str, preload: Sequence[str] = ()) -> None:
    """Run the job and leave the process, without what Python does at its end.

    A device that does not answer would keep the process in the destructors of CUDA.
    """
    # A session of its own, so that compilers and second ranks can be ended with it.
    os.setsid()
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    # SIGALRM's default action needs no Python: it ends a process that hangs in C, too.
    signal.setitimer(signal.ITIMER_REAL, job.limit_s + ALARM_S)
    folder = Path(place)
    output = os.open(folder / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for stream in (1, 2):
        os.dup2(output, stream)
    # SIGSEGV in a kernel's launcher, and a hang, leave the stacks of all threads.
    faulthandler.enable(file=output)
    faulthandler.dump_traceback_later(job.limit_s * STACKS_BEFORE, file=output)
    with (folder / "progress.jsonl").open("a", encoding="utf-8") as file:
        line = _run(job, file, preload)
        _write(file, line)
    # os._exit flushes nothing.
    for text in (sys.stdout, sys.stderr):
        text.flush()
    # Python's own end would wait for the device, and flush what was flushed.
    os._exit(0)


def _run(job: CardJob, file: IO[str], preload: Sequence[str]) -> dict[str, Any]:
    def tell(at: str) -> None:
        _write(file, {"at": at})

    module, _, name = job.run.partition(":")
    tell("imports")
    started_at_s = time.perf_counter()
    try:
        for each in (*preload, module):
            importlib.import_module(each)
        found = getattr(sys.modules[module], name)(tell, **job.arguments)
        # The function's own status, such as a wrong result, goes before.
        line = {"status": PASS, **found}
    except Exception as error:
        import traceback

        traceback.print_exc()
        line = judged(error)
    return line | {"seconds": time.perf_counter() - started_at_s}


def _write(file: IO[str], line: Mapping[str, Any]) -> None:
    file.write(encode(line) + "\n")
    file.flush()
    os.fsync(file.fileno())


def judged(error: BaseException) -> dict[str, Any]:
    """Status and reason of an exception.

    A device error is a fault if the device answers no more in this process. Otherwise the launch
    or the library's call was refused, and nothing ran.
    """
    words = f"{type(error).__name__}: {first_line(error)}"
    if isinstance(error, NotHere):
        return {"status": ABSENT, "why": str(error)}
    if (lost := device_error()) is not None:
        return {"status": FAULT, "why": words if lost in words else f"{words}; then {lost}"}
    # torch names its errors AcceleratorError from 2.8 on; Triton, cuBLAS and NCCL raise RuntimeError.
    is_device = type(error).__name__ == "AcceleratorError" or any(
        word in words for word in ("CUDA", "CUBLAS", "cuBLAS", "Triton Error", "NCCL")
    )
    return {"status": REFUSED if is_device else FAILED, "why": words}


def device_error() -> str | None:
    """First line of the error that the device gives to whatever this process asks, or None."""
    # Without a context there is nothing to ask, and asking would make one.
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return None
    try:
        torch.cuda.synchronize()
    except Exception as error:
        return first_line(error)
    return None


def first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0].strip() if lines else "no message"
