"""Measure the memory that a step really allocates, to compare it with a plan.

A GPU reports torch's statistics; on a CPU the events of the allocator are summed.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._pytree import tree_leaves

if TYPE_CHECKING:
    from narrowgauge.plan.count import Step

SECOND = "narrowgauge_second_step"


def run_step(step: Step) -> None:
    for _ in range(step.micro_batches):
        step.loss().backward()
    step.update()


def most_allocated(step: Step, device: torch.device) -> int:
    """Return the largest number of bytes that are alive in the second of two steps.

    On a CPU these are the requested sizes, on a GPU the sizes after the allocator's rounding.
    """
    if device.type != "cuda":
        return _by_events(step)
    run_step(step)
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    run_step(step)
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device)


def _by_events(step: Step) -> int:
    leaves = (each for each in tree_leaves(step.batch) if isinstance(each, Tensor))
    # Tensors that exist before the profiler starts have no events.
    held = [*step.model.parameters(), *step.model.buffers(), *leaves]
    total = sum(
        {x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}.values()
    )
    begins, events = _twice(lambda: run_step(step))
    peak = 0
    for at, nbytes in events:
        total += nbytes
        peak = max(peak, total) if at >= begins else 0
    return peak


def _twice(once: Callable[[], None]) -> tuple[int, list[tuple[int, int]]]:
    """Run `once` twice under the profiler.

    Returns (start of the second run in ns, events (time in ns, bytes)); freed bytes are negative.
    """
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()  # a collection would free tensors of an earlier step at a random time
    try:
        with (
            _kineto_silent(),
            profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found,
        ):
            once()
            with record_function(SECOND):
                once()
    finally:
        if was_on:
            gc.enable()
    events = sorted(found.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    begins = next(event.start_ns() for event in events if event.name() == SECOND)
    return begins, [
        (event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"
    ]


@contextmanager
def _kineto_silent() -> Iterator[None]:
    """Silence the message "USDT: ... profiler_start" that torch's profiler writes to stderr (2.13).

    Kineto reads its log level when it first starts.
    """
    name = "KINETO_LOG_LEVEL"
    if name in os.environ:  # keep the user's setting
        yield
        return
    os.environ[name] = "99"
    try:
        yield
    finally:
        del os.environ[name]
