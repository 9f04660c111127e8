"""PTX text -> instructions with resolved operands, as `machine` runs them.

    @%p2 ld.global.v4.b32 { %r30, %r31, %r32, %r33 }, [ %rd28 + 16 ];
    Instruction(opcode="ld.global.v4.b32", guard=(%p2, True), operands=(Vector(...), Address(%rd28, 16)))

Reads one kernel of a file that Triton or NVRTC wrote. Directives for debuggers are skipped. Scopes
of inline assembly are flattened: a register that two scopes declare is one register, which is
refused if they declare it with different widths.

Source of the grammar: PTX ISA 9.0, chapters 4 (syntax), 5 (state spaces) and 9 (instructions).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import NamedTuple


class PtxError(Exception):
    """The text, or what it does, is not allowed; or this interpreter does not know it."""


class Register(NamedTuple):
    """name with its percent sign; bits: 1 for a predicate."""

    name: str
    bits: int


class Immediate(NamedTuple):
    """A constant, as an integer of any sign. Floats are their bits."""

    value: int


class Symbol(NamedTuple):
    """A label, a parameter, a special register (%tid.x), a variable in shared memory, or `_`."""

    name: str


class Address(NamedTuple):
    """[base + offset], offset in bytes."""

    base: Register | Symbol | Immediate
    offset: int


class Vector(NamedTuple):
    """{a, b, ...} or a|b."""

    parts: tuple[Register | Immediate | Symbol, ...]


Operand = Register | Immediate | Symbol | Address | Vector


@dataclass(frozen=True)
class Instruction:
    """One statement.

    guard  (predicate, the value under which the instruction runs), or None
    text   the statement, for messages
    """

    opcode: str
    operands: tuple[Operand, ...]
    guard: tuple[Register, bool] | None
    text: str


@dataclass(frozen=True)
class Kernel:
    """labels: name -> index of the next instruction; parameters: (name, bits), in order.

    shared  variables in shared memory: name -> (offset, bytes); 0 bytes: as many as the launch asks for
    """

    name: str
    parameters: tuple[tuple[str, int], ...]
    instructions: tuple[Instruction, ...]
    labels: dict[str, int]
    shared: dict[str, tuple[int, int]]


_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.S)
_LINE_DIRECTIVE = re.compile(r"^\s*\.(loc|file|section|pragma)\b[^\n]*$", re.M)
_ENTRY = re.compile(r"\.entry\s+([\w$]+)\s*\((.*?)\)", re.S)
_PARAMETER = re.compile(
    r"\.param\s+\.(?:align\s+\d+\s+\.)?[busf](\d+)\s.*?([\w$]+)\s*(?:,|$)", re.S
)
_SHARED = re.compile(r"\.shared\s+\.align\s+\d+\s+\.b8\s+([\w$]+)\[(\d*)\]\s*;")
_LABEL = re.compile(r"\s*([\w$]+):(?!:)")
_REGISTERS = re.compile(r"\.reg\s+\.(pred|[busf]\d+)\s+(.*)", re.S)
_STATEMENT = re.compile(r"(?:@(!?)(%?[\w$]+)\s+)?([a-z][\w.:]*)\s*(.*)", re.S)
_SPECIAL = re.compile(r"%(tid|ntid|ctaid|nctaid)\.[xyz]|%(laneid|warpid)")
_NUMBER = re.compile(r"-?(?:0x[0-9a-fA-F]+|0f[0-9a-fA-F]{8}|0d[0-9a-fA-F]{16}|\d+)U?")


def parse(text: str) -> Kernel:
    """Return the kernel of a PTX file.

    Raises PtxError for a statement that it cannot read.
    """
    text = _LINE_DIRECTIVE.sub("", _COMMENT.sub(" ", text))
    entry = _ENTRY.search(text)
    if entry is None:
        raise PtxError("The file has no .entry.")
    shared, used = {}, 0
    for name, size in _SHARED.findall(text):
        shared[name] = (used, int(size or 0))
        used += -(-int(size or 0) // 128) * 128
    parameters = tuple((name, int(bits)) for bits, name in _PARAMETER.findall(entry[2]))
    body = _Body(text, text.index("{", entry.end()) + 1, set(shared))
    return Kernel(entry[1], parameters, tuple(body.instructions), body.labels, shared)


class _Body:
    """Statements of a function, from behind its opening brace to its closing one."""

    def __init__(self, text: str, start: int, variables: set[str]) -> None:
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.variables = variables
        self._banks: dict[str, int] = {}  # "%r" -> 32
        self._named: dict[str, int] = {}
        # A label within braces is known there alone, and others may have its name.
        blocks = [(0, set[str]())]  # the first instruction, and the labels
        while blocks:
            while text[start].isspace():
                start += 1
            if text[start] == "{":  # a vector never begins a statement
                blocks.append((len(self.instructions), set()))
                start += 1
            elif text[start] == "}":
                self._close(*blocks.pop(), is_last=not blocks)
                start += 1
            elif label := _LABEL.match(text, start):
                self.labels[label[1]] = len(self.instructions)
                blocks[-1][1].add(label[1])
                start = label.end()
            else:
                end = text.index(";", start)
                self._statement(" ".join(text[start:end].split()))
                start = end + 1

    def _close(self, first: int, labels: set[str], is_last: bool) -> None:
        """Give the labels of a block names that no other block has."""
        for label in () if is_last else labels:
            own = f"{label} in {first}"
            self.labels[own] = self.labels.pop(label)
            for at in range(first, len(self.instructions)):
                each = self.instructions[at]
                operands = tuple(
                    Symbol(own) if one == Symbol(label) else one for one in each.operands
                )
                self.instructions[at] = replace(each, operands=operands)

    def _statement(self, text: str) -> None:
        if declared := _REGISTERS.match(text):
            self._declare(declared[1], declared[2])
            return
        found = _STATEMENT.fullmatch(text)
        if found is None:
            raise PtxError(f"This statement is not understood: {text}")
        negated, predicate, opcode, rest = found.groups()
        guard = None if predicate is None else (self._register(predicate), not negated)
        operands = tuple(self._operand(each) for each in _split(rest))
        self.instructions.append(Instruction(opcode, operands, guard, text))

    def _declare(self, kind: str, names: str) -> None:
        bits = 1 if kind == "pred" else int(kind[1:])
        for name in (each.strip() for each in names.split(",")):
            bank = re.fullmatch(r"(%?[\w$]+)<\d+>", name)
            known, key = (self._banks, bank[1]) if bank else (self._named, name)
            if known.setdefault(key, bits) != bits:
                raise PtxError(f"{name} is declared with {known[key]} and with {bits} bits.")

    def _register(self, name: str) -> Register:
        bits = self._named.get(name) or self._banks.get(name.rstrip("0123456789"))
        if bits is None:
            raise PtxError(f"{name} is not declared.")
        return Register(name, bits)

    def _operand(self, text: str) -> Operand:
        if text.startswith("["):
            base, _, offset = text[1:-1].partition("+")
            base = self._operand(base.strip())
            if isinstance(base, Vector | Address):
                raise PtxError(f"This address is not understood: {text}")
            return Address(base, int(offset, 0) if offset.strip() else 0)
        if text.startswith("{"):
            return self._vector(text[1:-1].split(","))
        if "|" in text:
            return self._vector(text.split("|"))
        return self._scalar(text)

    def _vector(self, parts: list[str]) -> Vector:
        return Vector(tuple(self._scalar(each.strip()) for each in parts))

    def _scalar(self, text: str) -> Register | Immediate | Symbol:
        if _NUMBER.fullmatch(text):
            return Immediate(_number(text.rstrip("U")))
        if text in self._named or (text.startswith("%") and not _SPECIAL.fullmatch(text)):
            return self._register(text)
        return Symbol(text)


def _number(text: str) -> int:
    return int(text[2:], 16) if text[:2] in ("0f", "0d") else int(text, 0)


def _split(operands: str) -> list[str]:
    """Split at the commas outside of braces and brackets."""
    return [each.strip() for each in re.split(r",(?![^{\[]*[}\]])", operands) if each.strip()]
