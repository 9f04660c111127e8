"""Statistics of a few chosen tensors at chosen steps: what the format makes of x, w and gy.

Three Linears are looked at: the first, the middle and the last of the quantized ones. An observer on each sees the operands of
its products as they are, so nothing is computed twice; only the first micro-batch of the step is counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.diagnose.statistics import tensor_statistics
from narrowgauge.nn.linear import Observer, QLinear
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Gemm
from narrowgauge.scaling import times_scale

WHERE = {("output", "x"), ("output", "w"), ("grad_input", "gy")}


@contextmanager
def watched(model: nn.Module) -> Iterator[list[dict[str, Any]]]:
    """Inside the block, operands of the chosen layers are noted; the list holds the events once it is left."""
    events: list[dict[str, Any]] = []
    layers = _chosen(model)
    try:
        for name, layer in layers:
            layer.observer = _noting(name, events)
        yield events
    finally:
        for _, layer in layers:
            layer.observer = None


def _chosen(model: nn.Module) -> list[tuple[str, QLinear]]:
    quantized = [
        (name, layer)
        for name, layer in model.named_modules()
        if isinstance(layer, QLinear) and layer.recipe is not None and layer.recipe.output != Gemm()
    ]
    return [quantized[place] for place in sorted({0, len(quantized) // 2, len(quantized) - 1})] if quantized else []


def _noting(module: str, events: list[dict[str, Any]]) -> Observer:
    seen: set[str] = set()

    def note(gemm: str, role: str, original: Tensor, operand: QTensor | Tensor) -> None:
        if role in seen or (gemm, role) not in WHERE or not isinstance(operand, QTensor):
            return
        seen.add(role)
        events.append({"module": module, "role": role, **operand_statistics(original, operand)})

    return note


def operand_statistics(original: Tensor, operand: QTensor) -> dict[str, Any]:
    """A `tensor` event (docs/architecture.md). With many tiles, `scale` is the largest one."""
    format = operand.cast.format
    scales = operand.full_scale()
    spread = times_scale(torch.ones(operand.shape, device=operand.device), scales, operand.cast.tile)
    found = tensor_statistics(original, format.max, format.smallest, spread)
    return {"format": format.name, "scale": float(scales.max()), **found}
