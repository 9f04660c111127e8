"""Facts about processes of this machine, read from /proc on Linux. Elsewhere only whether a process exists.

state(pid)         "T" for a process that SIGSTOP or SIGTSTP stopped, "Z" for one that ended, ""
exit_words(pid)    "was killed by SIGKILL", while the process waits to be reaped
launcher_of(pid)   the agent of torchrun that started this rank
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

RUN_ID = "TORCHELASTIC_RUN_ID"  # torchrun sets it for its workers; the agent itself has none
REAPERS = ("init", "systemd", "tini", "dumb-init", "docker-init", "catatonit")


def state(pid: int) -> str:
    """The letter of proc(5); "" where there is no such process, or no /proc."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def exists(pid: int) -> bool:
    """False for a process that ended and waits to be reaped."""
    if _has_proc():
        return state(pid) not in ("", "Z", "X")
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def exit_words(pid: int) -> str:
    """How a process ended, as a predicate; "" where its parent has reaped it already."""
    fields = _stat(pid)
    if not fields or fields[0] not in ("Z", "X") or len(fields) < 50:
        return ""
    status = int(fields[49])
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        return f"was killed by {name}"
    return f"ended with exit code {os.WEXITSTATUS(status)}" if os.WIFEXITED(status) else ""


def launcher_of(pid: int) -> tuple[int, str]:
    """(pid, words): the agent that started the rank `pid`; words why it is gone already, or "".

    The first ancestor whose environment lacks TORCHELASTIC_RUN_ID: a wrapper script may stand between
    agent and rank. A rank whose agent died before it could look was adopted by a reaper.
    """
    parent = _parent(pid)
    if not _has_proc():
        return parent, "it is gone" if parent == 1 else ""
    while parent > 1 and _inherits_run_id(parent):
        parent = _parent(parent)
    return parent, "it is gone" if _is_reaper(parent) else ""  # 0: it is in another namespace


def pidfd(pid: int) -> int | None:
    """A descriptor that polls as readable once the process ends; None where the system has none."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        return os.pidfd_open(pid)
    except OSError:  # gone, or a kernel before 5.3
        return None


def _has_proc() -> bool:
    return os.path.exists("/proc/self/stat")


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on; the name before may contain anything."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text("utf-8", "replace").rpartition(")")[2].split()
    return []


def _parent(pid: int) -> int:
    fields = _stat(pid)
    if fields:
        return int(fields[1])
    return os.getppid() if pid == os.getpid() else 0


def _inherits_run_id(pid: int) -> bool:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        return any(each.startswith(f"{RUN_ID}=".encode()) for each in words)
    return False


def _is_reaper(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/comm").read_text("utf-8", "replace").strip() in REAPERS
    return False
