"""Runs with `held_gradients` other than 16bit: restrictions, messages and backward passes.

"none" updates each parameter inside backward. "fp8" stores gradients in FP8 until the optimizer
step.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor

from narrowgauge.errors import ConfigError, NumericsError
from narrowgauge.optim import hold_gradients, in_backward
from narrowgauge.optim.held_gradients import HeldGradients
from narrowgauge.train.config.settings import TrainConfig, shown

if TYPE_CHECKING:
    from narrowgauge.optim.step_in_backward import InBackward
    from narrowgauge.train.config.parallel_syntax import Layout

WORDS = {
    "": "without clipping",
    "previous": "clipped by the norm of the step before, or of what the pass has shown so far if that is larger",
    "two-pass": "clipped by the norm of a first forward and backward pass",
    "parameter": "clipped by its own norm",
}


def refuse(config: TrainConfig, layout: Layout) -> None:
    """Raises ConfigError if the layout sums gradients over ranks only after backward."""
    # FSDP2 alone reduces gradients inside backward. Hooks under DDP see gradients before they are
    # summed over ranks.
    held = config.held_gradients
    if held != "16bit" and layout.world > 1 and (layout.fsdp == 1 or layout.tp * layout.pp > 1):
        raise ConfigError(
            f"optimizer.held_gradients = {shown(held)}: with parallel = {str(layout)!r} a gradient is not whole in backward, but "
            "summed "
            "over ranks later. Take parallel = 'fsdp', or leave one of them out.",
            code="in-backward.parallel",
        )


def begin(config: TrainConfig, optimizer: Any, passes: int) -> InBackward | HeldGradients | None:
    """Registers hooks for step-in-backward or FP8 gradient storage; None if the run has neither.

    passes  backward passes per step on this rank
    """
    if config.held_gradients == "fp8":
        return hold_gradients(optimizer, clip_norm=config.clip or None)
    if not config.step_in_backward:
        return None
    clip: Any = config.clip_by or None
    return in_backward(
        optimizer,
        accumulation=passes,
        clip=clip,
        clip_norm=config.clip if clip else None,
        knows_norm=True,
    )


def summary(config: TrainConfig, begun: InBackward | HeldGradients | None) -> list[str]:
    """Sentences that the run prints about step-in-backward or FP8 gradient storage."""
    if isinstance(begun, HeldGradients):
        return [
            f"{begun.matrices} matrices hold their gradients in FP8 until the step, which decodes them one by one."
        ]
    if begun is None:
        return []
    words = f"Each parameter steps, and its gradient is freed, as soon as that is whole: {WORDS[config.clip_by]}."
    return [words + (" Sums of micro-batches are held in FP8." if begun.accumulation > 1 else "")]


def take(
    stepping: InBackward, backward: Callable[[], Tensor], between: Callable[[Tensor], None]
) -> Tensor:
    """Runs `backward` once, or twice with two-pass clipping. Returns the losses of the last pass.

    between  called with the losses of the measuring pass, before the pass that updates parameters
    """
    if not stepping.takes_two_passes:
        return backward()
    between(stepping.measure(backward))
    # Second pass on the same batch and random draws, now with updates.
    losses: Tensor = stepping.step_measured(backward)
    return losses


def lost(step: int, loss: float, norm: float) -> NumericsError | None:
    """Returns the error to raise if a step in backward had a non-finite loss or norm, else None."""
    if math.isfinite(loss) and math.isfinite(norm):
        return None
    return NumericsError(
        f"step {step}: loss {loss}, gradient norm {norm}. Parameters had stepped in backward before it was seen, so the weights "
        "in memory are lost; nothing was saved since the last checkpoint. Lower the learning rate, or resume with "
        "optimizer.clip_by = 'two-pass', which finds the place before anything changes.",
        code="loss.not-finite",
    )
