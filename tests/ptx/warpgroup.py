"""Products of a warpgroup: wgmma.mma_async, from shared memory, of four warps at once (sm_90).

    D[64, n] = A[64, k] B[k, n] + (D if scale-d else 0)      k: 32 bytes of elements

D: warp w of the group has rows 16 w to 16 w + 15; register i of lane l, with g = l // 4, t = l % 4:
row g + 8 ((i // 2) % 2), column 8 (i // 4) + 2 t + i % 2. A in registers is that of `mma`, warp by
warp. A and B in shared memory are named by a descriptor:

    bits 0-13    address / 16        bits 32-45   bytes between groups of 8 lines / 16
    bits 62-63   swizzle: 1: lines of 128 bytes, 2: 64, 3: 32

An element lies at address + (line // 8) * stride + (line % 8) * width + byte, where a line is a row
of A or a column of B, and bytes run along k; with tnsp-b = 1 a line is a row of B and bytes run along
n. Then bits 4 to 6 of the address are XORed with bits 7 to 9, as many of them as the swizzle has
(PTX ISA 9.7.15.5, "Asynchronous Warpgroup Level Matrix Instructions", and CUTLASS' Swizzle<B, 4, 3>).

The product is there when the instruction is issued, not when its group is waited for: a missing
wait is not seen. Its sum is rounded as in `matrices`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.ptx.matrices import elements, fragment, width_of
from tests.ptx.memory import Fault
from tests.ptx.numerics import bits32, f32
from tests.ptx.operands import Execute, Lanes, Machine, reader, writer
from tests.ptx.parser import Immediate, Instruction, Kernel, PtxError, Register, Vector
from tests.ptx.warp import LANE, warps_of

_SHAPE = re.compile(r"m64n(\d+)k(\d+)")
_WIDTHS = {1: 128, 2: 64, 3: 32}  # swizzle -> bytes of a line


def decode(instruction: Instruction, kernel: Kernel) -> Execute | None:
    name, *words = instruction.opcode.split(".")
    if name != "wgmma":
        return None
    if words[0] in ("fence", "commit_group", "wait_group"):
        return _nothing
    shape = next(filter(None, map(_SHAPE.fullmatch, words)), None)
    if words[0] != "mma_async" or shape is None or words[-3] != "f32":
        raise PtxError("This product is not known.")
    return _product(instruction, int(shape[1]), int(shape[2]), words[-2:], kernel)


def _nothing(machine: Machine, lanes: Lanes) -> None:
    pass


def _groups(machine: Machine, lanes: Lanes) -> int:
    """Number of warpgroups. Faults if a warp of one is missing."""
    whole = warps_of(machine, lanes)[:, 0] // 32
    if len(whole) % 4 or (whole % 4 != np.tile(np.arange(4), len(whole) // 4)).any():
        raise Fault("warp: not all warps of a group reach its product")
    return len(whole) // 4


def _product(instruction: Instruction, n: int, k: int, kinds: list[str], kernel: Kernel) -> Execute:
    result, lhs, rhs, accumulates, *signs = instruction.operands
    if not isinstance(result, Vector) or [each for each in signs[:2] if each != Immediate(1)]:
        raise PtxError("Only products that are not negated are known.")
    writes = [writer(each, 32) for each in result.parts]
    starts = [reader(each, 32, kernel) for each in result.parts]
    adds = reader(accumulates, 1, kernel)
    turned = [each == Immediate(1) for each in signs[2:]]
    left = (
        _from_registers(lhs, k, kinds[0], kernel)
        if isinstance(lhs, Vector)
        else _from_memory(lhs, 64, k, kinds[0], turned[:-1] == [True], kernel)
    )
    right = _from_memory(rhs, n, k, kinds[1], turned[-1:] == [True], kernel)
    i = np.arange(n // 2)
    rows = LANE[:, None] // 4 + 8 * (i // 2 % 2)
    columns = 8 * (i // 4) + 2 * (LANE[:, None] % 4) + i % 2

    def run(machine: Machine, lanes: Lanes) -> None:
        groups = _groups(machine, lanes)
        product = left(machine, lanes, groups) @ right(machine, lanes, groups).transpose(0, 2, 1)
        mine = product.reshape(-1, 16, n)[:, rows, columns].reshape(-1, n // 2)
        keeps = np.broadcast_to(adds(machine, lanes), len(mine))
        for place, (write, start) in enumerate(zip(writes, starts, strict=True)):
            before = np.where(keeps, f32(start(machine, lanes)), np.float32(0))
            write(machine, lanes, bits32((mine[:, place] + before).astype(np.float32)))

    return run


Matrices = Callable[[Machine, Lanes, int], Any]


def _from_registers(operand: Vector, k: int, kind: str, kernel: Kernel) -> Matrices:
    """A of each group [groups, 64, k]."""
    reads = [reader(each, 32, kernel) for each in operand.parts]
    row, column = fragment(True, width_of(kind), len(reads))

    def found(machine: Machine, lanes: Lanes, groups: int) -> Any:
        words = np.stack([read(machine, lanes) for read in reads], 1).reshape(-1, 32, len(reads))
        matrix = np.zeros((4 * groups, 16, k))
        matrix[:, row, column] = elements(words, kind)
        return matrix.reshape(groups, 64, k)

    return found


def _from_memory(
    operand: Any, outer: int, k: int, kind: str, is_turned: bool, kernel: Kernel
) -> Matrices:
    """A, or the transpose of B, of each group [groups, outer, k]."""
    if not isinstance(operand, Register):
        raise PtxError(f"{operand} is no descriptor.")
    read, size = reader(operand, 64, kernel), width_of(kind) // 8
    lines, length = (k, outer * size) if is_turned else (outer, k * size)
    line, byte = np.arange(lines)[:, None], np.arange(length)

    def found(machine: Machine, lanes: Lanes, groups: int) -> Any:
        given = np.broadcast_to(read(machine, lanes), 128 * groups).reshape(groups, 128)
        if (given != given[:, :1]).any():
            raise Fault("warp: descriptors differ within a group")
        threads = machine.threads_of(lanes).reshape(groups, 128)[:, 0]
        return np.stack([one(machine, *each) for each in zip(given[:, 0], threads, strict=True)])

    def one(machine: Machine, descriptor: Any, thread: int) -> Any:
        fields = int(descriptor)
        width = _WIDTHS.get(fields >> 62 & 3, 0)
        if length > width or fields >> 49 & 7:
            raise PtxError(f"Descriptors like {fields:#x} are unknown.")
        stride = 16 * (fields >> 32 & 0x3FFF)
        place = 16 * (fields & 0x3FFF) + line // 8 * stride + line % 8 * width + byte
        place = place ^ (((place >> 7) & (width // 16 - 1)) << 4)
        address = place.reshape(-1).astype(np.uint64)
        who = np.full(len(address), thread)
        at = machine.shared.place(address, 1, who)
        raw = machine.shared.load(at, who, asynchronous=True).reshape(lines, length)
        values = elements(np.ascontiguousarray(raw).view(np.uint32), kind).reshape(lines, -1)
        return values.T if is_turned else values

    return found
