"""Largest moment of each phase of a traced run: memory by part and kind, and the allocator's state.

The kind of a saved tensor is the module that allocated it, relative to its block: `mlp.act_fn`,
`self_attn.q_proj`, or "(block)" for the block itself. All other parts have the kind "".
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from narrowgauge.plan.allocator import CachingAllocator, run

if TYPE_CHECKING:
    from narrowgauge.plan.count import Count
    from narrowgauge.plan.trace import Allocation

Kind = tuple[str, str]  # part, kind
BELOW_BLOCK = re.compile(r"^.*?\.\d+(?:\.|$)")


@dataclass(frozen=True, kw_only=True)
class MemoryMoment:
    """Memory in bytes at the largest moment of a phase.

    step, micro_batch  from 1 on; the update belongs to the last micro-batch
    phase              name of the phase
    alive              requested and not yet freed, at the largest moment
    end                requested and not yet freed, at the end of the phase
    allocated          alive with the rounding of torch's allocator
    reserved           bytes that the allocator has taken from the device by the end of the phase
    parts              alive by (part, kind)
    module             module that was running
    """

    step: int
    micro_batch: int
    phase: str
    alive: int
    end: int
    allocated: int
    reserved: int
    parts: dict[Kind, int]
    module: str


def moments(count: Count, expandable: bool = False) -> list[MemoryMoment]:
    """Return the moments of both steps in order.

    The simulated allocator begins with the tensors that are alive when the first step begins.
    """
    trace, found = count.trace, list[MemoryMoment]()
    allocations = trace.allocations
    allocator, alive = CachingAllocator(expandable=expandable), dict[int, None]()
    step = micro_batch = 0
    for name, events in trace.by_phase():
        if not name:  # before the first step: the model is built
            for event in events:
                if event >= 0:
                    alive[event] = None
                else:
                    del alive[~event]
            # Only tensors that survive the build: temporaries of the build leave no free segments
            # behind.
            run(allocator, trace, alive)
            total, parts = _totals(allocations, alive)
            continue
        if name == "forward":
            starts_step = not found or found[-1].phase == "step"
            step, micro_batch = (step + 1, 1) if starts_step else (step, micro_batch + 1)
        top, place = total, 0
        for at, event in enumerate(events, 1):
            total += allocations[event].nbytes if event >= 0 else -allocations[~event].nbytes
            if total > top:
                top, place = total, at
        _change(parts, allocations, events[:place])
        largest = {kind: nbytes for kind, nbytes in parts.items() if nbytes}
        _change(parts, allocations, events[place:])
        # The peak of this phase, not of the whole run; peak_reserved is not reset, because reserved
        # memory stays.
        allocator.peak_allocated = allocator.allocated
        run(allocator, trace, events)
        found.append(
            MemoryMoment(
                step=step, micro_batch=micro_batch, phase=name, alive=top, end=total, allocated=allocator.peak_allocated,
                reserved=allocator.peak_reserved, parts=largest, module=_at_work(allocations, events[:place]),
            )
        )  # fmt: skip
    return found


def _totals(allocations: list[Allocation], alive: dict[int, None]) -> tuple[int, dict[Kind, int]]:
    parts: dict[Kind, int] = {}
    _change(parts, allocations, list(alive))
    return sum(parts.values()), parts


def _change(parts: dict[Kind, int], allocations: list[Allocation], events: list[int]) -> None:
    for event in events:
        each = allocations[event if event >= 0 else ~event]
        kind = kind_of(each)
        parts[kind] = parts.get(kind, 0) + (each.nbytes if event >= 0 else -each.nbytes)


def kind_of(allocation: Allocation) -> Kind:
    part = allocation.part or "transient"
    if part != "saved":
        return part, ""
    return part, BELOW_BLOCK.sub("", allocation.module) or (
        "(block)" if allocation.module else "(model)"
    )


def _at_work(allocations: list[Allocation], events: list[int]) -> str:
    return next((allocations[event].module for event in reversed(events) if event >= 0), "")


def in_order(found: list[MemoryMoment]) -> Iterator[tuple[tuple[int, int], list[MemoryMoment]]]:
    """Yield ((step, micro-batch), its moments)."""
    keys = dict.fromkeys((each.step, each.micro_batch) for each in found)
    for key in keys:
        yield key, [each for each in found if (each.step, each.micro_batch) == key]
