"""Compare gradients at the first step of a check, where run and BF16 have the same weights.

    slope = <g_run, g_bf16> / <g_bf16, g_bf16>         of each Linear's weight, over SAMPLE elements

Batch and random numbers are the same too. Recipes without bias have slopes near 1, including
stochastic ones, whose noise has no direction. A dead layer has slope 0, dropped columns give less
than 1, a saturating amax history gives any value. Slopes are divided by their median: under norm
clipping one huge gradient scales down all others, so that the faulty weight has a slope of 4 and
sound ones 0.04.

A weight is "outside" if its slope is not within LOW and HIGH. Lowest and highest slopes on the
models of benchmarks/guard_planted.py, 14 weights at 8 checks of four seeds: FP8 recipes 0.87 to
1.10, nvfp4 0.67 to 1.38, int4-hq-bs 0.47 to 1.86; INT4 per tensor -18 to 26, dropped columns -204
to 122, a dead layer 0, saturating amax histories beyond 100.

A torch hook (`register_step_pre_hook`) reads the gradient before the optimizer steps, so it is the
one that the step uses: over all micro-batches and ranks, and clipped. Of a DTensor it is this
rank's shard; dot products are summed over all ranks, so all ranks get one result. If the optimizer
has no gradients then (steps in backward, gradients stored in FP8), `unseen` gives the reason.

Costs a sample of both gradients: at most 32 KiB per weight in host memory, and one synchronisation
each.
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
from narrowgauge.errors import Reason
from narrowgauge.lab.guard.refusals import is_narrow
from narrowgauge.nn.narrow_layer import matrices, narrow_layers, words_on_unknown
from narrowgauge.optim import shards
from narrowgauge.optim.base import LowPrecisionOptimizer
from narrowgauge.structure import plain_name

# Elements of a weight. Noise as large as the gradient, without signal, has slope 0 +- 0.016.
SAMPLE = 4096
LOW, HIGH = 1 / 4, 4

Samples = dict[str, Tensor]  # weight -> gradient sample, [at most SAMPLE] float32 on the host


class FirstGradients:
    """Samples of the gradients of the next optimizer step.

    Close it, or use it in a `with` block, to remove its hooks.
    """

    def __init__(self, model: nn.Module, optimizer: Any) -> None:
        self.samples: Samples = {}
        self._model = model
        self._handles = [each.register_step_pre_hook(self._look) for each in hooked(optimizer)]

    @_disable_dynamo
    @torch.no_grad()
    def _look(self, *_: Any) -> None:
        # First step only; with several optimizers all gradients exist at the first one's step.
        if self.samples:
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
    """Slope of each weight with a gradient in both, divided by the common factor.

    A collective call over all ranks. Skips weights whose BF16 gradient is zero, and those where
    either gradient is not finite.
    """
    products = {
        # float64: sums of up to 4,096 float32 products.
        name: (float(narrow[name].double() @ each.double()), float(each.double().square().sum()))
        for name, each in wide.items()
        if name in narrow and narrow[name].shape == each.shape
    }
    found = {
        name: dot / square for name, (dot, square) in _of_all_ranks(products).items() if square > 0
    }
    found = {name: slope for name, slope in found.items() if math.isfinite(slope)}
    common = [abs(slope) for slope in found.values() if slope]
    # The lower median: of two weights the larger slope may be the faulty one.
    factor = statistics.median_low(common) if common else 1.0
    return {name: slope / factor for name, slope in found.items()}


def outside(found: Mapping[str, float]) -> dict[str, float]:
    """Slopes that are not within LOW and HIGH, the farthest first."""
    return dict(
        sorted(
            ((name, slope) for name, slope in found.items() if not LOW <= slope <= HIGH),
            key=lambda item: -abs(math.log(max(item[1], 1e-6))),
        )
    )


def unseen(model: nn.Module, optimizer: Any) -> str:
    """Sentence on the reason why gradients are not compared, or ''."""
    reasons = [_hides(each) for each in _optimizers(optimizer)]
    if reasons and all(reasons):
        return reasons[0]
    return (
        ""
        if _weights(model)
        else Reason(
            "learned-steps", "weights grow into the learned steps of their recipe, or do not train."
        )
    )


def words(model: nn.Module, optimizer: Any) -> str:
    """Sentences on the gradients compared at the first step of a check, and on their memory.

    Followed by one on modules of other libraries that no check judges, if there are some.
    """
    unknown = words_on_unknown(model)
    said = _on_gradients(model, optimizer)
    return Reason(getattr(said, "code", ""), f"{said} {unknown}") if unknown else said


def _on_gradients(model: nn.Module, optimizer: Any) -> str:
    if reason := unseen(model, optimizer):
        return Reason(getattr(reason, "code", ""), f"Gradients are not compared: {reason}")
    weights = _weights(model).values()
    nbytes = sum(8 * min(shards.local(each).numel(), SAMPLE) for each in weights)
    return f"At its first step the gradients of {plural(len(weights), 'weight')} are compared, samples of {size(nbytes)}."


def _optimizers(optimizer: Any) -> list[Any]:
    """Optimizers that step; wrappers such as accelerate's are unwrapped."""
    found = []
    for each in optimizer if isinstance(optimizer, list | tuple) else [optimizer]:
        while isinstance(inner := getattr(each, "optimizer", None), torch.optim.Optimizer):
            each = inner
        found.append(each)
    return found


def hooked(optimizer: Any) -> list[torch.optim.Optimizer]:
    """Optimizers that have gradients and a hook before their step."""
    return [each for each in _optimizers(optimizer) if not _hides(each)]


def _hides(optimizer: Any) -> str:
    """Reason why an optimizer has no gradients before its step, or ''."""
    if isinstance(optimizer, LowPrecisionOptimizer) and optimizer.stepping is not None:
        return Reason("in-backward", "parameters step in backward, and free them there.")
    if isinstance(optimizer, LowPrecisionOptimizer) and optimizer.holding is not None:
        return Reason("held", "they are held in FP8 until the step.")
    if not isinstance(optimizer, torch.optim.Optimizer):
        return Reason(
            "no-hook",
            f"{type(optimizer).__name__} is none of torch's optimizers, and has no hook before its step.",
        )
    return ""


def _weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Trained weights of low-precision Linears, by their layer's name without wrappers; each once.

    Skips recipes with learned steps: elements beyond a step have no gradient there by design, so
    BF16 computes another function.
    """
    found: dict[str, nn.Parameter] = {}
    seen = set[int]()
    for name, layer in narrow_layers(model):
        recipe = layer.recipe
        if recipe is None or not is_narrow(recipe) or recipe.learned_steps():
            continue
        for own, weight in matrices(layer):
            if isinstance(weight, nn.Parameter) and weight.requires_grad and id(weight) not in seen:
                seen.add(id(weight))
                found[".".join(filter(None, (plain_name(name), own)))] = weight
    return found


def _sample(gradient: Tensor) -> Tensor:
    """Strided sample of a gradient, on the host."""
    columns, stride = gradient.shape[-1], -(-gradient.numel() // SAMPLE)
    # Coprime to the number of columns: a stride of 64 over 64 columns would sample a single column.
    while math.gcd(stride, columns) > 1:
        stride += 1
    return gradient.flatten()[:: max(stride, 1)].to("cpu", torch.float32, copy=True)


def _of_all_ranks(own: dict[str, tuple[float, float]]) -> dict[str, tuple[float, float]]:
    """Sums over ranks, by weight.

    Copies add equally to both products, and shards add up to the whole.
    """
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
