"""What a Triton kernel does through each of its pointers, read off its Triton IR.

    "r" loads, "w" stores; "R", "W" where it does so only under an `if`

Values are followed without order: what an operation or a loop takes is taken to reach all that it gives. So a pointer that is chosen
among two counts for both; a load gives a number, which reaches nothing. What comes after an early return counts as if there were none.
"""

from __future__ import annotations

import re

_ACCESSES = {"load": "r", "store": "w", "atomic_rmw": "rw", "atomic_cas": "rw"}
_LOOPS = 3  # loops within loops: what an inner one gives reaches the next turn


def accesses(ttir: str) -> dict[str, str]:
    """Name of each pointer argument, in their order -> its accesses."""
    head = re.search(r"tt\.func public @\S+?\((.*?)\) attributes", ttir, re.S)
    pointers = re.findall(r"%([\w.-]+): !tt\.(?:ptr|tensordesc)", head.group(1)) if head else []
    walk = _Walk(pointers)
    for _ in range(_LOOPS):
        walk.over(ttir)
    return {
        name: "".join(sorted(kinds - {kind.upper() for kind in kinds if kind.islower()}))
        for name, kinds in walk.found.items()
    }


class _Walk:
    """reaches: of each value the pointers that it may come from; found: of each pointer its accesses so far."""

    def __init__(self, pointers: list[str]) -> None:
        self.reaches: dict[str, set[str]] = {f"%{name}": {name} for name in pointers}
        self.found: dict[str, set[str]] = {name: set() for name in pointers}

    def over(self, ttir: str) -> None:
        regions: list[tuple[str, list[str]]] = []  # of those that are open: the operation, and the values that it gives
        for line in ttir.splitlines():
            line = line.split(" loc(")[0].strip()
            if line.startswith("}"):
                closed = regions.pop() if regions else ("", [])
                if line.endswith("{"):  # else, do
                    regions.append(closed)
            else:
                self._operation(line, regions)

    def _operation(self, line: str, regions: list[tuple[str, list[str]]]) -> None:
        left, _, right = line.partition(" = ") if line.startswith("%") else ("", "", line)
        given, taken = _values(left), _values(right)
        sources = set().union(*(self.reaches.get(value, set()) for value in taken))
        operation = re.sub(r'[" (].*', "", right.lstrip('"'))
        access = _ACCESSES.get(operation.removeprefix("tt.").removeprefix("descriptor_"))
        if access is not None:
            conditional = any(around == "scf.if" for around, _ in regions)
            # The first value is the pointer; of atomics it may be a mode, of descriptors their store has the value behind it.
            for name in sources if "atomic" in operation else self.reaches.get(taken[0], set()):
                self.found[name].update(access.upper() if conditional else access)
            return
        for inner, outer in re.findall(r"(%[\w.-]+) = (%[\w.-]+)", right):  # iter_args
            self.reaches[inner] = self.reaches.get(inner, set()) | self.reaches.get(outer, set())
            given.append(inner)
        if line.endswith("{"):
            regions.append((operation, given))
        if operation == "scf.yield" and regions:
            given = regions[-1][1]
        for value in given:
            self.reaches[value] = self.reaches.get(value, set()) | sources


def _values(text: str) -> list[str]:
    """The values that a line names; the parts of one that is several (%x#1) are not told apart."""
    return [value.split(":")[0] for value in re.findall(r"%[\w$.-]+(?::\d+)?", text)]
