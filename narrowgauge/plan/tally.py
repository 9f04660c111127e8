"""Operations of one optimizer step, grouped; `roofline.time` predicts their duration.

The operations of a deep model are extrapolated from two shallow ones: their number or their size
grows linearly with the layers.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from narrowgauge.ops.timing.work import Work
    from narrowgauge.plan.count import Count

PHASES = ("forward", "backward", "step")
KINDS = ("products", "attention", "casts", "elementwise", "loss", "optimizer")


@dataclass(frozen=True)
class Done:
    """A group of equal operations.

    phase    an entry of PHASES
    kind     an entry of KINDS

    Other fields are as in `Work`.
    """

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
    """Return the operations of the second step."""
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
        # "backward" without a block number is the gradient of the head.
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
    """Return the operations of a model with `layers` layers more than `few`.

    `more` has one layer more than `few`. Operations that a layer adds are repeated for each layer.
    An operation over all tensors at once, such as the update, grows instead.
    """
    # An operation that only `few` has, with a counterpart in `more` that differs in size, grew with
    # the depth.
    lost, won = _beyond(few, more), _beyond(more, few)
    found = {each: min(times, more[each]) for each, times in few.items() if each in more}
    for alike, before in lost.items():
        after = won.get(alike, {})
        # Matched by size: the largest operation of the one model is the largest of the other.
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
    """Return the operations that `first` has more often, grouped by all fields but their size."""
    found: dict[tuple[str, ...], Tally] = {}
    for each, times in first.items():
        if (rest := times - second.get(each, 0)) > 0:
            alike = (each.phase, each.kind, each.operation, each.operands, each.sums)
            found.setdefault(alike, {})[each] = rest
    return found


def _by_size(done: Tally) -> list[Done]:
    return sorted(done, key=lambda each: (-each.nbytes, -each.flops))


def repeated(done: Tally, factor: float) -> Tally:
    """Return the operations for `factor` times the micro-batches; the update remains one."""
    return {each: times if each.phase == "step" else factor * times for each, times in done.items()}


def as_rows(done: Tally) -> list[list[Any]]:
    """Return the operations in JSON types."""
    return [[*astuple(each), times] for each, times in done.items()]


def from_rows(rows: list[list[Any]]) -> Tally:
    return {Done(*row[:-1]): row[-1] for row in rows}
