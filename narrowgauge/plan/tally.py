"""The work of one optimizer step, equal operations counted together: what a card's roofline is laid over (`roofline.time`).

A deep model's step does what two shallow ones do, as often, or as largely, as lies on a line with the number of layers.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from typing import Any

from narrowgauge.ops.timing.work import Work
from narrowgauge.plan.count import Count

PHASES = ("forward", "backward", "step")
KINDS = ("products", "attention", "casts", "elementwise", "loss", "optimizer")


@dataclass(frozen=True)
class Done:
    """Operations that are alike; phase: one of PHASES, kind: one of KINDS, the others as in `Work`."""

    phase: str
    kind: str
    operation: str
    flops: int
    nbytes: int
    operands: str
    own: bool
    sums: str
    rows: int
    columns: int
    elements: int


Tally = dict[Done, float]


def tally(found: Count) -> Tally:
    """Of the second step."""
    phases = found.trace.phases
    second = next(at for at, (place, _) in enumerate(phases) if at and place >= found.second)
    done: Tally = {}
    for work in found.trace.work:
        if work.phase >= second:
            each = _done(work, phases[work.phase][1])
            done[each] = done.get(each, 0) + 1
    return done


def _done(work: Work, phase: str) -> Done:
    kind = work.kind
    if kind not in ("products", "attention"):
        if phase == "step":
            kind = "optimizer"
        elif kind == "elementwise" and phase in ("head", "backward"):
            kind = "loss"
    place = "forward" if phase == "head" else phase.split()[0]
    return Done(
        place,
        kind,
        work.operation,
        work.flops,
        work.nbytes,
        work.operands,
        work.own,
        work.sums,
        work.rows,
        work.columns,
        work.elements,
    )


def deeper(few: Tally, more: Tally, layers: int) -> Tally:
    """Of a model of so many layers more than the first, of which the second has one more.

    What a layer adds comes once more with each. An operation over all tensors at once, as the update, becomes larger instead.
    """
    lost, won = _beyond(few, more), _beyond(more, few)
    found = {each: min(times, more[each]) for each, times in few.items() if each in more}
    for alike, before in lost.items():
        after = won.get(alike, {})
        for small, large in zip(_by_size(before), _by_size(after), strict=False):
            times = min(before[small], after[large])
            grown = replace(
                small, flops=small.flops + layers * (large.flops - small.flops),
                nbytes=small.nbytes + layers * (large.nbytes - small.nbytes),
                elements=small.elements + layers * (large.elements - small.elements),
            )  # fmt: skip
            found[grown] = found.get(grown, 0) + times
            after[large] -= times
    for added in won.values():
        for each, times in added.items():
            if times:
                found[each] = found.get(each, 0) + layers * times
    return found


def _beyond(first: Tally, second: Tally) -> dict[tuple[str, ...], Tally]:
    """What the first does more often, by all but its size."""
    found: dict[tuple[str, ...], Tally] = {}
    for each, times in first.items():
        if (rest := times - second.get(each, 0)) > 0:
            alike = (each.phase, each.kind, each.operation, each.operands, each.sums)
            found.setdefault(alike, {})[each] = rest
    return found


def _by_size(done: Tally) -> list[Done]:
    return sorted(done, key=lambda each: (-each.nbytes, -each.flops))


def repeated(done: Tally, factor: float) -> Tally:
    """With so many times as many micro-batches: the update stays one."""
    return {each: times if each.phase == "step" else factor * times for each, times in done.items()}


def as_rows(done: Tally) -> list[list[Any]]:
    """In JSON's types."""
    return [[*astuple(each), times] for each, times in done.items()]


def from_rows(rows: list[list[Any]]) -> Tally:
    return {Done(*row[:-1]): row[-1] for row in rows}
