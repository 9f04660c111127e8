"""How the steps of a run are launched: as CUDA graphs if it asks for them, and what is said of graphs, recompiled code and idle time."""

import sys
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor, nn

from narrowgauge import cuda_graphs
from narrowgauge.diagnose import gpu_idle
from narrowgauge.errors import ConfigError
from narrowgauge.train.config.settings import TrainConfig
from narrowgauge.train.console import Console
from narrowgauge.train.loss import Batch, check_labels
from narrowgauge.train.metrics import MetricsLog

TARGETS = "targets of the step"  # among the inputs of a micro-batch
Taken = TypeVar("Taken")


def graphed_step(
    config: TrainConfig,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    scaler: object | None,
    device: torch.device,
    backward: Callable[[Batch, Tensor], Tensor],
    recorder: cuda_graphs.CudaRecorder | None = None,
) -> cuda_graphs.GraphedStep | None:
    """The GraphedStep of a run with cuda_graph = true; else None, and the optimizer's capturable is switched off.

    backward  of a micro-batch on the device and the number of targets in its step, a scalar
    Raises ConfigError with every reason.
    """
    if not config.cuda_graph:
        for group in optimizer.param_groups:  # a checkpoint of a run with graphs sets it
            if group.get("capturable"):
                group["capturable"], group["lr"] = False, float(group["lr"])
        return None
    if device.type == "cuda":
        cuda_graphs.make_capturable(optimizer, device)
    reasons = [] if recorder is not None else cuda_graphs.refuse(model, optimizer, device, scaler)
    if reasons:
        raise ConfigError(f"cuda_graph = true: {'; '.join(reasons)}. Train without --cuda-graph, or change that.")

    def call(**inputs: Tensor) -> Tensor:
        targets = inputs.pop(TARGETS)
        return backward(inputs, targets)

    return cuda_graphs.GraphedStep(model, optimizer, call, clip=config.clip or None, recorder=recorder)


def accumulate(step: cuda_graphs.GraphedStep, batch: Batch, targets: int, head: nn.Linear | None) -> None:
    """One micro-batch. head: that of the chunked loss; its labels are checked here, on the host, without a synchronisation."""
    if head is not None:
        check_labels(batch["labels"], head.weight.shape[0])
    step.accumulate({**batch, TARGETS: torch.tensor(float(targets))})


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the learning rate of every group in place: a graph reads it from the device."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


class LaunchMonitor:
    """step: the graphs of the run's steps, or None. refused: why the run cannot have them, or ''."""

    def __init__(
        self, config: TrainConfig, device: torch.device, step: cuda_graphs.GraphedStep | None, refused: str
    ) -> None:
        self.config, self.device, self.step, self.refused = config, device, step, refused
        self._captured: dict[str, int] = {}
        self._noted = self._compiled = 0

    def measures(self, number: int) -> bool:
        """Whether the idle time is to be measured in step `number`; in the next one if that step's tensors are read."""
        return self.device.type == "cuda" and 0 < number == self.config.launches_at

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
            now, notes = self.step.graphs.captured, self.step.graphs.notes
            new = [f"{count} of {name}" for name, count in now.items() if count != self._captured.get(name, 0)]
            if new:
                show.say(f"step {number}: CUDA graphs captured: {', '.join(new)}.")
            for note in notes[self._noted :]:
                show.say(f"step {number}: {note}")
            self._captured, self._noted = now, len(notes)
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
