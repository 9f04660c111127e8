"""Products of 10.x: tcgen05 with operands in shared memory, results in tensor memory, mbarriers that say when.

    D[M, N] = A[M, K] B[K, N] + (D if enable-input-d else 0)      K: 32 bytes of elements; M 64 or 128

One thread issues a product. A, and B as columns, lie in shared memory by descriptors:

    bits 0-13    address / 16        bits 32-45   bytes between groups of 8 lines / 16
    bits 16-29   bytes between pieces of a turned line / 16
    bits 61-63   swizzle: 2: lines of 128 bytes, 4: 64, 6: 32; else as `warpgroup` has it

A may lie in tensor memory instead: its rows as those of D, its elements along the columns. The instruction descriptor
has the format of D (bits 4-5, 1: float32), A (7-9) and B (10-12), whether A (15) and B (16) are turned, N / 8 (17-22) and
M / 16 (24-28). Tensor memory has 128 lanes of 512 columns of 32 bits a program; an address is lane << 16
| column. Row r of D with M = 128 is lane r; with M = 64 it is lane r + 16 (r // 16), or 16 lanes higher. Warp w of a
group of four reads lanes 32 w to 32 w + 31 (PTX ISA 9.7.16).

A product is computed when it is issued. It is there for others once a thread has waited for the mbarrier of its
commit: before, a load of its columns is a fault, and so is a store over its operands. Sums are rounded as in `matrices`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tests.ptx.matrices import elements, width_of
from tests.ptx.memory import Fault
from tests.ptx.numerics import bits32, f32
from tests.ptx.operands import Execute, Lanes, Machine, address_reader, reader, writer
from tests.ptx.parser import Address, Immediate, Instruction, Kernel, PtxError, Vector
from tests.ptx.warp import warps_of

LANES, COLUMNS, BYTES_OF_K = 128, 512, 32
_WIDTHS = {2: 128, 4: 64, 6: 32}  # swizzle -> bytes of a line
_FORMATS = {"kind::f8f6f4": ("e4m3", "e5m2"), "kind::f16": ("f16", "bf16")}


@dataclass
class Issued:
    """A product on its way: lanes and columns of its result, and places of its operands in shared memory."""

    rows: Any
    columns: slice
    places: list[Any] = field(default_factory=list)


@dataclass
class Barrier:
    """An mbarrier: arrivals that a phase needs and still lacks, phases that ended, and products that it tells of.

    is_late  the end of the phase has not been seen: the first question after it is answered with no
    """

    count: int
    left: int
    phase: int = 0
    is_late: bool = False
    told: list[Issued] = field(default_factory=list)


class TensorMemory:
    """Of all programs of a machine."""

    def __init__(self, programs: int) -> None:
        self.data = np.full((programs, LANES, COLUMNS), 0x7FC0CDCD, np.uint32)
        self.unseen = np.zeros((programs, LANES, COLUMNS), bool)
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
    if what == "mma" and words[1] == "cta_group::1" and words[-1] in _FORMATS:
        return _product(instruction, _FORMATS[words[-1]], kernel)
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
        found, asked = np.zeros(len(given), bool), []
        for n, ((program, _), address) in enumerate(zip(_each(machine, lanes), given, strict=True)):
            barrier = memory.barrier(program, address)
            asked.append(barrier)
            found[n] = barrier.phase % 2 != wanted[n] % 2 and not barrier.is_late
            if found[n]:
                for each in barrier.told:
                    memory.unseen[program][each.rows, each.columns] = False
                    for at in each.places:
                        machine.shared.in_use[at] = False
                barrier.told = []
        for barrier in asked:
            barrier.is_late = False
        machine.polling[slice(None) if lanes is None else lanes] = ~found
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
                barrier.is_late = True

    return commit


def _product(instruction: Instruction, kinds: tuple[str, ...], kernel: Kernel) -> Execute:
    result, left, *others = instruction.operands
    results, in_tensor_memory = address_reader(result, kernel), isinstance(left, Address)
    lhs = address_reader(left, kernel) if in_tensor_memory else reader(left, 64, kernel)
    rhs, described = reader(others[0], 64, kernel), reader(others[1], 32, kernel)
    adds = reader(others[2], 1, kernel)

    def run(machine: Machine, lanes: Lanes) -> None:
        machine.progress()
        each = _each(machine, lanes)
        given = [
            np.broadcast_to(read(machine, lanes), len(each)).tolist()
            for read in (results, lhs, rhs, described, adds)
        ]
        for (program, thread), result, a, b, fields, keeps in zip(each, *given, strict=True):
            shape = _shape(fields, kinds)
            memory, issued = memory_of(machine), Issued(*_place(result, shape, shape.n))
            _check_columns(memory, program, issued.columns)
            left = (
                _rows_of(memory, program, a, shape)
                if in_tensor_memory
                else _from_shared(machine, a, thread, shape.m, shape.left, issued)
            )
            right = _from_shared(machine, b, thread, shape.n, shape.right, issued)
            target = memory.data[program][issued.rows, issued.columns]
            start = f32(target) if keeps else np.float32(0)
            total = (left @ right.T + start).astype(np.float32)
            memory.data[program][issued.rows, issued.columns] = bits32(total)
            memory.unseen[program][issued.rows, issued.columns] = True
            memory.issued[program].append(issued)

    return run


class _Side(NamedTuple):
    """An operand: name of its format, and whether its lines run along the outer axis."""

    kind: str
    is_turned: bool


class _Shape(NamedTuple):
    m: int
    n: int
    left: _Side
    right: _Side


def _shape(fields: int, kinds: tuple[str, ...]) -> _Shape:
    """What an instruction descriptor says."""
    known = 3 << 4 | 7 << 7 | 7 << 10 | 3 << 15 | 63 << 17 | 31 << 24
    formats = fields >> 7 & 7, fields >> 10 & 7
    m = 16 * (fields >> 24 & 31)
    if fields & ~known or fields >> 4 & 3 != 1 or max(formats) > 1 or m not in (64, 128):
        raise PtxError(f"Products like {fields:#x} are unknown.")
    left, right = (
        _Side(kinds[format], bool(fields >> bit & 1))
        for format, bit in zip(formats, (15, 16), strict=True)
    )
    return _Shape(m, 8 * (fields >> 17 & 63), left, right)


def _place(address: int, shape: _Shape, count: int) -> tuple[Any, slice]:
    """(lanes, columns) of the rows of A or D."""
    first, column = address >> 16, address & 0xFFFF
    # 64 rows may lie in the upper 16 lanes of each warp.
    if first not in ((0,) if shape.m == LANES else (0, 16)):
        raise PtxError(f"Results and operands from lane {first} on are unknown.")
    rows = np.arange(shape.m)
    rows = rows if shape.m == LANES else first + rows + 16 * (rows // 16)
    return rows, slice(column, column + count)


def _check_columns(memory: TensorMemory, program: int, columns: slice) -> None:
    if columns.stop > memory.allocated[program]:
        raise Fault(f"outside of the program's tensor memory: columns up to {columns.stop}")


def _rows_of(memory: TensorMemory, program: int, address: int, shape: _Shape) -> Any:
    """[M, K] of an A in tensor memory."""
    rows, columns = _place(address, shape, BYTES_OF_K // 4)
    _check_columns(memory, program, columns)
    if memory.unseen[program][rows, columns].any():
        raise Fault("race: a product in tensor memory that no thread has waited for")
    raw = memory.data[program][rows, columns]
    return elements(np.ascontiguousarray(raw), shape.left.kind).reshape(shape.m, -1)


def _from_shared(
    machine: Machine, descriptor: int, thread: int, outer: int, side: _Side, issued: Issued
) -> Any:
    """[outer, K] of an operand."""
    width, size = _WIDTHS.get(descriptor >> 61 & 7, 0), width_of(side.kind) // 8
    if not width or descriptor >> 49 & 15:
        raise PtxError(f"Descriptors like {descriptor:#x} are unknown.")
    stride, piece = (16 * (descriptor >> at & 0x3FFF) for at in (32, 16))
    lines, length = (BYTES_OF_K // size, outer * size) if side.is_turned else (outer, BYTES_OF_K)
    line, byte = np.arange(lines)[:, None], np.arange(length)
    place = line // 8 * stride + line % 8 * width + byte // width * piece + byte % width
    place = place + 16 * (descriptor & 0x3FFF)
    place = place ^ (((place >> 7) & (width // 16 - 1)) << 4)
    who = np.full(place.size, thread)
    at = machine.shared.place(place.reshape(-1).astype(np.uint64), 1, who)
    raw = machine.shared.load_for_product(at, who).reshape(lines, length)
    issued.places.append(at)
    values = elements(np.ascontiguousarray(raw).view(np.uint32), side.kind).reshape(lines, -1)
    return values.T if side.is_turned else values


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
            if memory.unseen[programs, row, column + j].any():
                raise Fault("race: a product in tensor memory that no thread has waited for")
            if stores:
                machine.progress()
                value = np.broadcast_to(reads[j](machine, lanes), whole.size)
                memory.data[programs, row, column + j] = value.reshape(whole.shape)
            else:
                found = memory.data[programs, row, column + j]
                writes[j](machine, lanes, found.reshape(-1))

    return run
