"""Facts beside each measurement: versions, the card, and its driver, clocks, temperature and power.

`of_machine` is a job: it asks CUDA, so it has a process of its own. `Sampler` asks nvidia-smi, for
which a limit of seconds holds as well. Names of users and hosts, serial numbers and the card's UUID
are not recorded; the UUID tells nvidia-smi which card is meant, and stays in the process.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

from narrowgauge.lab.card.process import NotHere, Tell

PACKAGES = ("narrowgauge", "triton", "torchao", "transformer-engine", "bitsandbytes", "numpy")
ASKED = {
    "driver": "driver_version",
    "sm_mhz": "clocks.sm",
    "memory_mhz": "clocks.mem",
    "temperature_c": "temperature.gpu",
    "power_w": "power.draw",
}
SMI_S, GIVE_UP = 10.0, 3  # limit of one question, and failures after which no more are asked
FRESH_S = 1.0  # an answer that is younger is used again


def of_machine(tell: Tell) -> dict[str, Any]:
    """Versions, and the first card as torch reports it. NotHere where CUDA is not available."""
    tell("torch.cuda.is_available")
    if torch.version.hip is not None:
        raise NotHere(f"torch {torch.__version__} is built for ROCm, and the kernels are for CUDA")
    if not torch.cuda.is_available():
        built = torch.version.cuda
        kind = f"is built for CUDA {built}" if built else "is a build without CUDA"
        raise NotHere(f"torch.cuda.is_available() is False: torch {torch.__version__} {kind}")
    tell("the first card")
    found = torch.cuda.get_device_properties(0)
    return {
        "card": {
            "name": found.name, "capability": [found.major, found.minor], "memory_bytes": found.total_memory,
            "processors": found.multi_processor_count, "cards": torch.cuda.device_count(),
            # Said in the report, so that nobody takes its lines for measurements.
            "shows": os.environ.get("EMPTY_CUDA_GPU", "") and "no card: the empty CUDA runtime",
        },
        "versions": versions(),
        "uuid": str(getattr(found, "uuid", "")),
    }  # fmt: skip


def versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {
        "python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}",
        "processors": str(os.cpu_count()), "torch": torch.__version__, "cuda": torch.version.cuda,
    }  # fmt: skip
    for name in PACKAGES:
        found[name] = None
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


class Sampler:
    """Asks nvidia-smi for the card's conditions; {} where it cannot be asked.

    uuid  of the card, without "GPU-"; '': the first card
    """

    def __init__(self, uuid: str = "") -> None:
        # CUDA and nvidia-smi number cards in different orders.
        which = [f"--id=GPU-{uuid}"] if uuid else ["--id=0"]
        fields = f"--query-gpu={','.join(ASKED.values())}"
        self._command = ["nvidia-smi", *which, fields, "--format=csv,noheader,nounits"]
        self._failures = 0 if shutil.which("nvidia-smi") else GIVE_UP
        self._last: dict[str, Any] = {}
        self._asked_at_s = -FRESH_S

    def __call__(self) -> dict[str, Any]:
        """The card's conditions now; at most SMI_S, and never an exception."""
        now_s = time.monotonic()
        # A driver that hangs would cost SMI_S at every line.
        if self._failures >= GIVE_UP or now_s - self._asked_at_s < FRESH_S:
            return dict(self._last)
        self._asked_at_s = now_s
        try:
            done = subprocess.run(
                self._command, capture_output=True, encoding="utf-8", timeout=SMI_S, check=True
            )
            self._last = parsed(done.stdout)
            self._failures = 0
        except (OSError, subprocess.SubprocessError, ValueError):
            self._failures += 1
            self._last = {}
        return dict(self._last)

    def during(self, work: Callable[[], object]) -> dict[str, Any]:
        """Conditions while `work` is repeated: clocks fall within milliseconds after it."""
        if self._failures >= GIVE_UP:
            return {}
        try:
            asked = subprocess.Popen(
                self._command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, encoding="utf-8"
            )
        except OSError:
            return {}
        # Under load until the answer is there: nvidia-smi takes a tenth of a second or two.
        ends_at_s = time.monotonic() + SMI_S
        while asked.poll() is None and time.monotonic() < ends_at_s:
            work()
        if asked.poll() is None:
            asked.kill()
        text, _ = asked.communicate()
        with suppress(ValueError):
            return parsed(text)
        return {}


def parsed(text: str) -> dict[str, Any]:
    """One line of nvidia-smi's CSV; what a card does not report ("[N/A]") is None."""
    values = [each.strip() for each in text.strip().split(",")]
    if len(values) != len(ASKED):
        raise ValueError(f"nvidia-smi gave {len(values)} of {len(ASKED)} values")
    found: dict[str, Any] = {}
    for name, value in zip(ASKED, values, strict=True):
        found[name] = value
        if name != "driver":
            try:
                found[name] = float(value)
            except ValueError:
                found[name] = None
    return found
