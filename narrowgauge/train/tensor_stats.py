"""Statistics of a few chosen tensors at chosen steps: what the format makes of x, w and gy.

Three Linears are looked at: the first, the middle and the last of the quantized ones. An observer on each sees the operands of
its products as they are, so nothing is computed twice; only the first micro-batch of the step is counted.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.diagnose.statistics import tensor_statistics
from narrowgauge.nn.linear import QLinear
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Gemm
from narrowgauge.scaling import times_scale
from narrowgauge.train.console import Console
from narrowgauge.train.metrics import MetricsLog

WHERE = {("output", "x"), ("output", "w"), ("grad_input", "gy")}


Events = dict[tuple[str, str], dict[str, Any]]  # (module, role) -> a `tensor` event


class NonfiniteAmax:
    """Logs amax readings that were not finite, once for each more."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str], int] = {}

    def report(self, step: int, counts: dict[tuple[str, str], int], log: MetricsLog, show: Console) -> None:
        """counts: as `narrowgauge.conversion.nonfinite_amax` has them, of all stages."""
        for (module, role), count in counts.items():
            if count > self.counts.get((module, role), 0):
                log.write("nonfinite_amax", step, module=module, role=role, count=count)
                show.say(
                    f"step {step}: amax of {role} in {module} was not finite in {count} steps; kept out of its window"
                )
        self.counts = counts


@contextmanager
def watched(model: nn.Module) -> Iterator[Events]:
    """Inside the block, operands of the chosen layers are noted."""
    events: Events = {}
    layers = {name: each for name, each in model.named_modules() if isinstance(each, QLinear)}
    names = [name for name, each in layers.items() if each.recipe is not None and each.recipe.output != Gemm()]
    chosen = {names[place] for place in (0, len(names) // 2, -1)} if names else set()
    try:
        for name in chosen:
            layers[name].observer = partial(_note, events, name)
        yield events
    finally:
        for name in chosen:
            layers[name].observer = None


def _note(events: Events, module: str, gemm: str, role: str, original: Tensor, operand: QTensor | Tensor) -> None:
    if (module, role) not in events and (gemm, role) in WHERE and isinstance(operand, QTensor):
        events[module, role] = {"module": module, "role": role, **operand_statistics(original, operand)}


def operand_statistics(original: Tensor, operand: QTensor) -> dict[str, Any]:
    """A `tensor` event (docs/architecture.md). With many tiles, `scale` is the largest one."""
    format = operand.cast.format
    scales = operand.full_scale()
    spread = times_scale(torch.ones(operand.shape, device=operand.device), scales, operand.cast.tile)
    found = tensor_statistics(original, format.max, format.smallest, spread)
    return {"format": format.name, "scale": float(scales.max()), **found}
