"""Instructions -> steps of the machine: what each does, its guard, and where a branch goes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial

from tests.ptx import accesses, matrices, tensor_memory, warp, warpgroup
from tests.ptx.numerics import UNSIGNED
from tests.ptx.opcodes import operation
from tests.ptx.operands import Execute, Lanes, Machine, reader, writer
from tests.ptx.parser import Immediate, Instruction, Kernel, PtxError, Symbol, Vector, parse


@dataclass(frozen=True)
class Step:
    """An instruction, decoded. target: of a branch; control: "branch", "end", "barrier", or ""."""

    text: str
    guard: tuple[str, bool] | None
    execute: Execute
    control: str = ""
    target: int = -1


@dataclass(frozen=True)
class Code:
    kernel: Kernel
    steps: tuple[Step, ...]


@lru_cache(256)
def code_of(ptx: str) -> Code:
    """Parse and decode a kernel. Raises PtxError for an instruction that is not known."""
    kernel = parse(ptx)
    return Code(kernel, tuple(_decoded(each, kernel) for each in kernel.instructions))


def _decoded(instruction: Instruction, kernel: Kernel) -> Step:
    name, _, rest = instruction.opcode.partition(".")
    guard = instruction.guard and (instruction.guard[0].name, instruction.guard[1])
    step = partial(Step, instruction.text, guard)
    if name == "bra":
        [label] = instruction.operands
        assert isinstance(label, Symbol)
        return step(_nothing, "branch", kernel.labels[label.name])
    if name in ("ret", "exit"):
        return step(_nothing, "end")
    if name in ("bar", "barrier") and rest.startswith("sync"):
        if [each for each in instruction.operands if each != Immediate(0)]:
            raise PtxError(f"A barrier of some threads is not known: {instruction.text}")
        return step(_nothing, "barrier")
    try:
        return step(_execution(instruction, kernel))
    except PtxError as error:
        raise PtxError(f"{error} In: {instruction.text}") from error


def _nothing(machine: Machine, lanes: Lanes) -> None:
    pass


def _execution(instruction: Instruction, kernel: Kernel) -> Execute:
    kinds = (accesses, warp, matrices, warpgroup, tensor_memory)
    for decode in (each.decode for each in kinds):
        if (execute := decode(instruction, kernel)) is not None:
            return execute
    if instruction.opcode.split(".")[0] == "mov":
        return _move(instruction, kernel)
    destination, *sources = instruction.operands
    found = operation(instruction.opcode, len(sources))
    if len(sources) != len(found.sources):
        raise PtxError("Another number of operands was expected.")
    reads = [reader(each, bits, kernel) for each, bits in zip(sources, found.sources, strict=True)]
    compute = found.compute
    if isinstance(destination, Vector):
        writes = [
            writer(each, bits) for each, bits in zip(destination.parts, found.results, strict=True)
        ]

        def several(machine: Machine, lanes: Lanes) -> None:
            results = compute(*(read(machine, lanes) for read in reads))
            for write, result in zip(writes, results, strict=True):
                write(machine, lanes, result)

        return several
    write = writer(destination, found.results[0])

    def one(machine: Machine, lanes: Lanes) -> None:
        write(machine, lanes, compute(*(read(machine, lanes) for read in reads)))

    return one


def _move(instruction: Instruction, kernel: Kernel) -> Execute:
    """mov, also between a register and its parts."""
    destination, source = instruction.operands
    kind = instruction.opcode.split(".")[-1]
    bits = 1 if kind == "pred" else int(kind[1:])
    if isinstance(source, Vector):
        width = bits // len(source.parts)
        reads = [reader(each, width, kernel) for each in source.parts]
        write = writer(destination, bits)

        def join(machine: Machine, lanes: Lanes) -> None:
            dtype, joined = UNSIGNED[bits], UNSIGNED[bits](0)
            for place, read in enumerate(reads):
                joined = joined | (read(machine, lanes).astype(dtype) << dtype(place * width))
            write(machine, lanes, joined)

        return join
    read = reader(source, bits, kernel)
    if isinstance(destination, Vector):
        width = bits // len(destination.parts)
        writes = [writer(each, width) for each in destination.parts]

        def split(machine: Machine, lanes: Lanes) -> None:
            whole = read(machine, lanes)
            for place, write in enumerate(writes):
                part = whole >> whole.dtype.type(place * width)
                write(machine, lanes, part.astype(UNSIGNED[width]))

        return split
    write = writer(destination, bits)
    return lambda machine, lanes: write(machine, lanes, read(machine, lanes))
