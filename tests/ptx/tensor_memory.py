"""Products of 10.x: tcgen05 with operands in shared memory, results in tensor memory, mbarriers that say when.

    D[M, N] = A[M, 32] B[32, N] + (D if enable-input-d else 0)      kind::f8f6f4, M 64 or 128

One thread issues a product. A, and B as columns, lie in shared memory by descriptors:

    bits 0-13    address / 16        bits 32-45   bytes between groups of 8 lines / 16
    bits 61-63   swizzle: 2: lines of 128 bytes, 4: 64, 6: 32; else as `warpgroup` has it

The instruction descriptor has the format of D (bits 4-5, 1: float32), A (7-9) and B (10-12; 0: E4M3, 1: E5M2),
N / 8 (17-22) and M / 16 (24-28). Tensor memory has 128 lanes of 512 columns of 32 bits a program; an address is lane << 16
| column. Row r of D with M = 128 is lane r; with M = 64 it is lane r + 16 (r // 16), 16 lanes of each warp. Warp w of a
group of four reads lanes 32 w to 32 w + 31 (PTX ISA 9.7.16).

A product is computed when it is issued. It is there for others once a thread has waited for the mbarrier of its
commit: before, a load of its columns is a fault, and so is a store over its operands. Sums are rounded as in `matrices`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tests.ptx.matrices import elements
from tests.ptx.memory import Fault
from tests.ptx.numerics import bits32, f32
from tests.ptx.operands import Execute, Lanes, Machine, address_reader, reader, writer
from tests.ptx.parser import Immediate, Instruction, Kernel, PtxError, Vector
from tests.ptx.warp import warps_of

LANES, COLUMNS, BYTES_OF_K = 128, 512, 32
_WIDTHS = {2: 128, 4: 64, 6: 32}  # swizzle -> bytes of a line
_FORMATS = {0: "e4m3", 1: "e5m2"}


@dataclass
class Issued:
    """A product on its way: columns of its result, and places of its operands in shared memory."""

    columns: slice
    places: list[Any] = field(default_factory=list)


@dataclass
class Barrier:
    """An mbarrier: arrivals that a phase needs and still lacks, phases that ended, and products that it tells of."""

    count: int
    left: int
    phase: int = 0
    told: list[Issued] = field(default_factory=list)


class TensorMemory:
    """Of all programs of a machine."""

    def __init__(self, programs: int) -> None:
        self.data = np.full((programs, LANES, COLUMNS), 0x7FC0CDCD, np.uint32)
        self.unseen = np.zeros((programs, COLUMNS), bool)
        self.allocated = [0] * programs
        self.issued: list[list[Issued]] = [[] for _ in range(programs)]
        self.barriers: dict[tuple[int, int], Barrier] = {}

    def barrier(self, program: int, address: int) -> Barrier:
        if (program, address) not in self.barriers:
            raise Fault(f"mbarrier: none was begun at {address}")
        return self.barriers[program, address]


def memory_of(machine: Machine) -> TensorMemory:
    found = getattr(machine, "tensor_memory", None)
    if found is None:
        found = machine.tensor_memory = TensorMemory(machine.programs)
    return found


def decode(instruction: Instruction, kernel: Kernel) -> Execute | None:
    name, *words = instruction.opcode.split(".")
    if name == "mbarrier":
        return _mbarrier(instruction, words, kernel)
    if name != "tcgen05":
        return None
    what = words[0]
    if what in ("relinquish_alloc_permit", "wait::ld", "wait::st", "fence::before_thread_sync", "fence::after_thread_sync"):  # fmt: skip
        return lambda machine, lanes: None
    if what == "alloc":
        return _allocate(instruction, kernel)
    if what == "dealloc":
        return _free(instruction, kernel)
    if what == "commit":
        return _commit(instruction, kernel)
    if what == "mma" and words[1:] == ["cta_group::1", "kind::f8f6f4"]:
        return _product(instruction, kernel)
    if what in ("ld", "st") and words[3] in ("32x32b", "16x32bx2") and words[-1] == "b32":
        return _access(instruction, what == "st", words[3] == "16x32bx2", kernel)
    raise PtxError("This instruction of tensor memory is not known.")


def _each(machine: Machine, lanes: Lanes) -> list[tuple[int, int]]:
    """(program of the machine, thread of the launch) of each lane."""
    threads = machine.threads_of(lanes)
    programs = threads // machine.launch.threads - machine.launch.first
    return list(zip(programs.tolist(), threads.tolist(), strict=True))


def _allocate(instruction: Instruction, kernel: Kernel) -> Execute:
    place, number = instruction.operands
    addresses = address_reader(place, kernel)
    assert isinstance(number, Immediate)

    def allocate(machine: Machine, lanes: Lanes) -> None:
        machine.progress()
        memory, first = memory_of(machine), warps_of(machine, lanes)[:, 0]
        threads = machine.thread[first]
        targets = addresses(machine, lanes).reshape(-1, 32)[:, 0]
        for target, thread in zip(targets, threads, strict=True):
            program = int(thread) // machine.launch.threads - machine.launch.first
            column = memory.allocated[program]
            if column + number.value > COLUMNS:
                raise Fault("tensor memory: no columns are left")
            memory.allocated[program] += number.value
            at = machine.shared.place(np.array([target]), 4, np.array([thread]))
            raw = np.array([column], np.uint32).view(np.uint8).reshape(1, 4)
            machine.shared.store(at, raw, np.array([thread]))

    return allocate


def _free(instruction: Instruction, kernel: Kernel) -> Execute:
    number = instruction.operands[1]
    assert isinstance(number, Immediate)

    def free(machine: Machine, lanes: Lanes) -> None:
        memory = memory_of(machine)
        for program in {program for program, _ in _each(machine, lanes)}:
            if memory.unseen[program].any():
                raise Fault("tensor memory: freed while a product is on its way")
            memory.allocated[program] -= number.value
            if memory.allocated[program] < 0:
                raise Fault("tensor memory: freed twice")

    return free


def _mbarrier(instruction: Instruction, words: list[str], kernel: Kernel) -> Execute:
    if words[0] == "try_wait" and words[1] == "parity":
        return _try_wait(instruction, kernel)
    if words[0] not in ("init", "inval"):
        raise PtxError("This use of an mbarrier is not known.")
    addresses = address_reader(instruction.operands[0], kernel)
    count = instruction.operands[1] if words[0] == "init" else None

    def change(machine: Machine, lanes: Lanes) -> None:
        machine.progress()
        memory, given = memory_of(machine), addresses(machine, lanes).tolist()
        for (program, _), address in zip(_each(machine, lanes), given, strict=True):
            if count is None:
                memory.barrier(program, address)
                del memory.barriers[program, address]
            elif (program, address) in memory.barriers:
                raise Fault(f"mbarrier: begun twice at {address}")
            else:
                assert isinstance(count, Immediate)
                memory.barriers[program, address] = Barrier(count.value, count.value)

    return change


def _try_wait(instruction: Instruction, kernel: Kernel) -> Execute:
    done, place, parity = instruction.operands
    write, addresses = writer(done, 1), address_reader(place, kernel)
    read = reader(parity, 32, kernel)

    def wait(machine: Machine, lanes: Lanes) -> None:
        memory, given = memory_of(machine), addresses(machine, lanes).tolist()
        wanted = np.broadcast_to(read(machine, lanes), len(given)).tolist()
        found = np.zeros(len(given), bool)
        for n, ((program, _), address) in enumerate(zip(_each(machine, lanes), given, strict=True)):
            barrier = memory.barrier(program, address)
            found[n] = barrier.phase % 2 != wanted[n] % 2
            if found[n]:
                for each in barrier.told:
                    memory.unseen[program, each.columns] = False
                    for at in each.places:
                        machine.shared.in_use[at] = False
                barrier.told = []
        write(machine, lanes, found)

    return wait


def _commit(instruction: Instruction, kernel: Kernel) -> Execute:
    """The products that this thread issued so far arrive at the mbarrier once they are there."""
    addresses = address_reader(instruction.operands[0], kernel)

    def commit(machine: Machine, lanes: Lanes) -> None:
        machine.progress()
        memory, given = memory_of(machine), addresses(machine, lanes).tolist()
        for (program, _), address in zip(_each(machine, lanes), given, strict=True):
            barrier = memory.barrier(program, address)
            barrier.told += memory.issued[program]
            memory.issued[program] = []
            barrier.left -= 1
            if barrier.left == 0:
                barrier.phase, barrier.left = barrier.phase + 1, barrier.count

    return commit


def _product(instruction: Instruction, kernel: Kernel) -> Execute:
    result, *others = instruction.operands
    results = address_reader(result, kernel)
    lhs, rhs = (reader(each, 64, kernel) for each in others[:2])
    described, adds = reader(others[2], 32, kernel), reader(others[3], 1, kernel)

    def run(machine: Machine, lanes: Lanes) -> None:
        machine.progress()
        each = _each(machine, lanes)
        given = [
            np.broadcast_to(read(machine, lanes), len(each)).tolist()
            for read in (results, lhs, rhs, described, adds)
        ]
        for (program, thread), *values in zip(each, *given, strict=True):
            _multiply(machine, program, thread, *values)

    return run


def _multiply(
    machine: Machine, program: int, thread: int, result: int, lhs: int, rhs: int, fields: int, adds: bool
) -> None:  # fmt: skip
    known = 3 << 4 | 7 << 7 | 7 << 10 | 63 << 17 | 31 << 24
    kinds = _FORMATS.get(fields >> 7 & 7), _FORMATS.get(fields >> 10 & 7)
    n, m = 8 * (fields >> 17 & 63), 16 * (fields >> 24 & 31)
    if fields & ~known or fields >> 4 & 3 != 1 or None in kinds or m not in (64, 128):
        raise PtxError(f"Products like {fields:#x} are unknown.")
    memory = memory_of(machine)
    lane, column = result >> 16, result & 0xFFFF
    if lane or column + n > memory.allocated[program]:
        raise Fault(f"outside of the program's tensor memory: columns {column} to {column + n}")
    issued = Issued(slice(column, column + n))
    sides = [
        _operand(machine, descriptor, thread, lines, str(kind), issued)
        for descriptor, lines, kind in zip((lhs, rhs), (m, n), kinds, strict=True)
    ]
    rows = np.arange(m)
    rows = rows if m == 128 else rows + 16 * (rows // 16)
    target = memory.data[program][rows, column : column + n]
    start = f32(target) if adds else np.float32(0)
    total = (sides[0] @ sides[1].T + start).astype(np.float32)
    memory.data[program][rows, column : column + n] = bits32(total)
    memory.unseen[program, issued.columns] = True
    memory.issued[program].append(issued)


def _operand(
    machine: Machine, descriptor: int, thread: int, lines: int, kind: str, issued: Issued
) -> Any:
    """[lines, 32] of an operand."""
    width = _WIDTHS.get(descriptor >> 61 & 7, 0)
    if not width or descriptor >> 49 & 15:
        raise PtxError(f"Descriptors like {descriptor:#x} are unknown.")
    stride = 16 * (descriptor >> 32 & 0x3FFF)
    line, byte = np.arange(lines)[:, None], np.arange(BYTES_OF_K)
    place = 16 * (descriptor & 0x3FFF) + line // 8 * stride + line % 8 * width + byte
    place = place ^ (((place >> 7) & (width // 16 - 1)) << 4)
    who = np.full(place.size, thread)
    at = machine.shared.place(place.reshape(-1).astype(np.uint64), 1, who)
    raw = machine.shared.load_for_product(at, who).reshape(lines, BYTES_OF_K)
    issued.places.append(at)
    return elements(np.ascontiguousarray(raw).view(np.uint32), kind).reshape(lines, -1)


def _access(instruction: Instruction, stores: bool, is_halved: bool, kernel: Kernel) -> Execute:
    """Loads and stores of a warp: register j of lane l is column j of its lane.

    Halved, lanes 16 to 31 have the columns behind those of lanes 0 to 15, of the same 16 lanes of tensor memory.
    """
    first, second, *more = instruction.operands
    place, vector = (first, second) if stores else (second, first)
    if is_halved:
        place, vector, more = (first, more[0], [second]) if stores else (second, first, more)
    parts = vector.parts if isinstance(vector, Vector) else (vector,)
    addresses = address_reader(place, kernel)
    offset = more[0].value if is_halved and isinstance(more[0], Immediate) else 0
    reads = [reader(each, 32, kernel) for each in parts] if stores else []
    writes = [] if stores else [writer(each, 32) for each in parts]

    def run(machine: Machine, lanes: Lanes) -> None:
        memory, whole = memory_of(machine), warps_of(machine, lanes)
        given = addresses(machine, lanes).astype(np.int64).reshape(whole.shape)
        if (given != given[:, :1]).any():
            raise Fault("warp: addresses of tensor memory differ within a warp")
        lane, column = given >> 16, given & 0xFFFF
        threads = machine.thread[whole]
        programs = threads // machine.launch.threads - machine.launch.first
        if (lane[:, 0] // 32 != threads[:, 0] // 32 % 4).any():
            raise Fault("tensor memory: a warp reads lanes of another one")
        here = np.arange(32)
        row = lane + (here % 16 if is_halved else here)
        column = column + (offset * (here // 16) if is_halved else 0)
        allocated = np.array(memory.allocated)[programs]
        if (column + len(parts) > allocated).any():
            raise Fault("outside of the program's tensor memory")
        for j in range(len(parts)):
            if memory.unseen[programs, column + j].any():
                raise Fault("race: a product in tensor memory that no thread has waited for")
            if stores:
                machine.progress()
                value = np.broadcast_to(reads[j](machine, lanes), whole.size)
                memory.data[programs, row, column + j] = value.reshape(whole.shape)
            else:
                found = memory.data[programs, row, column + j]
                writes[j](machine, lanes, found.reshape(-1))

    return run
