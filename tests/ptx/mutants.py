"""Faults in compiled code, one at a time: would the interpretation of a case notice?

    barrier   one bar.sync or bar.warp.sync left out
    order     a release, an acquire, .cg of a load, or a proxy fence left out
    mask      the predicate of a load or store left out, or a comparison that also takes the limit
    stride    a shift that makes an index one bit larger, or the offset of an access twice as large

`drawn(...)` takes so many of each kind from the kernels of some cases, by a seed. A mutant is
noticed if its case differs from the definition or faults: first with all threads together, and if
that agrees, in two random orders of warps.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.ptx.machine import Schedule
from tests.ptx.proof import Case, outcome

KINDS = ("barrier", "order", "mask", "stride")


@dataclass(frozen=True)
class Mutant:
    """One changed line of one kernel of one case.

    line  number in the kernel's PTX, from 0
    """

    kind: str
    case: str
    kernel: str
    line: int
    before: str
    after: str

    def applied(self, kernel: str, ptx: str) -> str:
        if kernel != self.kernel:
            return ptx
        lines = ptx.split("\n")
        if lines[self.line] != self.before:  # the same kernel in another variant
            return ptx
        lines[self.line] = self.after
        return "\n".join(lines)


_CHANGES: tuple[tuple[str, str, str | Callable[[Any], str]], ...] = (
    ("barrier", r"^\s*bar\.(?:warp\.)?sync\s[^;]*;", ""),
    ("order", r"^\s*fence\.proxy\.async[^;]*;", ""),
    ("order", r"\.cg(?=\.)", ""),
    ("order", r"\.gpu\.acquire\.", ".gpu.relaxed."),
    ("order", r"\.acq_rel\.", ".acquire."),
    ("order", r"\.acq_rel\.", ".release."),
    ("mask", r"^\s*@!?%p\d+ (?=(?:ld|st|red|atom)\.global)", "\t"),
    ("mask", r"setp\.lt\.(?=[su](?:32|64)\s)", "setp.le."),
    ("mask", r"setp\.gt\.(?=[su](?:32|64)\s)", "setp.ge."),
    ("stride", r"(?<=, )(\d+)(?=;)", lambda found: str(int(found[1]) + 1)),  # of shl, see below
    ("stride", r"(?<=\+)(\d+)(?=\])", lambda found: str(2 * int(found[1]))),
    ("stride", r"(?<=, )(\d+)(?=;)", lambda found: str(2 * int(found[1]))),  # of mul.wide
)
# Lines that a change of a number may touch.
_NUMBERED = {
    9: re.compile(r"\s*shl\.b(32|64)\s"),
    11: re.compile(r"\s*mul\.wide\.[su]32\s.*, \d+;"),
}


def mutants(case: str, kernel: str, ptx: str) -> Iterator[Mutant]:
    """Every fault of these kinds in a kernel."""
    for number, line in enumerate(ptx.split("\n")):
        for place, (kind, pattern, after) in enumerate(_CHANGES):
            wanted = _NUMBERED.get(place)
            if wanted is not None and not wanted.match(line):
                continue
            changed = re.sub(pattern, after, line, count=1)
            if changed != line:
                yield Mutant(kind, case, kernel, number, line, changed)


def drawn(cases: Sequence[Case], sm: int, counts: Mapping[str, int], seed: int) -> list[Mutant]:
    """counts: kind -> how many. From all kernels of the cases alike, not from the longest alone."""
    found: dict[tuple[str, str], list[Mutant]] = {}
    for case in cases:
        kernels: dict[str, str] = {}

        def note(kernel: str, ptx: str, into: dict[str, str] = kernels) -> str:
            into.setdefault(kernel, ptx)
            return ptx

        outcome(case, sm, mutate=note)
        for kernel, ptx in kernels.items():
            for each in mutants(case.name, kernel, ptx):
                found.setdefault((each.kind, f"{each.case}/{kernel}"), []).append(each)
    draw, chosen = random.Random(seed), []
    for kind in KINDS:
        groups = [draw.sample(each, len(each)) for (k, _), each in found.items() if k == kind]
        turns = [
            each[turn]
            for turn in range(max(map(len, groups)))
            for each in groups
            if turn < len(each)
        ]
        chosen += turns[: counts[kind]]
    return chosen


def noticed(case: Case, sm: int, mutant: Mutant) -> str:
    """How a fault shows itself, or ""."""
    tries = [(Schedule.TOGETHER, 0), (Schedule.RANDOM, 1), (Schedule.RANDOM, 2)]
    for schedule, seed in tries:
        found = outcome(case, sm, mutate=mutant.applied, schedule=schedule, seed=seed)
        if found.words:
            return found.words
    return ""
