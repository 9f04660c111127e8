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

WHERE = {("output", "x"), ("output", "w"), ("grad_input", "gy")}


Events = dict[tuple[str, str], dict[str, Any]]  # (module, role) -> a `tensor` event


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
