"""The conditions of a measurement: where, with what, at which commit, by which command."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parent.parent

# What decides which of torch's CPU kernels run, in the spelling of /proc/cpuinfo.
ISA_FLAGS = (
    "avx2",
    "f16c",
    "fma",
    "avx_vnni",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
)
ISA_FLAGS += ("amx_int8", "amx_bf16", "amx_fp16", "asimddp", "i8mm", "bf16", "sve", "sve2")


def environment() -> dict[str, Any]:
    """Everything about this process that a reader of a figure has to know. GPU keys are None without one."""
    cuda = torch.cuda.is_available()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "command": shlex.join(["python", *sys.orig_argv[1:]]),
        "device": _device_name() if cuda else "cpu",
        "compute_capability": ".".join(map(str, torch.cuda.get_device_capability()))
        if cuda
        else None,
        "driver": _answer("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
        if cuda
        else None,
        "cuda": torch.version.cuda,
        **_cpu(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "triton", "narrowgauge")},
    }


def _device_name() -> str:
    """Over the empty CUDA runtime (tests/gpu_dry_run), where nothing is computed or timed, a name that is no card's."""
    name = torch.cuda.get_device_name()
    return (
        f"no device: empty CUDA runtime that plays {name}"
        if "EMPTY_CUDA_GPU" in os.environ
        else name
    )


def commit() -> str | None:
    """Short hash, with `-dirty` if a tracked file was changed since; None outside a git checkout."""
    return _answer(
        "git", "-C", str(ROOT), "describe", "--always", "--abbrev=12", "--dirty", "--exclude=*"
    )


def _cpu() -> dict[str, Any]:
    """Model, cores that this process may use, and the instruction sets that matter to matrix products."""
    facts: dict[str, str] = {}
    if Path("/proc/cpuinfo").exists():
        first = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]
        facts = {
            key.strip(): value.strip()
            for key, _, value in (line.partition(":") for line in first.splitlines())
        }
    flags = (facts.get("flags") or facts.get("Features") or "").split()
    return {
        "cpu": facts.get("model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0))
        if hasattr(os, "sched_getaffinity")
        else os.cpu_count(),
        "isa": [flag for flag in ISA_FLAGS if flag in flags],
        "torch_isa": torch.backends.cpu.get_cpu_capability(),
    }


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


@cache
def _answer(*command: str) -> str | None:
    """First line that a program prints; None if it is missing or fails. Asked once: nvidia-smi takes a second on some machines."""
    try:
        done = subprocess.run(command, capture_output=True, encoding="utf-8", timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.splitlines()
    return lines[0].strip() if done.returncode == 0 and lines else None
