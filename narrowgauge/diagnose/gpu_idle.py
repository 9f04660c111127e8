"""Whether a GPU waits for its launches: the time in a step in which no kernel runs, and what to change.

    busy     the union of the kernels' intervals
    gap      between the end of all kernels so far and the next one's beginning
    idle     the sum of the gaps, over the time from the first kernel's beginning to the last one's end

A gap of less than LONG_S is the host launching one kernel after the other slower than they run; a longer one is the host doing
something else: reading data, waiting for a result, saving. The two have different cures, so they are counted apart.

`measure` is a function of intervals alone; `watched` records those of a step with torch's profiler.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

LONG_S = 1e-3  # an operation of PyTorch takes the host 5 to 100 us
BOUND = 0.1  # share of a step that is worth a change

Interval = tuple[float, float]  # seconds, on one clock


@dataclass(frozen=True, kw_only=True)
class Launches:
    """What a step's kernels and the gaps between them were.

    span_s          from the first kernel's beginning to the last one's end
    launching_s     sum of the short gaps
    waiting_s       sum of the long ones
    """

    kernels: int
    span_s: float
    launching_s: float
    waiting_s: float
    median_kernel_s: float
    longest_gap_s: float

    @property
    def idle(self) -> float:
        """Share of the span in which nothing ran."""
        return 0.0 if not self.span_s else (self.launching_s + self.waiting_s) / self.span_s

    @property
    def is_launch_bound(self) -> bool:
        return self.launching_s > BOUND * self.span_s

    @property
    def waits(self) -> bool:
        return self.waiting_s > BOUND * self.span_s

    def __str__(self) -> str:
        return (
            f"the GPU was idle for {self.idle:.0%} of a step of {1e3 * self.span_s:.3g} ms, between {self.kernels} kernels of "
            f"{1e6 * self.median_kernel_s:.3g} us (median): {self._share(self.launching_s)} in gaps of a launch, "
            f"{self._share(self.waiting_s)} in gaps of more than {1e3 * LONG_S:g} ms"
        )

    def _share(self, seconds: float) -> str:
        return f"{0.0 if not self.span_s else seconds / self.span_s:.0%}"


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How a run launches its steps: what advice depends on.

    graphs           whether steps are CUDA graphs; graphs_refused: why they cannot be, '' if they can
    micro_batches    of a step
    tensor_parallel  ranks that share each layer
    """

    graphs: bool = False
    graphs_refused: str = ""
    compiled: bool = False
    micro_batches: int = 1
    tensor_parallel: int = 1


def measure(intervals: Iterable[Interval]) -> Launches | None:
    """Of the kernels of one device, in any order, overlapping or not; None without a kernel. O(n log n)."""
    ordered = sorted(intervals)
    if not ordered:
        return None
    reached = ordered[0][0]
    gaps: list[float] = []
    for begins, ends in ordered:
        if begins > reached:
            gaps.append(begins - reached)
        reached = max(reached, ends)
    return Launches(
        kernels=len(ordered),
        span_s=reached - ordered[0][0],
        launching_s=sum(gap for gap in gaps if gap < LONG_S),
        waiting_s=sum(gap for gap in gaps if gap >= LONG_S),
        median_kernel_s=statistics.median(ends - begins for begins, ends in ordered),
        longest_gap_s=max(gaps, default=0.0),
    )


def advice(found: Launches, setup: Setup) -> list[str]:
    """What to change, the best first, a sentence each; [] for a GPU that is busy."""
    sentences = []
    if found.is_launch_bound:
        if not setup.graphs and not setup.graphs_refused:
            sentences.append("Launch steps as CUDA graphs: --cuda-graph.")
        elif not setup.graphs:
            sentences.append(f"CUDA graphs would help, and cannot be had: {setup.graphs_refused}.")
        if setup.tensor_parallel > 1:
            sentences.append(
                f"Take pipeline before tensor parallelism: {setup.tensor_parallel} ranks share each layer, which makes its "
                "kernels that much shorter and adds a message to each; stages of a pipeline leave them whole."
            )
        if setup.micro_batches > 1:
            sentences.append(
                f"Take fewer accumulation steps: micro_batches = {setup.micro_batches} cuts the batch into parts that are too "
                "small; lower it as far as memory allows (checkpointing and 8-bit states give some back)."
            )
        else:
            sentences.append("Take a larger micro-batch: the same launches then carry more work.")
        if not setup.compiled:
            sentences.append("Compile the model, which joins small kernels: --compile.")
    if found.waits:
        sentences.append(
            f"The GPU waits up to {1e3 * found.longest_gap_s:.3g} ms at a time for the host: look for data that is read, results that "
            "are fetched and checkpoints that are written within the step."
        )
    return sentences


@contextmanager
def watched() -> Iterator[list[Interval]]:
    """Fills the list, when the block ends, with the intervals of the kernels and copies that ran on CUDA in it.

    Waits for the device at both ends. Costs the host some microseconds per launch, so what is measured is an upper bound.
    """
    found: list[Interval] = []
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with warnings.catch_warnings():
        # torch 2.11 says that events of earlier cycles are not kept; there are none.
        warnings.filterwarnings("ignore", "Warning: Profiler clears events", UserWarning)
        profiler = torch.profiler.profile(activities=activities)
        profiler.start()
    try:
        yield found
        torch.cuda.synchronize()
    finally:
        profiler.stop()
    found += on_device(profiler.events())


def on_device(events: Sequence[object] | None) -> list[Interval]:
    """The intervals of kernels and copies among torch's profiler events; ranges that code has marked are none."""
    cuda = torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
    found = []
    for event in events or ():
        marked = getattr(event, "is_user_annotation", False)
        if getattr(event, "device_type", None) == cuda and not marked:
            span = event.time_range  # type: ignore[attr-defined]
            found.append((span.start * 1e-6, span.end * 1e-6))
    return found
