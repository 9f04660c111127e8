"""Runs a command whose output goes to a file, and ends it where it stands still: for .ci/run, on Linux.

    python3 scripts/watched.py --log FILE [--silent-s 600] [--limit-s 5400] -- COMMAND...

The output is shown too, by a thread of its own: a reader of standard output that stops reading stops that
thread, and neither the command nor the watch. Where the file has not grown for silent_s, a process has been
stopped (SIGSTOP) for silent_s, or limit_s has passed, the watch appends to it, of every process of the command:

    its state, the function of the kernel in which it waits, its command line
    the stack of every thread, of Python processes

and then kills them all. The exit code is the command's; 124 where the watch ended it; 128 + N after signal N.

Stacks come from Python's faulthandler, which PYTHONFAULTHANDLER=1 turns on in every Python process of the
command. All are stopped first, and get SIGABRT and SIGCONT one after the other. The handler runs before any
other code, also where SIGSTOP had stopped the process or a C library holds the GIL, and needs no rights of
root. It writes to the standard error of the process. Where that is a file or a pipe that a test reads, the
watch reads it in its place.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

EXIT_ENDED = 124  # as of timeout(1)
TOKEN = "NARROWGAUGE_WATCHED"  # in the environment of every process of the command
POLL_S = 0.2
LOOK_S = 1.0  # between looks at the states of all processes, 10 ms each
DUMP_S = 5.0  # for a process to write its stacks
SHOWN_S = 30.0  # for the reader of standard output, after the command has ended
STACK_BYTES = 1 << 16


@dataclass
class Process:
    pid: int
    parent: int
    state: str  # of proc(5): R runs, S sleeps, D waits for a device, T is stopped
    command: str
    waits_in: str  # a function of the kernel

    @classmethod
    def of(cls, pid: int) -> Process | None:
        try:
            fields = _proc(pid, "stat").rpartition(")")[2].split()
            command = (
                " ".join(_proc(pid, "cmdline").split("\0")).strip() or _proc(pid, "comm").strip()
            )
            waits_in = ""
            with contextlib.suppress(OSError):
                waits_in = _proc(pid, "wchan")
            return cls(
                pid,
                int(fields[1]),
                fields[0],
                command,
                waits_in if waits_in not in ("", "0") else "-",
            )
        except (OSError, IndexError):  # it has ended
            return None

    def __str__(self) -> str:
        text = self.command if len(self.command) <= 300 else self.command[:300] + " ..."
        return f"pid {self.pid}, parent {self.parent}, state {self.state}, waits in {self.waits_in}: {text}"

    @property
    def is_python(self) -> bool:
        with contextlib.suppress(OSError):
            return "python" in os.path.basename(os.readlink(f"/proc/{self.pid}/exe"))
        return False


class Watch:
    def __init__(self, command: list[str], log: Path, silent_s: float, limit_s: float) -> None:
        self.command, self.log, self.silent_s, self.limit_s = command, log, silent_s, limit_s
        self.token = f"{TOKEN}={uuid.uuid4().hex}"
        self.ended = threading.Event()  # nothing is written any more

    def run(self) -> int:
        resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
        self.log.parent.mkdir(parents=True, exist_ok=True)
        self.log.write_bytes(b"")
        environment = {**os.environ, "PYTHONFAULTHANDLER": "1"}
        environment[TOKEN] = self.token.partition("=")[2]
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._stop)
        with self.log.open("ab") as file:
            self.child = subprocess.Popen(
                self.command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        shows = threading.Thread(target=self._show, daemon=True)
        shows.start()
        code = self._wait()
        self.ended.set()
        shows.join(SHOWN_S)
        return code

    def _wait(self) -> int:
        """Until the command has ended; ends it where it stands still."""
        began_s = grew_s = looked_s = time.monotonic()
        size, stopped = 0, dict[int, float]()  # pid -> since when
        while self.child.poll() is None:
            time.sleep(POLL_S)
            now_s = time.monotonic()
            if (now := self.log.stat().st_size) != size:
                size, grew_s = now, now_s
            if now_s - grew_s > self.silent_s:
                self._end(f"nothing was printed for {self.silent_s:g} s")
                return EXIT_ENDED
            if now_s - looked_s > LOOK_S:
                looked_s = now_s
                stopped = {
                    each.pid: stopped.get(each.pid, now_s)
                    for each in self._processes()
                    if each.state == "T"
                }
                for pid, since_s in stopped.items():
                    if now_s - since_s > self.silent_s:
                        self._end(f"pid {pid} was stopped for {self.silent_s:g} s")
                        return EXIT_ENDED
            if now_s - began_s > self.limit_s:
                self._end(f"the limit of {self.limit_s:g} s has passed")
                return EXIT_ENDED
        code = self.child.returncode
        return code if code >= 0 else 128 - code

    def _show(self) -> None:
        with self.log.open("rb") as file:
            while True:
                is_last = self.ended.is_set()
                while part := file.read(1 << 16):
                    try:
                        _write_all(1, part)
                    except OSError:  # nobody reads: the file has it all
                        return
                if is_last:
                    return
                time.sleep(POLL_S)

    # --- the end

    def _stop(self, number: int, _: object) -> None:
        _kill(self._processes())
        os._exit(128 + number)

    def _end(self, why: str) -> None:
        with self.log.open("ab", buffering=0) as file:

            def tell(text: str) -> None:
                file.write(text.encode("utf-8", "replace") + b"\n")

            tell(f"\nci: {why}. Every process of {' '.join(self.command)}:")
            found = self._processes()
            for each in found:
                tell(f"  {each}")
            self._halt()
            for each in reversed(found):  # those that others wait for first
                if each.is_python and each.pid != os.getpid():
                    tell(f"\nci: stacks of pid {each.pid}, {each.command[:100]}")
                    tell(_stacks(each.pid, self.log))
            _kill(self._processes())
            tell(
                f"\nci: failed: {why}. All of the above were ended; the whole output is in {self.log}"
            )
        self.child.wait()

    def _processes(self) -> list[Process]:
        """Those of the command, parents before children; also those that left its session or lost their parent."""
        everyone = [
            each for path in Path("/proc").glob("[0-9]*") if (each := Process.of(int(path.name)))
        ]
        members = {self.child.pid}
        while True:
            more = {
                each.pid for each in everyone if each.parent in members or self._has_token(each.pid)
            } - members
            if not more:
                break
            members |= more
        members -= {os.getpid()}
        return sorted(
            (each for each in everyone if each.pid in members and each.state != "Z"),
            key=lambda each: each.pid,
        )

    def _has_token(self, pid: int) -> bool:
        with contextlib.suppress(OSError):
            return self.token.encode() in Path(f"/proc/{pid}/environ").read_bytes()
        return False

    def _halt(self) -> None:
        """Stops all, so that none answers to the end of another; twice, for processes that were just being started."""
        for _ in range(2):
            for each in self._processes():
                _send(each.pid, signal.SIGSTOP)
            time.sleep(POLL_S)


def _stacks(pid: int, log: Path) -> str:
    """Of every thread of a Python process, which ends by it; "" where they went to the log directly."""
    before = log.stat().st_size
    try:
        stream = os.open(f"/proc/{pid}/fd/2", os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        stream, why = -1, f"its standard error cannot be read: {error}"
    else:
        why = ""
        with contextlib.suppress(OSError):  # a pipe has no end to seek
            os.lseek(stream, 0, os.SEEK_END)
    _send(pid, signal.SIGABRT)
    _send(pid, signal.SIGCONT)
    found, until_s = b"", time.monotonic() + DUMP_S
    while time.monotonic() < until_s and len(found) < STACK_BYTES:
        is_last = (one := Process.of(pid)) is None or one.state == "Z"
        if stream >= 0:
            with contextlib.suppress(BlockingIOError):
                while part := os.read(stream, 1 << 16):
                    found += part
        if is_last:
            break
        time.sleep(0.05)
    if stream >= 0:
        os.close(stream)
    if log.stat().st_size > before:
        return ""
    return found.decode("utf-8", "replace") or f"ci: none within {DUMP_S:g} s. {why}"


def _kill(members: list[Process]) -> None:
    for each in members:
        _send(each.pid, signal.SIGKILL)


def _send(pid: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, number)


def _proc(pid: int, name: str) -> str:
    return Path(f"/proc/{pid}/{name}").read_text("utf-8", "replace")


def _write_all(descriptor: int, data: bytes) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--log", type=Path, required=True)
    parser.add_argument("--silent-s", type=float, default=600.0)
    parser.add_argument("--limit-s", type=float, default=5400.0)
    parser.add_argument("command", nargs="+")
    given = parser.parse_args()
    return Watch(given.command, given.log.resolve(), given.silent_s, given.limit_s).run()


if __name__ == "__main__":
    code = main()
    sys.stderr.flush()
    os._exit(code)  # the thread that shows may stand in a pipe that nobody reads
