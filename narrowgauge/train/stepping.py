"""A run whose optimizer steps inside the backward pass (`step_in_backward`): what it excludes, and its one micro-batch of a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from narrowgauge.errors import ConfigError, NumericsError
from narrowgauge.optim import in_backward
from narrowgauge.optim.step_in_backward import InBackward
from narrowgauge.train.config.parallel_syntax import Layout
from narrowgauge.train.config.settings import TrainConfig

WORDS = {
    "": "is not clipped",
    "previous": "is clipped by the norm of the step before, or what the pass has shown so far",
    "two-pass": "is clipped by the norm of a first forward and backward pass",
    "parameter": "is clipped by its own norm",
}


def refuse(config: TrainConfig, layout: Layout) -> None:
    """ConfigError where ranks do not see whole gradients in backward. config: as it was given, with micro-batches of one rank."""
    if not config.step_in_backward:
        return
    if config.micro_batches > 1:
        raise ConfigError(
            f"step_in_backward = true: each backward pass steps at once, so the {config.micro_batches} micro_batches of a step cannot be "
            "summed. Take micro_batches = 1, with checkpointing if the batch does not fit."
        )
    if layout.world > 1 and (layout.fsdp == 1 or layout.tp * layout.pp > 1):
        raise ConfigError(
            f"step_in_backward = true: with parallel = {str(layout)!r} a gradient is not whole in backward, but summed over ranks later. "
            "Take parallel = 'fsdp', or leave one of them out."
        )


def begin(config: TrainConfig, optimizer: Any) -> InBackward | None:
    """Lets the optimizer step in backward if the run is to; it knows the norm of each step either way."""
    if not config.step_in_backward:
        return None
    clip: Any = config.clip_by or None
    return in_backward(optimizer, clip=clip, clip_norm=config.clip if clip else None, knows_norm=True)


def summary(config: TrainConfig) -> list[str]:
    """What a run says of it."""
    if not config.step_in_backward:
        return []
    return [f"Each parameter steps as soon as its gradient is whole, which {WORDS[config.clip_by]} and freed."]


def take(stepping: InBackward, backward: Callable[[], Tensor], between: Callable[[Tensor], None]) -> Tensor:
    """The pass, or the two passes, of a step; returns the loss. between: called with the loss of the first one before the second steps."""
    if not stepping.takes_two_passes:
        return backward()
    between(stepping.measure(backward))
    loss: Tensor = stepping.step_measured(backward)
    return loss


def lost(step: int, loss: float, norm: float) -> NumericsError | None:
    """What to raise after a pass that has stepped with numbers that are not finite."""
    if math.isfinite(loss) and math.isfinite(norm):
        return None
    return NumericsError(
        f"step {step}: loss {loss}, gradient norm {norm}. Parameters had stepped in backward before it was seen, so the weights "
        "in memory are lost; nothing was saved since the last checkpoint. Lower the learning rate, or resume with "
        "clip_by = 'two-pass', which finds the place before anything changes."
    )
