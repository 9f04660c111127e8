"""Facts about processes of this machine, read from /proc on Linux.

Other systems only know if a process exists.

state(pid)         "T" for a process that SIGSTOP or SIGTSTP stopped, "Z" for a zombie, "" for none
exit_words(pid)    "was killed by SIGKILL", for a zombie that waits to be reaped
launcher_of(pid)   the torchrun agent that started this rank
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

RUN_ID = "TORCHELASTIC_RUN_ID"  # torchrun sets it for its workers; the agent itself lacks it
REAPERS = ("init", "systemd", "tini", "dumb-init", "docker-init", "catatonit")


def state(pid: int) -> str:
    """The state letter of proc(5); "" without such a process, or without /proc."""
    fields = _stat(pid)
    return fields[0] if fields else ""


def exists(pid: int) -> bool:
    """True if the process runs. False for a zombie that waits to be reaped."""
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
    """Describes the end of a process, as a predicate.

    Returns "" if its parent has reaped it already.
    """
    fields = _stat(pid)
    if not fields or fields[0] not in ("Z", "X") or len(fields) < 50:
        return ""
    # Field 52 of proc(5), exit_code: `_stat` drops the first two fields.
    status = int(fields[49])
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        name = signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"
        return f"was killed by {name}"
    return f"ended with exit code {os.WEXITSTATUS(status)}" if os.WIFEXITED(status) else ""


def launcher_of(pid: int) -> tuple[int, str]:
    """Returns (pid of the agent that started the rank `pid`, reason why it is gone already or "").

    The agent is the first ancestor without TORCHELASTIC_RUN_ID in its environment, since a wrapper
    script may stand between agent and rank. A reaper process adopts a rank whose agent died before
    this look.
    """
    parent = _parent(pid)
    if not _has_proc():
        return parent, "it is gone" if parent == 1 else ""
    while parent > 1 and _inherits_run_id(parent):
        parent = _parent(parent)
    # Parent 0: the agent is in another PID namespace
    return parent, "it is gone" if _is_reaper(parent) else ""


def pidfd(pid: int) -> int | None:
    """A file descriptor that becomes readable when the process ends; None without pidfd."""
    if not hasattr(os, "pidfd_open"):
        return None
    try:
        # Not PR_SET_PDEATHSIG: its signal comes when the thread that started the rank ends, and it
        # names nothing.
        return os.pidfd_open(pid)
    except OSError:  # no such process, or a kernel before 5.3
        return None


def _has_proc() -> bool:
    return os.path.exists("/proc/self/stat")


def _stat(pid: int) -> list[str]:
    """Fields of /proc/PID/stat from the state on.

    The process name before may contain any character.
    """
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
