"""Faults in compiled code, one at a time: would the interpretation of a case notice?

    barrier   bar.sync or bar.warp.sync left out; those with nothing between them together, since
              Triton writes some twice and one of two is enough
    order     left out: a release or an acquire of a counter, a proxy fence, or .cg of a load in a
              kernel whose programs wait for each other (elsewhere it reads an earlier launch's)
    mask      the predicate of a load or store left out, or comparisons with one limit that also take
              it: a mask of the source is a comparison for each element of a thread
    stride    a shift that makes an index one bit larger, or an offset or factor twice as large

`drawn(...)` takes so many of each kind from the kernels of some cases, by a seed. A mutant is
noticed if its case differs from the definition or faults: first with all threads together, and if
that agrees, in two random orders of warps.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tests.ptx.machine import Schedule
from tests.ptx.proof import Case, outcome

KINDS = ("barrier", "order", "mask", "stride")


@dataclass(frozen=True)
class Mutant:
    """Changed lines of one kernel of one case.

    lines  numbers in the kernel's PTX, from 0; before, after: their text
    """

    kind: str
    case: str
    kernel: str
    lines: tuple[int, ...]
    before: tuple[str, ...]
    after: tuple[str, ...]

    def applied(self, kernel: str, ptx: str) -> str:
        """The changed PTX; unchanged for another kernel, or another variant of this one."""
        lines = ptx.split("\n")
        if kernel != self.kernel or len(lines) <= self.lines[-1]:
            return ptx
        if any(lines[n] != text for n, text in zip(self.lines, self.before, strict=True)):
            return ptx
        for n, text in zip(self.lines, self.after, strict=True):
            lines[n] = text
        return "\n".join(lines)


def _more(found: re.Match[str]) -> str:
    return str(int(found[1]) + 1)


def _twice(found: re.Match[str]) -> str:
    return str(2 * int(found[1]))


_PAST_CACHE = r"ld\.global\.cg\."
# (kind, lines that are meant, what is replaced there, by what)
_CHANGES: tuple[tuple[str, str, str, str | Callable[[re.Match[str]], str]], ...] = (
    ("order", r"fence\.proxy\.async", r".*", ""),
    ("order", _PAST_CACHE, r"\.cg(?=\.)", ""),
    ("order", r"\.acquire\.", r"\.acquire\.", ".relaxed."),
    ("order", r"\.acq_rel\.add\.", r"\.acq_rel\.", ".acquire."),
    ("order", r"\.acq_rel\.add\.", r"\.acq_rel\.", ".release."),
    ("mask", r"@!?%p\d+ (ld|st|red|atom)\.global", r"@!?%p\d+ ", ""),
    ("stride", r"shl\.b(32|64)\s.*, \d+;", r"(\d+)(?=;)", _more),
    ("stride", r"mul\.wide\.[su]32\s.*, \d+;", r"(\d+)(?=;)", _twice),
    ("stride", r"\+\d+\]", r"(?<=\+)(\d+)(?=\])", _twice),
)
_BARRIER = re.compile(r"\s*bar\.(warp\.)?sync\s")
_BELOW = re.compile(r"\s*setp\.lt\.[su](?:32|64)\s+%p\d+, %\w+, (%\w+);")
# A barrier on one side of these is not the same as on the other.
_DIVIDES = re.compile(
    r"\s*(@!?%p\d+\s+)?(ld|st|atom|red|cp|ldmatrix|stmatrix|wgmma|fence|bra|ret)\b|\S+:"
)


def mutants(case: str, kernel: str, ptx: str) -> Iterator[Mutant]:
    """Every fault of these kinds in a kernel."""
    text = ptx.split("\n")
    lines = [re.sub(r"\s*//.*", "", line) for line in text]

    def mutant(kind: str, numbers: Sequence[int], after: Sequence[str]) -> Mutant:
        before = tuple(text[n] for n in numbers)
        return Mutant(kind, case, kernel, tuple(numbers), before, tuple(after))

    group: list[int] = []
    limits: dict[str, list[int]] = {}
    for number, line in enumerate([*lines, "ret;"]):
        if _BARRIER.match(line):
            group.append(number)
        elif group and _DIVIDES.match(line) and not line.startswith("$L__tmp"):
            yield mutant("barrier", group, [""] * len(group))
            group = []
        if found := _BELOW.match(line):
            limits.setdefault(found[1], []).append(number)
    for numbers in limits.values():
        yield mutant("mask", numbers, [text[n].replace(".lt.", ".le.") for n in numbers])
    for number, line in enumerate(lines):
        for kind, meant, pattern, after in _CHANGES:
            if meant == _PAST_CACHE and ".acquire." not in ptx:
                continue
            if re.search(meant, line) and not line.lstrip().startswith("."):
                changed = re.sub(pattern, after, line, count=1)
                yield mutant(kind, [number], [changed])


def drawn(cases: Sequence[Case], sm: int, counts: Mapping[str, int], seed: int) -> list[Mutant]:
    """counts: kind -> how many. Kernels of the cases in turns, not the longest alone."""
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
    draw = random.Random(seed)
    chosen: list[Mutant] = []
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
