"""A run that steps inside the backward pass (`step_in_backward`), or whose gradients wait for the step in FP8 (`held_gradients`).

What these exclude, what is said of them, and how a step of the first is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from torch import Tensor

from narrowgauge.errors import ConfigError, NumericsError
from narrowgauge.optim import hold_gradients, in_backward
from narrowgauge.optim.held_gradients import HeldGradients
from narrowgauge.optim.step_in_backward import InBackward
from narrowgauge.train.config.parallel_syntax import Layout
from narrowgauge.train.config.settings import TrainConfig, shown

WORDS = {
    "": "without clipping",
    "previous": "clipped by the norm of the step before, or of what the pass has shown so far if that is larger",
    "two-pass": "clipped by the norm of a first forward and backward pass",
    "parameter": "clipped by its own norm",
}


def refuse(config: TrainConfig, layout: Layout) -> None:
    """ConfigError where ranks do not see whole gradients in backward."""
    key = "step_in_backward" if config.step_in_backward else "held_gradients" if config.held_gradients == "fp8" else ""
    if key and layout.world > 1 and (layout.fsdp == 1 or layout.tp * layout.pp > 1):
        raise ConfigError(
            f"{key} = {shown(getattr(config, key))}: with parallel = {str(layout)!r} a gradient is not whole in backward, but summed "
            "over ranks later. Take parallel = 'fsdp', or leave one of them out."
        )


def begin(config: TrainConfig, optimizer: Any, passes: int) -> InBackward | HeldGradients | None:
    """Lets the optimizer step in backward, or hold gradients in FP8, if the run is to. passes: backward passes of a step on this rank."""
    if config.held_gradients == "fp8":
        return hold_gradients(optimizer, clip_norm=config.clip or None)
    if not config.step_in_backward:
        return None
    clip: Any = config.clip_by or None
    return in_backward(
        optimizer, accumulation=passes, clip=clip, clip_norm=config.clip if clip else None, knows_norm=True
    )


def summary(config: TrainConfig, begun: InBackward | HeldGradients | None) -> list[str]:
    """What a run says of it."""
    if isinstance(begun, HeldGradients):
        return [f"{begun.matrices} matrices hold their gradients in FP8 until the step, which decodes them one by one."]
    if begun is None:
        return []
    words = f"Each parameter steps, and its gradient is freed, as soon as that is whole: {WORDS[config.clip_by]}."
    return [words + (" Sums of micro-batches are held in FP8." if begun.accumulation > 1 else "")]


def take(stepping: InBackward, backward: Callable[[], Tensor], between: Callable[[Tensor], None]) -> Tensor:
    """`backward` once, or twice with two passes; returns its losses. between: called with those of the first before the second."""
    if not stepping.takes_two_passes:
        return backward()
    between(stepping.measure(backward))
    losses: Tensor = stepping.step_measured(backward)
    return losses


def lost(step: int, loss: float, norm: float) -> NumericsError | None:
    """What to raise after a pass that has stepped with numbers that are not finite."""
    if math.isfinite(loss) and math.isfinite(norm):
        return None
    return NumericsError(
        f"step {step}: loss {loss}, gradient norm {norm}. Parameters had stepped in backward before it was seen, so the weights "
        "in memory are lost; nothing was saved since the last checkpoint. Lower the learning rate, or resume with "
        "clip_by = 'two-pass', which finds the place before anything changes."
    )
