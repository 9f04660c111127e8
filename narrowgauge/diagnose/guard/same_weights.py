"""Gradients at the first step of a check, where narrow numbers and BF16 have the same weights, the same batch and the same draws.

    slope = <g_narrow, g_wide> / <g_wide, g_wide>         of each Linear's weight, over SAMPLE of its elements

Recipes without bias have slopes near 1, stochastic ones too: noise has no direction. A layer that gives nothing has 0, dropped columns
less than 1, a window that saturates anything. Where gradients are clipped all slopes have one more factor, that of the clipping, so they
are divided by their median.

A weight is outside where its slope is not within LOW and HIGH. Measured on the models of benchmarks/guard_planted.py, lowest and highest
of 14 weights at 8 checks of four seeds: FP8 recipes 0.87 to 1.10, nvfp4 0.67 to 1.38, int4-hq-bs 0.47 to 1.86; INT4 per tensor -18 to 26,
dropped columns -204 to 122, a dead layer 0, saturating windows beyond 100.

The gradient is read before the optimizer steps, by a hook of torch's (`register_step_pre_hook`), so it is the one that the step uses: of
all micro-batches and ranks, clipped. Of a DTensor it is this rank's part; dot products are summed over all ranks, so all have one result.
Where the optimizer has no gradients then (steps in backward, gradients held in FP8), `unseen` says why.

    cost   a sample of both, 4 bytes an element: at most 32 KiB a weight, in the host's memory; one wait for the device each
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from narrowgauge.diagnose.format_text import plural, size
from narrowgauge.diagnose.guard.refusals import is_narrow
from narrowgauge.nn.linear import QLinear
from narrowgauge.optim import shards
from narrowgauge.optim.base import NarrowOptimizer
from narrowgauge.structure import plain_name

SAMPLE = 4096  # elements of a weight: the slope of noise alone, as large as the gradient, is 0 +- 0.016
LOW, HIGH = 1 / 4, 4

Samples = dict[str, Tensor]  # of gradients by weight, [at most SAMPLE] float32 in the host's memory


class FirstGradients:
    """Samples of the gradients of the next step that an optimizer takes. Close it, or use it in a `with`, or its hooks stay."""

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.samples: Samples = {}
        self._model = model
        self._handles = [each.register_step_pre_hook(self._look) for each in _optimizers(optimizer) if not _hides(each)]

    @_disable_dynamo
    @torch.no_grad()
    def _look(self, *_: Any) -> None:
        if self.samples:  # of the first step; what another optimizer steps had its gradient then as well
            return
        for name, weight in _weights(self._model).items():
            if weight.grad is not None and (gradient := shards.local_gradient(weight)) is not None:
                self.samples[name] = _sample(gradient)

    def close(self) -> None:
        for each in self._handles:
            each.remove()
        self._handles.clear()

    def __enter__(self) -> FirstGradients:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def slopes(narrow: Samples, wide: Samples) -> dict[str, float]:
    """Of each weight that has a gradient in both, divided by what is common to all; over all ranks, each of which has to call this.

    Left out: weights whose gradient in BF16 is zero, and those where either is not finite.
    """
    products = {
        name: (float(narrow[name].double() @ each.double()), float(each.double().square().sum()))
        for name, each in wide.items()
        if name in narrow and narrow[name].shape == each.shape
    }
    found = {name: dot / square for name, (dot, square) in _of_all_ranks(products).items() if square > 0}
    found = {name: slope for name, slope in found.items() if math.isfinite(slope)}
    common = [abs(slope) for slope in found.values() if slope]
    factor = statistics.median_low(common) if common else 1.0
    return {name: slope / factor for name, slope in found.items()}


def outside(found: Mapping[str, float]) -> dict[str, float]:
    """Those that are not within LOW and HIGH, the farthest first."""
    return dict(
        sorted(
            ((name, slope) for name, slope in found.items() if not LOW <= slope <= HIGH),
            key=lambda item: -abs(math.log(max(item[1], 1e-6))),
        )
    )


def unseen(model: nn.Module, optimizer: Any) -> str:
    """Why gradients are not compared, a sentence, or ''."""
    reasons = [_hides(each) for each in _optimizers(optimizer)]
    if reasons and all(reasons):
        return reasons[0]
    return "" if _weights(model) else "weights grow into the learned steps of their recipe, or do not train."


def words(model: nn.Module, optimizer: Any) -> str:
    """What is compared at the first step of a check and what it takes, a sentence."""
    if reason := unseen(model, optimizer):
        return f"Gradients are not compared: {reason}"
    weights = _weights(model).values()
    nbytes = sum(8 * min(shards.local(each).numel(), SAMPLE) for each in weights)
    return (
        f"At its first step the gradients of {plural(len(weights), 'weight')} are compared, samples of {size(nbytes)}."
    )


def _optimizers(optimizer: Any) -> list[Any]:
    """Those that step: of a wrapper, such as accelerate's, what it holds."""
    found = []
    for each in optimizer if isinstance(optimizer, list | tuple) else [optimizer]:
        while isinstance(inner := getattr(each, "optimizer", None), torch.optim.Optimizer):
            each = inner
        found.append(each)
    return found


def _hides(optimizer: Any) -> str:
    """Why one optimizer has no gradients before its step."""
    if isinstance(optimizer, NarrowOptimizer) and optimizer.stepping is not None:
        return "parameters step in backward, and free them there."
    if isinstance(optimizer, NarrowOptimizer) and optimizer.holding is not None:
        return "they are held in FP8 until the step."
    if not isinstance(optimizer, torch.optim.Optimizer):
        return f"{type(optimizer).__name__} is none of torch's optimizers, and has no hook before its step."
    return ""


def _weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Of the Linears on narrow numbers that train, by their layer's name without what wrappers add; each once.

    Not of recipes that learn steps: what lies beyond a step has no gradient there, by design, and BF16 has another function of it.
    """
    found: dict[str, nn.Parameter] = {}
    seen = set[int]()
    for name, module in model.named_modules():
        recipe = module.recipe if isinstance(module, QLinear) else None
        weight = module.weight if recipe is not None and is_narrow(recipe) and not recipe.steps() else None
        if isinstance(weight, nn.Parameter) and weight.requires_grad and id(weight) not in seen:
            seen.add(id(weight))
            found[plain_name(name)] = weight
    return found


def _sample(gradient: Tensor) -> Tensor:
    """Every so many elements, on the host; a stride that meets each column of a matrix."""
    columns, stride = gradient.shape[-1], -(-gradient.numel() // SAMPLE)
    while math.gcd(stride, columns) > 1:
        stride += 1
    return gradient.flatten()[:: max(stride, 1)].to("cpu", torch.float32, copy=True)


def _of_all_ranks(own: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """Sums by weight: copies add up as often in both products, shards to the whole."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return own
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, own)
    total: dict[str, tuple[float, float]] = {}
    for each in told:
        for name, (dot, square) in each.items():
            before = total.get(name, (0.0, 0.0))
            total[name] = before[0] + dot, before[1] + square
    return total
