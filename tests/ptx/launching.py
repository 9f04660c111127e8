"""Runs the project's launches on the PTX that Triton compiles for a GPU, in the place of the GPU.

    with interpreted(90):
        codes = triton_launch.cast_pair(x, cast, cols=True)     # tensors of the CPU

Everything up to the launch is the project's and Triton's own: the choice of kernel and sizes, the
specialization on alignment and constants, the compiler. What the driver would get is run by
`machine` instead, on the memory of the tensors, and each run is noted.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from narrowgauge.ops import registry
from narrowgauge.ops.mm import triton as block_mm
from narrowgauge.ops.quantize import triton_launch
from narrowgauge.ops.registry import Device
from narrowgauge.optim.triton import launch as optim_launch
from tests.ops.triton.compiling import AbsentGpu, triton
from tests.ptx.decoding import code_of
from tests.ptx.machine import Launch, Machine, Schedule
from tests.ptx.memory import GlobalMemory
from tests.ptx.order import Order

CAPABILITIES = {80: (8, 0), 89: (8, 9), 90: (9, 0), 100: (10, 0), 120: (12, 0)}  # sm -> ...
# Threads that step together where programs do not wait for each other.
AT_A_TIME = 8192
PATIENCE = (
    2_000  # instructions without news after which a launch with too few places is said to hang
)
# Tensors whose addresses a kernel finds in a table, of the launch that goes on.
_REACHED: ContextVar[Callable[[], Iterable[Tensor]]] = ContextVar("reached", default=list)


@dataclass(frozen=True)
class Run:
    """kernel: its name; ptx: its text; programs of the launch; steps: instructions that were run."""

    kernel: str
    ptx: str
    programs: int
    steps: int


@dataclass
class Interpretation:
    """How launches are run, and those that were.

    programs  that are on the GPU at once, where they wait for each other
    resident  as many programs find a place, also of a launch whose programs wait: the others start
              when those have ended, as beside other work that holds the multiprocessors. 0: all of
              such a launch, and else a few
    late      the groups of programs start from the last to the first
    mutate    changes the PTX of a kernel before it runs
    """

    sm: int
    programs: int = 3
    schedule: Schedule = Schedule.TOGETHER
    seed: int = 0
    resident: int = 0
    late: bool = False
    mutate: Callable[[str, str], str] = lambda kernel, ptx: ptx
    runs: list[Run] = field(default_factory=list)

    def run(
        self, kernel: Any, *arguments: Any, grid: Any, warmup: bool = False, **named: Any
    ) -> Any:
        """In the place of `JITFunction.run`."""
        made = _COMPILE(kernel, *arguments, grid=grid, warmup=True, **named)
        if warmup:
            return made
        programs = (grid(named) if callable(grid) else grid)[0]
        given = dict(zip(kernel.arg_names, arguments, strict=False)) | named
        signature = made.src.signature
        values = list(_passed([given[name] for name in signature], list(signature.values())))
        ptx = self.mutate(kernel.__name__, made.asm["ptx"])
        launch = Launch(
            programs, 32 * made.metadata.num_warps, made.metadata.shared, schedule=self.schedule,
            seed=self.seed, patience=PATIENCE if self.resident else Launch.patience,
        )  # fmt: skip
        waits = made.metadata.launch_cooperative_grid
        count = self.resident or (programs if waits else max(1, AT_A_TIME // launch.threads))
        steps = execute(ptx, values, launch, count, self.late, _REACHED.get()())
        self.runs.append(Run(kernel.__name__, ptx, programs, steps))
        return made


_COMPILE = triton.runtime.jit.JITFunction.run


def _passed(values: list[Any], kinds: list[Any]) -> Iterator[Any]:
    """The arguments that are not compiled in; tuples are flattened, as Triton does."""
    for value, kind in zip(values, kinds, strict=True):
        if isinstance(kind, tuple | list):
            yield from _passed(list(value), list(kind))
        elif kind != "constexpr":
            yield value


def _storage(x: Tensor) -> Any:
    """The bytes of a tensor's whole storage, uint8."""
    return torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage()).numpy()


def _number(value: Any) -> int:
    """Address of a tensor, an integer, or the bits of a float32."""
    if isinstance(value, Tensor):
        return value.data_ptr()
    if isinstance(value, float):
        return int.from_bytes(struct.pack("<f", value), "little")
    return int(value)


def execute(
    ptx: str, values: list[Any], launch: Launch, count: int, late: bool = False,
    reached: Iterable[Tensor] = (),
) -> int:  # fmt: skip
    """Run a launch on the memory of its tensors, and return the number of instructions.

    values   arguments in the kernel's order: tensors, integers and floats. Parameters beyond them are
             Triton's own, for scratch memory, which these kernels do not use: null
    count    programs that are there at once; a group ends before the next one starts
    late     from the last group to the first
    reached  further tensors that the kernel has addresses of
    """
    code = code_of(ptx)
    tensors = [each for each in values if isinstance(each, Tensor)] + list(reached)
    storages = {each.untyped_storage().data_ptr(): each for each in tensors if each.numel()}
    numbers = [_number(each) for each in values]
    names = [name for name, _ in code.kernel.parameters]
    arguments = dict.fromkeys(names, 0) | dict(zip(names, numbers, strict=False))
    memory = GlobalMemory(
        [_storage(each) for each in storages.values()],
        Order(launch.programs, launch.threads),
        watches_reads="atom.global" in ptx,
    )
    steps = 0
    firsts = range(0, launch.programs, count)
    for first in reversed(firsts) if late else firsts:
        part = replace(launch, first=first, count=min(count, launch.programs - first))
        machine = Machine(code, memory, arguments, part)
        machine.run()
        steps += machine.steps
    memory.copy_back()
    return steps


@contextmanager
def interpreted(sm: int, **how: Any) -> Iterator[Interpretation]:
    """Within it, launches of Triton kernels on tensors of the CPU are those of such a GPU.

    how  see `Interpretation`
    """
    found = Interpretation(sm, **how)
    capability = CAPABILITIES[sm]
    before = triton.runtime.driver._active
    blocks_for, launch = block_mm.blocks_for, optim_launch.launch

    def launch_with_table(*given: Any, reached: Any = list, **named: Any) -> None:
        token = _REACHED.set(reached)
        try:
            launch(*given, reached=reached, **named)
        finally:
            _REACHED.reset(token)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton.runtime.jit.JITFunction, "run", lambda *a, **o: found.run(*a, **o))
        patch.setattr(registry, "cpu_facts", lambda: Device("cuda", capability))
        patch.setattr(
            triton_launch,
            "_cooperative_grid",
            lambda pieces, *_: (min(pieces, found.programs), triton_launch.FEW),
        )
        # A group of programs waits in vain for one of the next group.
        patch.setattr(triton_launch, "PATIENCE", 16)
        patch.setattr(optim_launch, "launch", launch_with_table)
        patch.setattr(
            block_mm, "blocks_for", lambda tiles, _, rows: blocks_for(tiles, capability, rows)
        )
        triton.runtime.driver.set_active(AbsentGpu(sm))
        try:
            yield found
        finally:
            triton.runtime.driver._active = before
