"""The work of one optimizer step, equal operations counted together: what a card's roofline is laid over (`roofline.time`).

A step of a deep model does the operations of two shallow ones, each as often as lies on a line with the number of layers.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import Any

from narrowgauge.plan.count import Count
from narrowgauge.plan.work import Work

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
    return Done(place, kind, work.operation, work.flops, work.nbytes, work.operands, work.own, work.sums)


def deeper(few: Tally, more: Tally, layers: int) -> Tally:
    """Of a model of so many layers more than the first, of which the second has one more."""
    both = dict.fromkeys([*few, *more])
    found = {each: few.get(each, 0) + layers * (more.get(each, 0) - few.get(each, 0)) for each in both}
    return {each: times for each, times in found.items() if times > 0}


def repeated(done: Tally, factor: float) -> Tally:
    """With so many times as many micro-batches: the update stays one."""
    return {each: times if each.phase == "step" else factor * times for each, times in done.items()}


def as_rows(done: Tally) -> list[list[Any]]:
    """In JSON's types."""
    return [[*astuple(each), times] for each, times in done.items()]


def from_rows(rows: list[list[Any]]) -> Tally:
    return {Done(*row[:-1]): row[-1] for row in rows}
