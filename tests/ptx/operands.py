"""Operands of an instruction, as functions that read and write the registers of many threads.

An instruction is decoded once, into a function of the machine and the lanes that run it. Operands
are resolved then: a register to its name, a constant to an array of one element.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.ptx.numerics import UNSIGNED
from tests.ptx.parser import Address, Immediate, Kernel, Operand, PtxError, Register, Symbol

if TYPE_CHECKING:
    from tests.ptx.machine import Machine
else:
    Machine = Any

Lanes = Any  # indices of threads of the machine, ascending, or None: all of them
Execute = Callable[[Machine, Lanes], None]
Read = Callable[[Machine, Lanes], Any]
Write = Callable[[Machine, Lanes, Any], None]


def reader(operand: Operand, bits: int, kernel: Kernel) -> Read:
    """A function that returns an operand's raw bits: [lanes], or [1] for a constant."""
    dtype = UNSIGNED[bits]
    if isinstance(operand, Register):
        name = operand.name
        if operand.bits < bits:
            raise PtxError(f"{name} has {operand.bits} bits, not {bits}.")

        def register(machine: Machine, lanes: Lanes) -> Any:
            whole = machine.registers[name]
            return whole if lanes is None else whole[lanes]

        if operand.bits == bits:
            return register
        return lambda machine, lanes: register(machine, lanes).astype(dtype)
    if isinstance(operand, Immediate):
        constant = np.array([operand.value & ((1 << bits) - 1)], np.uint64).astype(dtype)
        return lambda machine, lanes: constant
    if isinstance(operand, Symbol):
        if operand.name in kernel.shared:
            place = np.array([kernel.shared[operand.name][0]], dtype)
            return lambda machine, lanes: place
        name = operand.name

        def special(machine: Machine, lanes: Lanes) -> Any:
            whole = machine.special(name)
            return (whole if lanes is None else whole[lanes]).astype(dtype)

        if not name.startswith("%"):
            raise PtxError(f"The name {name} is not known here.")
        return special
    raise PtxError(f"{operand} cannot be read as a number.")


def writer(operand: Operand, bits: int) -> Write:
    """A function that writes an operand. Signed values are extended to the register's width."""
    if operand == Symbol("_"):
        return lambda machine, lanes, value: None
    if not isinstance(operand, Register) or operand.bits < bits:
        raise PtxError(f"{operand} cannot take {bits} bits.")
    name = operand.name

    def write(machine: Machine, lanes: Lanes, value: Any) -> None:
        machine.registers[name][slice(None) if lanes is None else lanes] = value

    return write


def address_reader(operand: Any, kernel: Kernel) -> Read:
    """Addresses [lanes] uint64."""
    if not isinstance(operand, Address):
        raise PtxError(f"{operand} is no address.")
    base: Any = operand.base
    bits = getattr(base, "bits", 64)
    read, offset = reader(base, bits, kernel), np.int64(operand.offset)

    def addresses(machine: Machine, lanes: Lanes) -> Any:
        found = (read(machine, lanes).astype(np.int64) + offset).astype(np.uint64)
        count = machine.lanes if lanes is None else len(lanes)
        return np.broadcast_to(found, (count,))

    return addresses
