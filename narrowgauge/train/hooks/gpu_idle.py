"""Reports how the steps of a run are launched: captured CUDA graphs, recompilations, idle time of the GPU."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from narrowgauge import cuda_graphs
from narrowgauge.diagnose import gpu_idle
from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.console import Console
from narrowgauge.train.metrics import MetricsLog

Taken = TypeVar("Taken")


@dataclass
class LaunchMonitor:
    """step: the graphs of the run's steps, or None. refused: why the run cannot have them, or ''."""

    config: TrainConfig
    device: torch.device
    step: cuda_graphs.GraphedStep | None
    refused: str = ""
    _captured: dict[str, int] = field(default_factory=dict)
    _noted: int = 0
    _compiled: int = 0

    def facts(self) -> dict[str, int]:
        """For the log of a step: how many graphs torch.compile has made so far, in a run that compiles."""
        return {"compiled_graphs": compiled_graphs()} if self.config.compile else {}

    def measures(self, number: int) -> bool:
        """Whether the idle time of step `number` is measured."""
        return self.device.type == "cuda" and number == self.config.launches_at

    def measured(self, number: int, take: Callable[[], Taken], log: MetricsLog, show: Console) -> Taken:
        """Takes a step, measures the idle time between its kernels, and reports it."""
        with gpu_idle.watched() as intervals:
            taken = take()
        found = gpu_idle.measure(intervals)
        if found is None:
            show.say(f"step {number}: the profiler saw no kernel, so idle time is not known.")
            return taken
        sentences = gpu_idle.advice(
            found, graphs=self.step is not None, graphs_refused=self.refused, compiled=self.config.compile,
            micro_batches=self.config.micro_batches,
        )  # fmt: skip
        log.write(
            "launches", number, words=str(found), advice=sentences, idle=found.idle, kernels=found.kernels, span_s=found.span_s,
            launching_s=found.launching_s, waiting_s=found.waiting_s, median_kernel_s=found.median_kernel_s,
        )  # fmt: skip
        show.say(f"step {number}: {found}. {' '.join(sentences)}".rstrip())
        return taken

    def report(self, number: int, show: Console) -> None:
        """Prints what is new after a step: captured graphs, shapes that stay eager, recompiled code."""
        if self.step is not None:
            now = self.step.graphs.captured
            new = [f"{count} of {name}" for name, count in now.items() if count != self._captured.get(name, 0)]
            if new:
                show.say(f"step {number}: CUDA graphs captured: {', '.join(new)}.")
            for note in self.step.graphs.notes[self._noted :]:
                show.say(f"step {number}: {note}")
            self._captured, self._noted = now, len(self.step.graphs.notes)
        if self.config.compile:
            count = compiled_graphs()
            if self._compiled and count > self._compiled:
                show.say(
                    f"step {number}: torch.compile made {count - self._compiled} graphs anew, {count} so far: shapes or settings "
                    "changed. TORCH_LOGS=recompiles names them."
                )
            self._compiled = count


def compiled_graphs() -> int:
    """Graphs that torch.compile has made in this process; 0 where nothing was compiled."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])
