"""What a step really allocates, to compare a count with: on a GPU by torch's statistics, on a CPU by the events of its allocator."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._pytree import tree_leaves

from narrowgauge.plan.count import Step

SECOND = "narrowgauge_second_step"


def run_step(step: Step) -> None:
    for _ in range(step.micro_batches):
        step.loss().backward()
    step.update()


def most_allocated(step: Step, device: torch.device) -> int:
    """The most bytes that are alive in the second of two steps; on a CPU as asked for, on a GPU as its allocator rounds them."""
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
    held = [*step.model.parameters(), *step.model.buffers(), *leaves]
    total = sum({x.untyped_storage().data_ptr(): x.untyped_storage().nbytes() for x in held}.values())
    begins, events = _twice(lambda: run_step(step))
    peak = 0
    for at, nbytes in events:
        total += nbytes
        peak = max(peak, total) if at >= begins else 0
    return peak


def _twice(once: Callable[[], None]) -> tuple[int, list[tuple[int, int]]]:
    """(when the second begins, (when, bytes; below 0 if they are freed))."""
    gc.collect()
    was_on = gc.isenabled()
    gc.disable()  # it frees what a step has left behind, at any time
    try:
        with _kineto_silent(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
            once()
            with record_function(SECOND):
                once()
    finally:
        if was_on:
            gc.enable()
    events = sorted(found.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    begins = next(event.start_ns() for event in events if event.name() == SECOND)
    return begins, [(event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]"]


@contextmanager
def _kineto_silent() -> Iterator[None]:
    """torch's profiler writes "USDT: ... profiler_start" to stderr (2.13); it reads how much it may say when it first starts."""
    name = "KINETO_LOG_LEVEL"
    if name in os.environ:  # the user's own wish
        yield
        return
    os.environ[name] = "99"
    try:
        yield
    finally:
        del os.environ[name]
