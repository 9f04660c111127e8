"""Products of matrices in a warp: mma.sync, on fragments in registers.

    D[16, 8] = A[16, k] B[k, 8] + C[16, 8]        A by rows, B by columns

Lane l holds, with g = l // 4 and t = l % 4, in its n-th register of elements of `bits` bits (per = 32
/ bits of them, j the n-th register, e the element in it):

    A   row g + 8 (j % 2), column per t + e + 4 per (j // 2)
    B   row per t + e + 4 per j, column g
    C   registers 0, 1: row g, columns 2 t and 2 t + 1; 2, 3: row g + 8      float32 or int32

(PTX ISA 9.7.14.5, "Matrix Fragments".) Products are exact; their sum with C is formed in float64 and
rounded to float32 once. A GPU sums in an order and a width of its own, so kernels are compared
within a bound, or on numbers whose sums are exact.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from tests.ptx.numerics import FLOATS, FP8, UNSIGNED, bits32, f32, fp8_decoded
from tests.ptx.operands import Execute, Lanes, Machine, reader, writer
from tests.ptx.parser import Instruction, Kernel, PtxError, Vector
from tests.ptx.warp import LANE, warps_of

_WIDTHS = {"bf16": 16, "f16": 16, "e4m3": 8, "e5m2": 8, "s8": 8, "u8": 8, "s4": 4, "u4": 4}
_MMA = re.compile(r"m16n8k(\d+)")


def decode(instruction: Instruction, kernel: Kernel) -> Execute | None:
    name, *words = instruction.opcode.split(".")
    if name != "mma":
        return None
    shape = next(filter(None, map(_MMA.fullmatch, words)), None)
    kinds = words[-4:]
    if shape is None or kinds[1] not in _WIDTHS or kinds[2] not in _WIDTHS:
        raise PtxError("This product is not known.")
    return _product(instruction, int(shape[1]), kinds, kernel)


def width_of(kind: str) -> int:
    """Bits of an element. Raises PtxError for one that is not known."""
    if kind not in _WIDTHS:
        raise PtxError(f"Products of {kind} are unknown.")
    return _WIDTHS[kind]


def elements(words: Any, kind: str) -> Any:
    """Values of registers [..., n] -> [..., n, per], float64; the first element is in the low bits."""
    bits = _WIDTHS[kind]
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    parts = (words[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    if kind in FLOATS:
        return FLOATS[kind].decode(parts.astype(np.uint16)).astype(np.float64)
    if kind in FP8:
        return fp8_decoded(kind, parts.astype(np.uint8)).astype(np.float64)
    values = parts.astype(np.float64)
    return (
        np.where(parts >> np.uint32(bits - 1), values - 2**bits, values)
        if kind[0] == "s"
        else values
    )


def fragment(is_lhs: bool, bits: int, registers: int) -> tuple[Any, Any]:
    """(row, column) of each element [32, registers, per], see the module."""
    per = 32 // bits
    lane, j, e = LANE[:, None, None], np.arange(registers)[None, :, None], np.arange(per)
    g, t = lane // 4, lane % 4
    if is_lhs:
        return np.broadcast_arrays(g + 8 * (j % 2), per * t + e + 4 * per * (j // 2))
    return np.broadcast_arrays(per * t + e + 4 * per * j, g)


def _product(instruction: Instruction, k: int, kinds: list[str], kernel: Kernel) -> Execute:
    operands = [each.parts for each in instruction.operands if isinstance(each, Vector)]
    if len(operands) != 4:
        raise PtxError("A product has four vectors.")
    writes = [writer(each, 32) for each in operands[0]]
    lhs, rhs, start = ([reader(each, 32, kernel) for each in part] for part in operands[1:])
    sides = [
        fragment(place == 0, _WIDTHS[kinds[1 + place]], len(part))
        for place, part in enumerate((lhs, rhs))
    ]
    sizes = ((16, k), (k, 8))
    for (row, column), (rows, columns) in zip(sides, sizes, strict=True):
        if (row.max() + 1, column.max() + 1) != (rows, columns):
            raise PtxError("The fragments have another shape.")
    is_float = kinds[0] == "f32"
    rows = LANE[:, None] // 4 + 8 * (np.arange(4) // 2)
    columns = 2 * (LANE[:, None] % 4) + np.arange(4) % 2

    def run(machine: Machine, lanes: Lanes) -> None:
        warps = len(warps_of(machine, lanes))

        def gathered(reads: list[Any]) -> Any:
            found = [np.broadcast_to(read(machine, lanes), 32 * warps) for read in reads]
            return np.stack(found, 1).reshape(warps, 32, len(reads))

        matrices = []
        for reads, kind, place, size in zip((lhs, rhs), kinds[1:3], sides, sizes, strict=True):
            matrix = np.zeros((warps, *size))
            matrix[:, place[0], place[1]] = elements(gathered(reads), kind)
            matrices.append(matrix)
        product = matrices[0] @ matrices[1]
        added = gathered(start)
        if is_float:
            total = bits32((product[:, rows, columns] + f32(added)).astype(np.float32))
        else:
            total = (product[:, rows, columns].astype(np.int64) + added.view(np.int32)).astype(
                UNSIGNED[32]
            )
        for n, write in enumerate(writes):
            write(machine, lanes, total[:, :, n].reshape(-1))

    return run
