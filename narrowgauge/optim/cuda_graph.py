"""Optimizer step inside a CUDA graph: step-dependent numbers are read from GPU memory.

    replayed = optimizer.replayable()
    with torch.cuda.graph(graph):
        loss = step_of_the_model()              # gradients stay at these addresses for every replay
        replayed.capture()                      # instead of optimizer.step()
    for batch in batches:
        replayed.before_replay()                # counts the step and sends its numbers
        graph.replay()

The results are bit-identical to `step`. The host computes the numbers and sends them in one copy in
stream order, without a sync.

The Triton kernel must step every parameter. One ordinary step of all captured parameters must come
first: it compiles and checks the kernels and writes their tables.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor

from narrowgauge.addresses import identity
from narrowgauge.errors import ConfigError, Reason
from narrowgauge.optim import shards


class ReplayedStep:
    """Captured step of a `base.LowPrecisionOptimizer`; see the module for its use.

    It keeps the gradients, weights and states of the capture alive, as the graph itself does.
    """

    def __init__(self, optimizer: Any) -> None:
        self._optimizer = optimizer
        self._chosen: list[tuple[Tensor, dict[str, Any], int]] = []
        self._gradients: list[Tensor] = []
        self._captured: dict[torch.device, list[Any]] = {}  # of `triton.launch.Batch`
        counts = Counter(parameter.device for parameter, _, _ in optimizer._indexed())
        # Upper bound: one batch per parameter, with 16 numbers of a head, one gradient address and
        # one number of padding.
        self._step_args = {
            device: torch.zeros(18 * count, dtype=torch.int64, device=device)
            for device, count in counts.items()
        }

    def refuse(self) -> str:
        """Reason why the step cannot be captured now (a clause), or ''. No host sync."""
        optimizer = self._optimizer
        if optimizer.casting is not None:
            return Reason(
                "casts-weights",
                "the step casts weights as well, which a graph would repeat unasked; call cast_weights(None) first",
            )
        for parameter, _, _ in optimizer._indexed():
            if parameter.grad is None:
                continue
            param_step, which = (
                optimizer._param_steps.get(parameter),
                f"a parameter of {list(parameter.shape)}",
            )
            if param_step is None or param_step.backend is None:
                return f"{which} has never stepped; run one step before the capture"
            gradient = shards.local_gradient(parameter)
            if (
                gradient is None
                or not gradient.is_contiguous()
                or identity(param_step.weight) != param_step.address
            ):
                return f"{which}, or its gradient, is not contiguous; make it so before the optimizer is built"
            if param_step.backend[1].kernel.name != "triton":
                by = optimizer.computed_by(parameter)
                return f"{which} on {parameter.device} is stepped by {by}, which works out its numbers on the host"
        return ""

    @torch.no_grad()
    def capture(self) -> None:
        """Launch the step of every parameter with a gradient into the graph that is being captured.

        Nothing is computed before the graph is replayed. Raises ConfigError for the reasons of
        `refuse`.
        """
        from narrowgauge.optim.triton import launch

        optimizer = self._optimizer
        if reason := self.refuse():
            raise ConfigError(
                f"{type(optimizer).__name__}.capture: {reason}. Or leave the optimizer out of the graph, and call step() after each "
                "replay.",
                code="optim.capture",
            )
        self._chosen = [each for each in optimizer._indexed() if each[0].grad is not None]
        # The capture computes nothing, so it must not count as a step.
        param_steps = optimizer._next(self._chosen, counts=False)
        for (parameter, _, _), each in zip(self._chosen, param_steps, strict=True):
            each.gradient = shards.local_gradient(parameter)
        self._gradients = [each.gradient for each in param_steps if each.gradient is not None]
        # makes=False: new tables would be copied to the GPU inside the capture.
        self._captured = launch.batches_of(param_steps, optimizer._kept, makes=False)
        for device, batches in self._captured.items():
            launch.run(batches, self._step_args[device])
        for each in param_steps:
            each.gradient = None

    @torch.no_grad()
    def before_replay(self) -> None:
        """Count the step and send its learning rate, corrections and noise key to the GPU."""
        from narrowgauge.optim.triton import launch

        if not self._captured:
            raise ConfigError(
                f"{type(self._optimizer).__name__}.before_replay: nothing was captured. Call capture() inside torch.cuda.graph.",
                code="optim.not-captured",
            )
        param_steps = self._optimizer._next(self._chosen)
        self._optimizer.record_learning_rates()
        for each, gradient in zip(param_steps, self._gradients, strict=True):
            each.gradient = gradient
        for device, batches in self._captured.items():
            numbers = torch.tensor(launch.step_args_of(batches), dtype=torch.int64, device="cpu")
            # Only a copy from pinned memory is asynchronous.
            sent = numbers.pin_memory() if device.type == "cuda" else numbers
            self._step_args[device][: len(numbers)].copy_(sent, non_blocking=True)
        # Replayed kernels write weights without autograd, so versions are raised by hand.
        torch.autograd.graph.increment_version([parameter for parameter, _, _ in self._chosen])
        for each in param_steps:
            each.gradient = None
