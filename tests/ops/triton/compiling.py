"""Compiles what a launch would run, for any GPU and without one, and looks at what came out.

A launch is caught and its kernel compiled by Triton's own path, with the specializations (alignment, constants) that the arguments of
the launch bring; only the driver, which says what GPU there is, is put in place of the real one.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

triton = pytest.importorskip(
    "triton", reason="triton is not installed: its kernels are neither compiled nor run here"
)

from triton.backends.compiler import GPUTarget  # noqa: E402

from narrowgauge.errors import SlowerWarning  # noqa: E402
from narrowgauge.ops import registry  # noqa: E402
from narrowgauge.ops.registry import Device  # noqa: E402

BEFORE_39 = tuple(int(part) for part in triton.__version__.split(".")[:2]) < (
    3,
    9,
)  # spills a few bytes where sizes are odd
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
TARGETS = {80: (8, 0), 89: (8, 9), 90: (9, 0), 100: (10, 0)}  # sm -> compute capability


class AbsentGpu:
    """As much of a driver as compiling asks for. The number of the device keeps the targets apart in Triton's cache."""

    def __init__(self, sm: int) -> None:
        self.sm = sm

    def get_current_device(self) -> int:
        return self.sm

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.sm, 32)


@dataclass(frozen=True)
class Compiled:
    """name of the kernel; ptx, its text; usage: REG, STACK and LOCAL of the binary, WARPS and SHARED of a launch; registers and bytes.

    cooperative  whether the driver is asked to start all programs at once
    """

    name: str
    ptx: str
    usage: dict[str, int]
    cooperative: bool

    def instructions(self) -> set[str]:
        """The distinct instructions of the ptx, types and all: cvt.rn.satfinite.e4m3x2.f32."""
        return set(re.findall(r"^\s*(?:@!?%p\d+\s+)?([a-z][\w.:]+)\s", self.ptx, re.MULTILINE))

    @property
    def spills(self) -> int:
        return self.usage["STACK"] + self.usage["LOCAL"]

    @property
    def programs(self) -> int:
        """How many fit onto a multiprocessor of compute capability 9.0 (CUDA C++ Programming Guide, "Compute Capabilities")."""
        registers = -(-self.usage["REG"] // 8) * 8 * 32 * self.usage["WARPS"]
        return min(
            65536 // registers,
            64 // self.usage["WARPS"],
            228 * 1024 // (self.usage["SHARED"] + 1024),
        )


@contextmanager
def caught(modules: list[Any], sm: int, found: list[Compiled]) -> Iterator[None]:
    """Within it, `launch` in these modules compiles for `sm` and adds to `found` instead of running."""

    def compile_instead(
        kernel: Any,
        programs: int,
        *arguments: Any,
        warps: int,
        reached: Any = None,
        **constants: Any,
    ) -> None:
        options = {"num_warps": warps, "enable_fp_fusion": False, **constants}
        made = kernel.warmup(*arguments, grid=(programs,), **options)
        found.append(
            Compiled(
                kernel.__name__,
                made.asm["ptx"],
                _usage(made.asm["cubin"]) | {"SHARED": made.metadata.shared, "WARPS": warps},
                made.metadata.launch_cooperative_grid,
            )
        )

    before = triton.runtime.driver._active
    triton.runtime.driver.set_active(AbsentGpu(sm))
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings():
        # Before Triton 3.7.1 products load in one stage on 9.0 and 10.x, which warns once.
        warnings.filterwarnings("ignore", category=SlowerWarning)
        patch.setattr(
            registry, "cpu_facts", lambda: Device("cuda", TARGETS[sm])
        )  # the tensors are on the CPU
        for module in modules:
            patch.setattr(module, "launch", compile_instead)
        try:
            yield
        finally:
            triton.runtime.driver._active = before


def compiled(modules: list[Any], sm: int, call: Callable[[], Any]) -> dict[str, Compiled]:
    """The kernels that `call` would launch on a GPU of this kind, by name."""
    found: list[Compiled] = []
    with caught(modules, sm, found):
        call()
    return {each.name: each for each in found}


def _usage(cubin: bytes) -> dict[str, int]:
    """By cuobjdump, and kept beside the binary."""
    kept = Path(os.environ["TRITON_CACHE_DIR"]) / f"{hashlib.sha256(cubin).hexdigest()}.json"
    if kept.exists():
        return json.loads(kept.read_text(encoding="utf-8"))  # type: ignore[no-any-return]
    kept.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=kept.parent) as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        text = subprocess.run(
            [TOOLS / "cuobjdump", "-res-usage", path],
            capture_output=True,
            encoding="utf-8",
            check=True,
        ).stdout
        found = {
            name: int(number)
            for name, number in re.findall(r"(REG|STACK|LOCAL|SHARED):(\d+)", text)
        }
        path.write_text(json.dumps(found), encoding="utf-8")
        path.replace(kept)
    return found
