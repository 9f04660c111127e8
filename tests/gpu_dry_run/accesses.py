"""What a Triton kernel does through each of its pointers, read off its Triton IR.

    "r" loads, "rr" loads in two loops, one after the other; "w" stores; "R", "W" where it does so only under an `if`

Values are followed without order: what an operation or a loop takes is taken to reach all that it gives. So a pointer that is chosen
among two counts for both; a load gives a number, which reaches nothing. What comes after an early return counts as if there were none.
"""

from __future__ import annotations

import re
from typing import NamedTuple

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
        name: "".join(
            sorted(
                [
                    *kinds - {kind.upper() for kind in kinds if kind.islower()},
                    *"r" * (len(walk.loops[name]) - 1),
                ]
            )
        )
        for name, kinds in walk.found.items()
    }


class _Region(NamedTuple):
    """Lines between braces: where they begin, which names regions that are over have used too; the operation; the values that it gives."""

    line: int
    operation: str
    given: list[Value]


Value = tuple[int, str]  # the line of the region in which it is made, and its name there


class _Walk:
    """reaches: of each value the pointers that it may come from; found: of each pointer its accesses so far.

    loops: of each pointer the loops, not within another one, that always load through it, by their lines.
    """

    def __init__(self, pointers: list[str]) -> None:
        self.reaches: dict[Value, set[str]] = {(0, f"%{name}"): {name} for name in pointers}
        self.found: dict[str, set[str]] = {name: set() for name in pointers}
        self.loops: dict[str, set[int]] = {name: set() for name in pointers}
        self.regions: list[_Region] = []  # those that are open
        self.line = 0

    def over(self, ttir: str) -> None:
        self.regions = []
        for self.line, line in enumerate(ttir.splitlines(), 1):
            line = line.split(" loc(")[0].strip()
            if line.startswith("}"):
                closed = self.regions.pop() if self.regions else _Region(0, "", [])
                if line.endswith("{"):  # else, do
                    self.regions.append(closed._replace(line=self.line))
            else:
                self._operation(line)

    def _known(self, name: str) -> set[str]:
        """What the value of that name reaches, of the innermost region that has one."""
        places = [*(region.line for region in reversed(self.regions)), 0]
        return next(
            (self.reaches[place, name] for place in places if (place, name) in self.reaches), set()
        )

    def _reach(self, value: Value, sources: set[str]) -> None:
        self.reaches[value] = self.reaches.get(value, set()) | sources

    def _operation(self, line: str) -> None:
        made = re.match(
            r"((?:%[\w$.-]+(?::\d+)?(?:, )?)+) = ", line
        )  # not an argument with attributes
        left, right = (made.group(1), line[made.end() :]) if made else ("", line)
        here = self.regions[-1].line if self.regions else 0
        given, taken = [(here, name) for name in _values(left)], _values(right)
        sources = set().union(*map(self._known, taken))
        operation = re.sub(r'[" (].*', "", right.lstrip('"'))
        access = _ACCESSES.get(operation.removeprefix("tt.").removeprefix("descriptor_"))
        if access is not None:
            # The first value is the pointer; of atomics it may be a mode, of descriptors their store has the value behind it.
            self._accessed(access, sources if "atomic" in operation else self._known(taken[0]))
            for value in given:
                self._reach(value, set())  # a number
            return
        for inner, outer in re.findall(r"(%[\w.-]+) = (%[\w.-]+)", right):  # iter_args
            self._reach((self.line, inner), self._known(outer))
            given.append((self.line, inner))
        if line.endswith("{"):
            self.regions.append(_Region(self.line, operation, given))
        if operation == "scf.yield" and self.regions:
            given = self.regions[-1].given
        for value in given:
            self._reach(value, sources)

    def _accessed(self, access: str, pointers: set[str]) -> None:
        conditional = any(region.operation == "scf.if" for region in self.regions)
        loops = [region.line for region in self.regions if region.operation == "scf.for"]
        for name in pointers:
            self.found[name].update(access.upper() if conditional else access)
            if access == "r" and loops and not conditional:
                self.loops[name].add(loops[0])


def _values(text: str) -> list[str]:
    """The values that a line names; the parts of one that is several (%x#1) are not told apart."""
    return [value.split(":")[0] for value in re.findall(r"%[\w$.-]+(?::\d+)?", text)]
