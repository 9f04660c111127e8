"""Number of runs that fit this machine at the same time: cores, GPUs and memory.

On the CPU each run gets an equal share of the cores. Its memory is measured, not guessed: the first
run starts alone, and its peak is known after its first logged step. On GPUs there is one run for
each device.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch

CGROUP = Path("/sys/fs/cgroup")
SPARE = 1.15  # factor on a run's peak so far, for its evaluations and checkpoints


def devices(name: str) -> list[str]:
    """GPUs for the setting `device`; [] for the CPU."""
    if name == "auto" or name == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return [f"cuda:{index}" for index in range(count)]
    return [name] if name.startswith("cuda") else []


def cores(root: Path = CGROUP) -> int:
    """Processors available to this process, by affinity and cgroup quota."""
    # os.cpu_count() ignores affinity, as set by taskset or a batch system.
    count = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    quota, _, period = _text(root / "cpu.max").partition(" ")
    if quota.isdecimal() and period.strip().isdecimal():
        count = min(count, max(1, int(quota) // int(period)))
    return count


def available_bytes(root: Path = CGROUP, meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Memory that processes can still allocate, by machine and cgroup; None if unknown."""
    found = (
        [int(match[1]) * 1024]
        if (match := re.search(r"MemAvailable:\s*(\d+) kB", _text(meminfo)))
        else []
    )
    limit, used = _text(root / "memory.max").strip(), _text(root / "memory.current").strip()
    if limit.isdecimal() and used.isdecimal():
        # The kernel frees inactive page cache when the limit is reached, so it counts as available.
        cached = re.search(r"^inactive_file (\d+)", _text(root / "memory.stat"), re.MULTILINE)
        found.append(int(limit) - int(used) + (int(cached[1]) if cached else 0))
    return min(found, default=None)


def resident_bytes(pid: int) -> int:
    """Resident memory of a process; 0 if unknown."""
    match = re.search(r"VmRSS:\s*(\d+) kB", _text(Path(f"/proc/{pid}/status")))
    return int(match[1]) * 1024 if match else 0


def fits(peak_bytes: int, resident: Sequence[int], available: int | None) -> bool:
    """True if one more run fits after the running ones have grown to a run's peak.

    peak_bytes  peak memory of a run
    resident    current memory of the running ones
    available   available memory; None: unknown, so nothing is refused
    """
    if available is None:
        return True
    to_come = sum(max(0, peak_bytes - each) for each in resident)
    return available - to_come >= SPARE * peak_bytes


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
