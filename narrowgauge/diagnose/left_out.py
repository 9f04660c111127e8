"""Batches that runs skipped at loss spikes (`on_spike = skip`), and the batch of each step.

Batches are numbered from 1 in the order of the data. A run that skips batch 40 trains on batch 41
at step 40, and is shifted by one batch until its end. From step 40 on its losses cannot be paired
with a run that skipped nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from narrowgauge.diagnose.format_text import count

KEY = "left_out"  # key in run.json and in `spike` events


def batch_of(step: int, left_out: Iterable[int]) -> int:
    """Number of the batch that a step trains on. left_out: ascending."""
    found = step
    for each in left_out:
        found += each <= found
    return found


def of_run(run: Mapping[str, Any], events: Iterable[Mapping[str, Any]]) -> tuple[int, ...]:
    """Skipped batches of a run, ascending.

    run     its run.json, which includes the batches that a branch's parent skipped
    events  its events, for batches skipped after run.json was written
    """
    since = (
        number for event in events if event["event"] == "spike" for number in event.get(KEY) or ()
    )
    return tuple(sorted({*(run.get(KEY) or ()), *since}))


def other_steps(steps: Iterable[int], one: Sequence[int], other: Sequence[int]) -> list[int]:
    """Steps from the first one at which two runs trained on different batches.

    All later steps count, since the weights differ from then on.
    """
    known = list(steps)
    first = min(
        (step for step in known if batch_of(step, one) != batch_of(step, other)), default=None
    )
    return [] if first is None else [step for step in known if step >= first]


def words(name: str, left_out: Sequence[int]) -> str:
    """Clause such as 'fp8-row left out batches 40 and 57'."""
    numbers = [count(each) for each in left_out]
    if not numbers:
        return f"{name} left out none"
    listed = " and ".join(filter(None, (", ".join(numbers[:-1]), numbers[-1])))
    return f"{name} left out batch{'es' * (len(numbers) > 1)} {listed}"
