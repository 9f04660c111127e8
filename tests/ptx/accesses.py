"""Loads, stores, atomics and asynchronous copies.

Atomics of one instruction run thread by thread, in any order. An acq_rel atomic publishes and takes
in (`order`). A copy (cp.async) arrives as late as its wait allows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.ptx.memory import Fault
from tests.ptx.numerics import SIGNED, UNSIGNED
from tests.ptx.operands import Execute, Lanes, Machine, address_reader, reader, writer
from tests.ptx.parser import Address, Immediate, Instruction, Kernel, PtxError, Symbol, Vector

# Loads that do not come from the first-level cache, and may see what other programs stored.
UNCACHED = {"cg", "cv", "volatile", "relaxed", "acquire"}


def decode(instruction: Instruction, kernel: Kernel) -> Execute | None:
    name, *words = instruction.opcode.split(".")
    if name == "ld" and words[0] == "param":
        return _load_parameter(instruction, words)
    if name in ("ld", "st"):
        space = words[0].split("::")[0]
        if space not in ("global", "shared"):
            raise PtxError(f"Accesses to {words[0]} are not known here.")
        return {"ld": _load, "st": _store}[name](instruction, words, space == "shared", kernel)
    if name in ("atom", "red"):
        return _atomic(instruction, name, words, kernel)
    if name == "cp" and words[0] == "async":
        return _copy(instruction, words[1:], kernel)
    if name == "fence" and words[0] == "proxy":
        return lambda machine, lanes: machine.shared.fence(machine.threads_of(lanes))
    return None


def _parts(operand: Any) -> tuple[Any, ...]:
    return operand.parts if isinstance(operand, Vector) else (operand,)


def _shape(words: list[str], operand: Any) -> tuple[int, tuple[Any, ...]]:
    """Bytes of an element, and the registers of the access."""
    count = next((int(each[1]) for each in words if re.fullmatch("v[248]", each)), 1)
    parts = _parts(operand)
    if len(parts) != count:
        raise PtxError("The vector has another length.")
    return int(words[-1][1:]) // 8, parts


def _load_parameter(instruction: Instruction, words: list[str]) -> Execute:
    destination, place = instruction.operands
    bits = int(words[-1][1:])
    write = writer(destination, bits)
    if not isinstance(place, Address) or not isinstance(place.base, Symbol):
        raise PtxError(f"{place} is no parameter.")
    name = place.base.name

    def load(machine: Machine, lanes: Lanes) -> None:
        value = machine.arguments[name] & ((1 << bits) - 1)
        write(machine, lanes, UNSIGNED[bits](value))

    return load


def _load(instruction: Instruction, words: list[str], shared: bool, kernel: Kernel) -> Execute:
    destination, place = instruction.operands[:2]
    size, parts = _shape(words, destination)
    addresses = address_reader(place, kernel)
    writes = [writer(each, 8 * size) for each in parts]
    count, cached, acquires = len(parts), not UNCACHED.intersection(words), "acquire" in words

    def load(machine: Machine, lanes: Lanes) -> None:
        threads, address = machine.threads_of(lanes), addresses(machine, lanes)
        if shared:
            at = machine.shared.place(address, size * count, threads)
            values = machine.shared.load(at, threads).view(UNSIGNED[8 * size])
        else:
            if acquires:
                where = machine.memory.place(address, size, "load")
                for each, thread in zip(where.tolist(), threads.tolist(), strict=True):
                    machine.memory.order.acquire(each, thread)
                values = machine.memory.data[where[:, None] + np.arange(size)].view(
                    UNSIGNED[8 * size]
                )
            else:
                values = machine.memory.load(address, size, count, threads, cached)
        for column, write in enumerate(writes):
            write(machine, lanes, values[:, column])

    return load


def _store(instruction: Instruction, words: list[str], shared: bool, kernel: Kernel) -> Execute:
    place, source = instruction.operands[:2]
    size, parts = _shape(words, source)
    addresses = address_reader(place, kernel)
    reads = [reader(each, 8 * size, kernel) for each in parts]

    def store(machine: Machine, lanes: Lanes) -> None:
        machine.progress()
        threads, address = machine.threads_of(lanes), addresses(machine, lanes)
        columns = [np.broadcast_to(read(machine, lanes), address.shape) for read in reads]
        values = np.stack(columns, 1)
        if shared:
            at = machine.shared.place(address, size * len(parts), threads)
            raw = np.ascontiguousarray(values).view(np.uint8).reshape(at.shape)
            machine.shared.store(at, raw, threads)
        else:
            machine.memory.store(address, values, threads)

    return store


def _updates(kind: str) -> dict[str, Callable[[int, int], int]]:
    bits = int(kind[1:])
    signed = SIGNED[bits] if kind[0] == "s" else UNSIGNED[bits]

    def number(x: int) -> int:
        return int(UNSIGNED[bits](x).view(signed))

    return {
        "add": lambda old, new: (old + new) & ((1 << bits) - 1),
        "exch": lambda old, new: new,
        "and": lambda old, new: old & new,
        "or": lambda old, new: old | new,
        "max": lambda old, new: max(old, new, key=number),
        "min": lambda old, new: min(old, new, key=number),
    }


def _atomic(instruction: Instruction, name: str, words: list[str], kernel: Kernel) -> Execute:
    kind = words[-1]
    bits = int(kind[1:])
    if (
        words[0] != "global"
        or kind[0] not in "bus"
        or not (known := set(_updates(kind)) & {*words})
    ):
        raise PtxError("This atomic is not known.")
    *destination, place, source = instruction.operands
    update = _updates(kind)[known.pop()]
    addresses, read = address_reader(place, kernel), reader(source, bits, kernel)
    write = writer(destination[0], bits) if name == "atom" else None
    acquires = bool({"acquire", "acq_rel"} & set(words))
    releases = bool({"release", "acq_rel"} & set(words))

    def run(machine: Machine, lanes: Lanes) -> None:
        machine.progress()
        memory, threads = machine.memory, machine.threads_of(lanes)
        at = memory.place(addresses(machine, lanes), bits // 8, "atomic")
        new = np.broadcast_to(read(machine, lanes), at.shape)
        old = np.zeros(len(at), UNSIGNED[bits])
        for n in machine.random.permutation(len(at)):
            place = slice(int(at[n]), int(at[n]) + bits // 8)
            cell = memory.data[place].view(UNSIGNED[bits])
            old[n] = cell[0]
            cell[0] = update(int(cell[0]), int(new[n]))
            memory.mark(place, threads[n])
            if releases:
                memory.release(place.start, int(threads[n]))
            if acquires:
                memory.order.acquire(place.start, int(threads[n]))
        if write is not None:
            write(machine, lanes, old)

    return run


# --- asynchronous copies


@dataclass
class Pending:
    """A copy on its way: lanes [n], places in shared memory and bytes [n, size], number of its group."""

    lanes: Any
    at: Any
    raw: Any
    group: Any


def _copy(instruction: Instruction, words: list[str], kernel: Kernel) -> Execute:
    if words[0] == "commit_group":
        return _commit
    if words[0] in ("wait_group", "wait_all"):
        [left] = instruction.operands or (Immediate(-1),)
        assert isinstance(left, Immediate)
        return lambda machine, lanes: _arrive(machine, lanes, left.value)
    if words[1:] != ["shared", "global"]:
        raise PtxError("This copy is not known.")
    to, source, size, *given = instruction.operands
    assert isinstance(size, Immediate)
    target, origin = address_reader(to, kernel), address_reader(source, kernel)
    # Bytes to read; the rest up to `size` becomes zero.
    length = reader(given[0], 32, kernel) if given else reader(size, 32, kernel)
    everything = np.arange(size.value)

    def copy(machine: Machine, lanes: Lanes) -> None:
        threads = machine.threads_of(lanes)
        at = machine.shared.place(target(machine, lanes), size.value, threads)
        wanted = np.broadcast_to(length(machine, lanes), (len(at),))
        if not np.isin(wanted, (0, size.value)).all():
            raise Fault("a copy of a part is not known")
        raw, reads = np.zeros(at.shape, np.uint8), np.flatnonzero(wanted)
        if len(reads):
            address = origin(machine, lanes)[reads]
            place = machine.memory.place(address, size.value, "copy")[:, None] + everything
            machine.memory.check_load(place, threads[reads], cached=False)
            raw[reads] = machine.memory.data[place]
        mine = np.arange(machine.lanes) if lanes is None else lanes
        machine.pending.append(Pending(mine, at, raw, _groups(machine)[mine]))

    return copy


def _groups(machine: Machine) -> Any:
    """How many groups each lane has committed."""
    return machine.registers.setdefault("groups of copies", np.zeros(machine.lanes, np.int64))


def _commit(machine: Machine, lanes: Lanes) -> None:
    _groups(machine)[slice(None) if lanes is None else lanes] += 1


def _arrive(machine: Machine, lanes: Lanes, left: int) -> None:
    """Finish the copies of all groups but the latest `left` ones; -1: of open groups as well."""
    active = np.zeros(machine.lanes, bool)
    active[slice(None) if lanes is None else lanes] = True
    machine.progress()
    for each in machine.pending:
        done = active[each.lanes] & (each.group < _groups(machine)[each.lanes] - left)
        machine.shared.store(each.at[done], each.raw[done], machine.thread[each.lanes[done]])
        each.lanes, each.at = each.lanes[~done], each.at[~done]
        each.raw, each.group = each.raw[~done], each.group[~done]
    machine.pending = [each for each in machine.pending if len(each.lanes)]
