"""How many runs fit this machine at a time: cores, GPUs and memory.

On CPUs each run gets an equal share of the cores. What one needs of memory is not guessed: the first run starts alone, and when it has
logged a step its peak is known. On GPUs there is one run for each device.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import torch

CGROUP = Path("/sys/fs/cgroup")
SPARE = 1.15  # of a run's peak: what a checkpoint and an evaluation take beside what was seen so far


def devices(name: str) -> list[str]:
    """The GPUs that runs of this setting `device` may have; [] for the CPU."""
    if name == "auto" or name == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return [f"cuda:{index}" for index in range(count)]
    return [name] if name.startswith("cuda") else []


def cores(root: Path = CGROUP) -> int:
    """Processors that this process may use, by affinity and by its control group's quota."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, _, period = _text(root / "cpu.max").partition(" ")
    if quota.isdecimal() and period.strip().isdecimal():
        count = min(count, max(1, int(quota) // int(period)))
    return count


def available_bytes(root: Path = CGROUP, meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Memory that processes may still take, of the machine and of the control group; None where the system does not tell."""
    found = [int(match[1]) * 1024] if (match := re.search(r"MemAvailable:\s*(\d+) kB", _text(meminfo))) else []
    limit, used = _text(root / "memory.max").strip(), _text(root / "memory.current").strip()
    if limit.isdecimal() and used.isdecimal():
        cached = re.search(r"^inactive_file (\d+)", _text(root / "memory.stat"), re.MULTILINE)
        found.append(int(limit) - int(used) + (int(cached[1]) if cached else 0))
    return min(found, default=None)


def resident_bytes(pid: int) -> int:
    """What a process holds now; 0 where that is not known."""
    match = re.search(r"VmRSS:\s*(\d+) kB", _text(Path(f"/proc/{pid}/status")))
    return int(match[1]) * 1024 if match else 0


def fits(peak_bytes: int, resident: Sequence[int], available: int | None) -> bool:
    """Whether one run more fits, when those that run, of these sizes now, grow to a run's peak."""
    if available is None:
        return True
    to_come = sum(max(0, peak_bytes - each) for each in resident)
    return available - to_come >= SPARE * peak_bytes


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError):
        return ""
