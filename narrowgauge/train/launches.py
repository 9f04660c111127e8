"""CUDA graphs of a run's steps, and messages about graphs, recompilation and GPU idle time."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from narrowgauge import cuda_graphs
from narrowgauge.diagnose import gpu_idle
from narrowgauge.errors import ConfigError
from narrowgauge.train.loss import Batch, check_labels

if TYPE_CHECKING:
    from narrowgauge.train.config.settings import TrainConfig
    from narrowgauge.train.console import Console
    from narrowgauge.train.metrics import MetricsLog

TARGETS = "targets of the step"  # extra input of a captured micro-batch
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
    """The GraphedStep of a run with device.cuda_graph = true.

    Otherwise None, and the optimizer's capturable flag is cleared.

    backward  f(micro-batch on the device, number of targets of the step as a 0-d tensor) -> loss
    recorder  replaces the CUDA recorder in tests without a GPU

    Raises ConfigError with all reasons for which the run cannot be captured.
    """
    if not config.cuda_graph:
        # Loading the checkpoint of a run with graphs sets the flag
        for group in optimizer.param_groups:
            if group.get("capturable"):
                group["capturable"], group["lr"] = False, float(group["lr"])
        return None
    if device.type == "cuda":
        cuda_graphs.make_capturable(optimizer, device)
    reasons = [] if recorder is not None else cuda_graphs.refuse(model, optimizer, device, scaler)
    if reasons:
        raise ConfigError(
            f"device.cuda_graph = true: {'; '.join(reasons)}. Train without --device.cuda-graph, or change that.",
            code="cuda-graphs.unsupported",
        )

    def call(**inputs: Tensor) -> Tensor:
        targets = inputs.pop(TARGETS)
        return backward(inputs, targets)

    return cuda_graphs.GraphedStep(
        model, optimizer, call, clip=config.clip or None, recorder=recorder
    )


def accumulate(
    step: cuda_graphs.GraphedStep, batch: Batch, targets: int, head: nn.Linear | None
) -> None:
    """Runs one micro-batch through the graph.

    head  head of the chunked loss; None: whole logits. Labels are checked here on the host, without
          a synchronisation.
    """
    if head is not None:
        check_labels(batch["labels"], head.weight.shape[0])
    # A tensor input: a captured graph would repeat the value of a Python number.
    step.accumulate({**batch, TARGETS: torch.tensor(float(targets))})


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Sets the learning rate of every group.

    A captured graph reads the rate from device memory, so tensors are filled in place.
    """
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


class LaunchMonitor:
    """Reports captured graphs, recompilations and the GPU idle time of one step.

    step     captured graphs of the run, or None
    refused  reason for which the run cannot use graphs, or ''
    """

    def __init__(
        self,
        config: TrainConfig,
        device: torch.device,
        step: cuda_graphs.GraphedStep | None,
        refused: str,
    ) -> None:
        self.config, self.device, self.step, self.refused = config, device, step, refused
        self._captured: dict[str, int] = {}
        self._noted = self._compiled = 0

    def measures(self, number: int) -> bool:
        """True if the idle time of step `number` is to be measured (launches_at).

        If this step also collects tensor statistics, the caller measures the next step instead.
        """
        return self.device.type == "cuda" and 0 < number == self.config.launches_at

    def measured(
        self, number: int, take: Callable[[], Taken], log: MetricsLog, show: Console
    ) -> Taken:
        """Runs a step, measures the idle time between its kernels, logs and prints it."""
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
        """Prints news after a step: captured graphs, shapes that stay eager, recompilations."""
        if self.step is not None:
            now, notes = self.step.graphs.captured, self.step.graphs.notes
            new = [
                f"{count} of {name}"
                for name, count in now.items()
                if count != self._captured.get(name, 0)
            ]
            if new:
                show.say(f"step {number}: CUDA graphs captured: {', '.join(new)}.")
            for note in notes[self._noted :]:
                show.say(f"step {number}: {note}")
            self._captured, self._noted = now, len(notes)
        if self.config.compile:
            count = compiled_graphs()
            # The first count is the expected compilation.
            if self._compiled and count > self._compiled:
                show.say(
                    f"step {number}: torch.compile made {count - self._compiled} graphs anew, {count} so far: shapes or settings "
                    "changed. TORCH_LOGS=recompiles names them."
                )
            self._compiled = count


def compiled_graphs() -> int:
    """Number of graphs that torch.compile has built in this process; 0 if nothing was compiled."""
    # Look up, do not import: importing Dynamo is slow and needless without torch.compile.
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else int(dynamo.counters["stats"]["unique_graphs"])
