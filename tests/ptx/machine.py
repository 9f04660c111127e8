"""Runs a kernel: all threads of several programs, each instruction on all threads that are there.

Threads step together, or the ones that are furthest behind run first; `Schedule.RANDOM` lets the
warps of all programs run in bursts in any order instead. Registers begin with random bits and shared
memory with 0xCD, so that nothing depends on what was never written.

    machine = Machine(code_of(ptx), memory, arguments, Launch(programs=4, threads=128))
    machine.run()

Faults, besides those of `memory`: a barrier that not all threads of a program reach, an instruction
of a warp that not all its lanes reach, and a launch in which nothing happens any more (hang).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np

from tests.ptx.decoding import Code
from tests.ptx.memory import Fault, GlobalMemory, SharedMemory
from tests.ptx.numerics import UNSIGNED
from tests.ptx.operands import Lanes
from tests.ptx.parser import Kernel, Register, Vector


class Schedule(Enum):
    TOGETHER = "together"
    RANDOM = "random"


@dataclass(frozen=True)
class Launch:
    """programs, threads: of the launch and of a program; shared: bytes of a program.

    first, count  programs that this machine runs; the others run before or after them
    patience      instructions of a thread without a store, a barrier or an end of any thread, after
                  which the launch is said to hang; a loop body of these kernels has below 5,000
    """

    programs: int
    threads: int
    shared: int = 0
    first: int = 0
    count: int = 0
    schedule: Schedule = Schedule.TOGETHER
    seed: int = 0
    patience: int = 10_000


class Machine:
    """arguments: parameter name -> value, an address for pointers."""

    def __init__(
        self, code: Code, memory: GlobalMemory, arguments: Mapping[str, int], launch: Launch
    ) -> None:
        self.code, self.memory, self.arguments, self.launch = code, memory, arguments, launch
        self.programs = launch.count or launch.programs
        self.lanes = self.programs * launch.threads
        self.random = np.random.default_rng(launch.seed)
        self.shared = SharedMemory(self.programs, launch.shared, memory.order, launch.first)
        self.thread = launch.first * launch.threads + np.arange(self.lanes)  # number in the launch
        self.registers = {name: self._junk(bits) for name, bits in _registers(code.kernel)}
        self.pending: list[Any] = []  # asynchronous copies, see `accesses`
        self.pc = np.zeros(self.lanes, np.int64)
        self.waiting = np.zeros(self.lanes, bool)
        self.polling = np.zeros(self.lanes, bool)  # asked in vain: others go first
        self.steps = self.idle = 0
        self._together: int | None = 0 if launch.schedule is Schedule.TOGETHER else None
        self._warp, self._burst = 0, 0
        # Warps that take turns need so many instructions for one of each.
        self._turns = 1 if launch.schedule is Schedule.TOGETHER else self.lanes // 32

    def _junk(self, bits: int) -> Any:
        if bits == 1:
            return self.random.random(self.lanes) < 0.5
        dtype: Any = UNSIGNED[bits]
        return self.random.integers(0, 2**bits, self.lanes, dtype, endpoint=False)

    def special(self, name: str) -> Any:
        """A special register [lanes]. Grids and programs have one dimension."""
        of_program = self.thread % self.launch.threads
        if name.endswith((".y", ".z")):
            return np.full(self.lanes, 0 if "id." in name and "n" not in name[1:3] else 1)
        return {
            "%tid.x": of_program,
            "%laneid": of_program % 32,
            "%warpid": of_program // 32,
            "%ctaid.x": self.thread // self.launch.threads,
            "%ntid.x": np.full(self.lanes, self.launch.threads),
            "%nctaid.x": np.full(self.lanes, self.launch.programs),
        }[name]

    def threads_of(self, lanes: Lanes) -> Any:
        return self.thread if lanes is None else self.thread[lanes]

    def progress(self) -> None:
        """Something happened that another thread may wait for."""
        self.idle = 0
        self.polling[:] = False

    def run(self) -> None:
        """Raises Fault, with the statement at which it happened."""
        with np.errstate(all="ignore"):
            while (chosen := self._choose()) is not None:
                at, lanes = chosen
                try:
                    self._step(at, lanes)
                except Fault as fault:
                    raise Fault(f"{fault} (at: {self.code.steps[at].text})") from None

    def _step(self, at: int, lanes: Lanes) -> None:
        step = self.code.steps[at]
        self.steps += 1
        self.idle += 1
        if self.idle > self.launch.patience * self._turns:
            raise Fault(f"hang: {self.idle} instructions without a store, a barrier or an end")
        taken = lanes if step.guard is None else self._guarded(step.guard, lanes)
        if step.control == "":
            if taken is None or len(taken):
                step.execute(self, taken)
            self._go(lanes, at + 1)
        elif step.control == "barrier":
            if taken is not lanes:
                raise Fault("barrier: not all threads of a warp reach it")
            self._wait(lanes, at)
        elif taken is None:
            self._go(None, len(self.code.steps) if step.control == "end" else step.target)
        else:
            self._go(lanes, at + 1)
            if len(taken):
                self._go(taken, len(self.code.steps) if step.control == "end" else step.target)
                self.idle = 0 if step.control == "end" else self.idle

    def _guarded(self, guard: tuple[str, bool], lanes: Lanes) -> Lanes:
        whole = self.registers[guard[0]]
        holds = (whole if lanes is None else whole[lanes]) == guard[1]
        if holds.all():
            return lanes
        return np.flatnonzero(holds) if lanes is None else lanes[holds]

    def _go(self, lanes: Lanes, at: int) -> None:
        if lanes is None:
            self._together = at
            return
        if self._together is not None:
            self.pc[:] = self._together
            self._together = None
        self.pc[lanes] = at

    def _wait(self, lanes: Lanes, at: int) -> None:
        self.progress()
        threads, first = self.launch.threads, self.launch.first
        if lanes is None:
            for program in range(self.programs):
                self.memory.order.barrier(first + program)
            self._go(None, at + 1)
            return
        self.waiting[lanes] = True
        for program in np.unique(lanes // threads):
            own = slice(program * threads, (program + 1) * threads)
            if self.waiting[own].all():
                self.waiting[own] = False
                self.pc[own] += 1
                self.memory.order.barrier(first + int(program))

    def _choose(self) -> tuple[int, Lanes] | None:
        """The next instruction and the threads that run it; None at the end."""
        end = len(self.code.steps)
        if self.launch.schedule is Schedule.RANDOM:
            return self._choose_warp(end)
        if self._together is not None:
            return None if self._together >= end else (self._together, None)
        if (self.pc == self.pc[0]).all() and not self.waiting.any():
            self._together = int(self.pc[0])
            return self._choose()
        behind = np.where(self.waiting, end, self.pc)
        # What they wait for may stand further on in the text.
        others = np.where(self.polling, end, behind)
        if others.min() < end:
            behind = others
        else:
            self.polling[:] = False
        at = int(behind.min())
        if at >= end:
            return self._ended()
        return at, np.flatnonzero(behind == at)

    def _choose_warp(self, end: int) -> tuple[int, Lanes] | None:
        """A warp runs for some instructions, then any other one; of its lanes those furthest behind."""
        behind = np.where(self.waiting, end, self.pc).reshape(-1, 32)
        self._burst -= 1
        if self._burst < 0 or behind[self._warp].min() >= end:
            able = np.flatnonzero(behind.min(1) < end)
            if len(able) == 0:
                return self._ended()
            self._warp, self._burst = int(self.random.choice(able)), int(self.random.integers(200))
        at = int(behind[self._warp].min())
        return at, self._warp * 32 + np.flatnonzero(behind[self._warp] == at)

    def _ended(self) -> None:
        if self.waiting.any():
            raise Fault("barrier: threads ended, or wait elsewhere, that others wait for")


def _registers(kernel: Kernel) -> list[tuple[str, int]]:
    found = set()
    for instruction in kernel.instructions:
        for operand in (*instruction.operands, *(instruction.guard or ())[:1]):
            parts: Any = operand.parts if isinstance(operand, Vector) else [operand]
            parts = [getattr(each, "base", each) for each in parts]
            found |= {(each.name, each.bits) for each in parts if isinstance(each, Register)}
    return sorted(found)
