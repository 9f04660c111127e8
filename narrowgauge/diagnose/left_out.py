"""The batches that runs left out at loss spikes (`on_spike = skip`), and so which batch each of their steps learnt from.

Batches are numbered from 1 in the order of the data. A run that leaves out batch 40 has batch 41 at step 40, and so on to its end: from
there on it is no pair of a run that left out none, step by step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from narrowgauge.diagnose.format_text import count

KEY = "left_out"  # in run.json, and of events `spike`


def batch_of(step: int, left_out: Iterable[int]) -> int:
    """The number of the batch that a step learns from. left_out: ascending."""
    found = step
    for each in left_out:
        found += each <= found
    return found


def of_run(run: Mapping[str, Any], events: Iterable[Mapping[str, Any]]) -> tuple[int, ...]:
    """Ascending. run: its run.json, which knows what a branch's parent left out; events: what it has left out since that was written."""
    since = (number for event in events if event["event"] == "spike" for number in event.get(KEY) or ())
    return tuple(sorted({*(run.get(KEY) or ()), *since}))


def other_steps(steps: Iterable[int], one: Sequence[int], other: Sequence[int]) -> list[int]:
    """Those from the first on at which two runs that left these out learnt from different batches: their weights differ since."""
    known = list(steps)
    first = min((step for step in known if batch_of(step, one) != batch_of(step, other)), default=None)
    return [] if first is None else [step for step in known if step >= first]


def words(name: str, left_out: Sequence[int]) -> str:
    """'fp8-row left out batches 40 and 57'."""
    numbers = [count(each) for each in left_out]
    if not numbers:
        return f"{name} left out none"
    listed = " and ".join(filter(None, (", ".join(numbers[:-1]), numbers[-1])))
    return f"{name} left out batch{'es' * (len(numbers) > 1)} {listed}"
