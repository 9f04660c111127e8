"""What a kernel takes of a multiprocessor, by cuobjdump: registers, spills, instructions; and how many programs fit on one at a time.

Instructions are those of the code, not those that run: without the NOPs that fill it up, and without subroutines, which are the slow
paths of divisions and roots. Of a loop the body counts once.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from functools import cache
from pathlib import Path

# Compute capability 9.0: CUDA C++ programming guide, "Compute Capabilities", and the occupancy calculator.
WARPS, REGISTERS, REGISTERS_AT_A_TIME, WARPS_AT_A_TIME = 64, 65536, 256, 4
SHARED_BYTES, SHARED_OF_SYSTEM, SHARED_AT_A_TIME, MOST_PROGRAMS = 233472, 1024, 128, 32

_INSTRUCTION = re.compile(
    r"^\s*/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);", re.M
)


@dataclass(frozen=True)
class Usage:
    """registers of a thread; spilled bytes of its stack and local memory; instructions of its code."""

    registers: int
    spilled: int
    instructions: int


@cache
def usage(cubin: Path) -> Usage:
    """Of the one kernel of a binary."""
    resources = _cuobjdump("-res-usage", cubin)
    numbers = {
        name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", resources)
    }
    code = _cuobjdump("-sass", cubin)
    return Usage(numbers["REG"], numbers["STACK"] + numbers["LOCAL"], instructions(code))


def instructions(sass: str) -> int:
    """Of a kernel's disassembly: those before its subroutines, which follow its last exit, without NOP."""
    found = [(int(place, 16), name, rest) for place, name, rest in _INSTRUCTION.findall(sass)]
    calls = [
        int(target, 16)
        for _, name, rest in found
        if name.startswith("CALL")
        for target in _targets(rest)
    ]
    end = min(calls, default=found[-1][0] + 1 if found else 0)
    return sum(place < end and name != "NOP" for place, name, _ in found)


def _targets(operands: str) -> list[str]:
    return re.findall(r"0x([0-9a-f]+)", operands)[-1:]


def programs(registers: int, threads: int, shared_bytes: int) -> int:
    """Programs that one multiprocessor holds at a time."""
    warps = -(-threads // 32)
    each = _rounded(registers * 32, REGISTERS_AT_A_TIME)
    by_registers = (
        REGISTERS // each // WARPS_AT_A_TIME * WARPS_AT_A_TIME // warps
        if registers
        else MOST_PROGRAMS
    )
    by_shared = SHARED_BYTES // _rounded(shared_bytes + SHARED_OF_SYSTEM, SHARED_AT_A_TIME)
    return min(MOST_PROGRAMS, WARPS // warps, by_registers, by_shared)


def _rounded(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _cuobjdump(option: str, cubin: Path) -> str:
    """By the one of Triton's wheel, which looks for nvdisasm on the PATH. Without the runtime's stand-ins: it needs no GPU."""
    import triton

    folder = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    variables = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
    variables["PATH"] = f"{folder}:{variables.get('PATH', '')}"
    done = subprocess.run(
        [folder / "cuobjdump", option, cubin], capture_output=True, encoding="utf-8", env=variables
    )
    if done.returncode:
        raise RuntimeError(
            f"cuobjdump {option} {cubin}: {done.stderr.strip() or done.stdout.strip()}"
        )
    return done.stdout
