"""GPU idle time: the share of a step in which no kernel runs, and advice on how to lower it.

    gap      time between the end of all kernels so far and the start of the next one
    idle     sum of the gaps / time from the start of the first kernel to the end of the last

A gap shorter than LONG_S means that the host launches kernels more slowly than they run. In a
longer gap the host does something else: it reads data, waits for a result, or saves. The remedies
differ, so the two are counted separately.
"""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

LONG_S = 1e-3  # a PyTorch operation costs the host 5 to 100 us
BOUND = 0.1  # share of a step above which advice is given

Interval = tuple[float, float]  # seconds, on one clock


@dataclass(frozen=True, kw_only=True)
class Launches:
    """Kernels of a step and the gaps between them.

    span_s          from the start of the first kernel to the end of the last
    launching_s     sum of the gaps shorter than LONG_S
    waiting_s       sum of the longer gaps
    """

    kernels: int
    span_s: float
    launching_s: float
    waiting_s: float
    median_kernel_s: float
    longest_gap_s: float

    def share(self, seconds: float) -> float:
        return seconds / self.span_s if self.span_s else 0.0

    @property
    def idle(self) -> float:
        """Share of the span in which nothing ran."""
        return self.share(self.launching_s + self.waiting_s)

    @property
    def is_launch_bound(self) -> bool:
        return self.launching_s > BOUND * self.span_s

    @property
    def waits(self) -> bool:
        return self.waiting_s > BOUND * self.span_s

    def __str__(self) -> str:
        return (
            f"the GPU was idle for {self.idle:.0%} of a step of {1e3 * self.span_s:.3g} ms, between {self.kernels} kernels of "
            f"{1e6 * self.median_kernel_s:.3g} us (median): {self.share(self.launching_s):.0%} in gaps of a launch, "
            f"{self.share(self.waiting_s):.0%} in gaps of more than {1e3 * LONG_S:g} ms"
        )


def measure(intervals: Iterable[Interval]) -> Launches | None:
    """Measure the kernels of one device, in any order, overlapping or not.

    Returns None if there is no kernel. O(n log n).
    """
    ordered = sorted(intervals)
    if not ordered:
        return None
    reached = ordered[0][0]
    gaps: list[float] = []
    for begins, ends in ordered:
        if begins > reached:
            gaps.append(begins - reached)
        # Kernels of several streams overlap: a gap counts only if no earlier kernel is still
        # running.
        reached = max(reached, ends)
    return Launches(
        kernels=len(ordered),
        span_s=reached - ordered[0][0],
        launching_s=sum(gap for gap in gaps if gap < LONG_S),
        waiting_s=sum(gap for gap in gaps if gap >= LONG_S),
        median_kernel_s=statistics.median(ends - begins for begins, ends in ordered),
        longest_gap_s=max(gaps, default=0.0),
    )


def advice(
    found: Launches,
    *,
    graphs: bool = False,
    graphs_refused: str = "",
    compiled: bool = False,
    micro_batches: int = 1,
) -> list[str]:
    """Sentences on possible changes, the most effective first; [] if the GPU is busy.

    graphs          True if steps run as CUDA graphs
    graphs_refused  reason why steps cannot run as CUDA graphs, or ''
    """
    sentences = []
    if found.is_launch_bound:
        if not graphs and not graphs_refused:
            sentences.append("Launch steps as CUDA graphs: --device.cuda-graph.")
        elif not graphs:
            sentences.append(f"CUDA graphs would help, but cannot be had: {graphs_refused}.")
        if micro_batches > 1:
            sentences.append(
                f"Take fewer accumulation steps: batch.micro_batches = {micro_batches} makes micro-batches too small; lower it as far "
                "as memory allows (checkpointing and 8-bit states free some)."
            )
        else:
            sentences.append("Take a larger micro-batch: the same launches then do more work.")
        if not compiled:
            sentences.append("Compile the model, which fuses small kernels: --device.compile.")
    if found.waits:
        sentences.append(
            f"The GPU waits up to {1e3 * found.longest_gap_s:.3g} ms at a time for the host. Move data loading, .item() calls and "
            "checkpoint writes out of the step."
        )
    return sentences


@contextmanager
def watched() -> Iterator[list[Interval]]:
    """Collect the intervals of CUDA kernels and copies in a block; the list is filled at exit.

    Synchronizes at both ends. Profiling costs the host microseconds per launch, so the measured
    idle time is an upper bound.
    """
    found: list[Interval] = []
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        # torch 2.11 warns that it drops the events of earlier cycles; there are none.
        warnings.filterwarnings("ignore", "Warning: Profiler clears events", UserWarning)
        profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
        profiler.start()
    try:
        yield found
        torch.cuda.synchronize()
    finally:
        profiler.stop()
    found += on_device(profiler.events())


def on_device(events: Sequence[Any] | None) -> list[Interval]:
    """Intervals of kernels and copies among torch profiler events, without user annotations."""
    cuda = torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
    return [
        (event.time_range.start * 1e-6, event.time_range.end * 1e-6)
        for event in events or ()
        if event.device_type == cuda and not event.is_user_annotation
    ]
