"""Instructions of a warp: shuffles, reductions, votes, and matrices of 8 x 8 in shared memory.

All 32 lanes must be there. A shuffle reads what the other lanes had before it.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from tests.ptx.memory import Fault
from tests.ptx.numerics import SIGNED
from tests.ptx.opcodes import operation
from tests.ptx.operands import Execute, Lanes, Machine, address_reader, reader, writer
from tests.ptx.parser import Immediate, Instruction, Kernel, PtxError, Vector

LANE = np.arange(32)
ALL = Immediate(-1), Immediate(0xFFFFFFFF)


def decode(instruction: Instruction, kernel: Kernel) -> Execute | None:
    name, *words = instruction.opcode.split(".")
    if name == "shfl":
        return _shuffle(instruction, words, kernel)
    if name == "redux":
        return _reduction(instruction, words, kernel)
    if name == "bar" and words[0] == "warp":
        return _warp_barrier
    if name in ("ldmatrix", "stmatrix"):
        return _matrix(instruction, words, name == "stmatrix", kernel)
    if name == "elect":
        return _elect(instruction)
    return None


def warps_of(machine: Machine, lanes: Lanes) -> Any:
    """Lanes [warps, 32]. Faults if some lanes of a warp are missing."""
    lanes = np.arange(machine.lanes) if lanes is None else lanes
    whole = lanes.reshape(-1, 32) if len(lanes) % 32 == 0 else None
    if whole is None or (whole % 32 != LANE).any() or (np.diff(whole, axis=1) != 1).any():
        raise Fault("warp: not all of its lanes reach an instruction of the warp")
    return whole


def _sources(source: Any, mode: str, by: Any, clamp: Any) -> Any:
    """Lane that each lane reads [32], by PTX ISA 9.7.9.6."""
    segment, limit = (clamp >> 8) & 0x1F, clamp & 0x1F
    low = LANE & segment
    high = low | (limit & ~segment)
    named = {"up": LANE - by, "down": LANE + by, "bfly": LANE ^ by, "idx": low | (by & ~segment)}
    found = named[mode]
    # The clamp of `up` is the lowest lane, of the others the highest.
    outside = found < high if mode == "up" else found > high
    return np.where(outside, LANE, found)


def _shuffle(instruction: Instruction, words: list[str], kernel: Kernel) -> Execute:
    destination, source, by, clamp, mask = instruction.operands
    if isinstance(destination, Vector) or mask not in ALL or not isinstance(clamp, Immediate):
        raise PtxError("Only shuffles of all lanes, without a predicate, are known.")
    mode, limit = words[1], clamp.value
    read, amount, write = (
        reader(source, 32, kernel),
        reader(by, 32, kernel),
        writer(destination, 32),
    )

    def shuffle(machine: Machine, lanes: Lanes) -> None:
        whole = warps_of(machine, lanes)
        values = np.broadcast_to(read(machine, lanes), whole.size).reshape(whole.shape)
        steps = np.broadcast_to(amount(machine, lanes), whole.size).reshape(whole.shape)
        chosen = _sources(LANE, mode, steps.astype(np.int64) & 31, limit)
        write(machine, lanes, np.take_along_axis(values, chosen, 1).reshape(-1))

    return shuffle


def _reduction(instruction: Instruction, words: list[str], kernel: Kernel) -> Execute:
    destination, source, mask = instruction.operands
    read, write = reader(source, 32, kernel), writer(destination, 32)
    members = reader(mask, 32, kernel)
    kind, name = words[-1], words[1]
    # Of floats by the instruction of two numbers, so that NaN and zeros are its.
    of_two = operation(".".join([name, *words[2:]])).compute if kind == "f32" else None
    function: Any = {
        "max": np.maximum, "min": np.minimum, "add": np.add, "and": np.bitwise_and,
        "or": np.bitwise_or, "xor": np.bitwise_xor,
    }[name]  # fmt: skip

    def reduce(machine: Machine, lanes: Lanes) -> None:
        whole = warps_of(machine, lanes)
        if (members(machine, lanes) != 0xFFFFFFFF).any():
            raise Fault("warp: a reduction of some lanes is not known")
        values = np.broadcast_to(read(machine, lanes), whole.size).reshape(whole.shape)
        if of_two is not None:
            found = values[:, 0]
            for lane in range(1, 32):
                found = of_two(found, values[:, lane])
        elif kind[0] == "s":
            found = function.reduce(values.view(SIGNED[32]), axis=1, dtype=np.int32)
        else:
            found = function.reduce(values, axis=1, dtype=np.uint32)
        write(machine, lanes, np.repeat(found, 32))

    return reduce


def _warp_barrier(machine: Machine, lanes: Lanes) -> None:
    for warp in warps_of(machine, lanes)[:, 0]:
        machine.memory.order.warp_barrier(int(machine.thread[warp]) // 32)


def _elect(instruction: Instruction) -> Execute:
    """The lowest lane, and a predicate that is true there."""
    [both, mask] = instruction.operands
    if not isinstance(both, Vector) or mask not in ALL:
        raise PtxError("An election among some lanes is not known.")
    number, is_leader = writer(both.parts[0], 32), writer(both.parts[1], 1)

    def elect(machine: Machine, lanes: Lanes) -> None:
        whole = warps_of(machine, lanes)
        number(machine, lanes, np.uint32(0))
        is_leader(machine, lanes, (whole % 32 == 0).reshape(-1))

    return elect


def _matrix(instruction: Instruction, words: list[str], stores: bool, kernel: Kernel) -> Execute:
    """Matrices of 8 x 8 16-bit elements, rows of 16 bytes at the addresses of lanes 8 n to 8 n + 7.

    Lane l has the elements (l // 4, 2 (l % 4)) and the next one; with .trans of the transposed matrix.
    """
    first, second = instruction.operands
    vector, place = (second, first) if stores else (first, second)
    if not isinstance(vector, Vector) or words[2] != "m8n8" or words[-1] != "b16":
        raise PtxError("Only matrices of 8 x 8 16-bit elements are known.")
    count = int(next(each[1] for each in words if re.fullmatch("x[124]", each)))
    transposes = "trans" in words
    addresses = address_reader(place, kernel)
    reads = [reader(each, 32, kernel) for each in vector.parts] if stores else []
    writes = [] if stores else [writer(each, 32) for each in vector.parts]
    # Byte of each lane's four within its matrix: row and byte of the row.
    row, column = (LANE // 4)[:, None], 4 * (LANE % 4)[:, None] + np.arange(4)
    if transposes:
        row, column = (
            2 * (LANE % 4)[:, None] + np.arange(4) // 2,
            2 * (LANE // 4)[:, None] + (np.arange(4) % 2),
        )
    row, column = (np.broadcast_to(each, (32, 4)) for each in (row, column))

    def run(machine: Machine, lanes: Lanes) -> None:
        whole = warps_of(machine, lanes)
        threads = machine.threads_of(lanes)
        given = addresses(machine, lanes).reshape(whole.shape)
        for n in range(count):
            starts = given[:, 8 * n : 8 * n + 8]  # one row each
            owners = threads.reshape(whole.shape)
            lines = machine.shared.place(starts.reshape(-1), 16, owners[:, :8].reshape(-1)).reshape(
                -1, 8, 16
            )
            at = lines[:, row, column].reshape(-1, 4)
            if stores:
                machine.progress()
                raw = np.ascontiguousarray(reads[n](machine, lanes)).view(np.uint8).reshape(-1, 4)
                machine.shared.store(at, raw, threads)
            else:
                found = np.ascontiguousarray(machine.shared.load(at, threads)).view(np.uint32)
                writes[n](machine, lanes, found[:, 0])

    return run
