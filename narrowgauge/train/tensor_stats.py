"""Statistics of matmul operands at chosen steps: quantization error, spread over rows and channels.

Quantization errors of x, w and grad_output come from three layers: the first, the middle and the
last quantized Linear. The spreads of grad_output's rows and x's channels come from all layers. An
observer reads the operands of each matmul, so nothing is computed twice. Only the first micro-batch
of a step is used.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from narrowgauge.diagnose.spreads import channel_spread, row_spread
from narrowgauge.diagnose.statistics import tensor_statistics
from narrowgauge.nn.linear import QLinear
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Gemm
from narrowgauge.scaling import times_scale

if TYPE_CHECKING:
    from narrowgauge.train.console import Console
    from narrowgauge.train.metrics import MetricsLog

WHERE = {("output", "x"), ("output", "w"), ("grad_input", "gy")}


Events = dict[tuple[str, str], tuple[str, dict[str, Any]]]  # (module, role) -> (event name, fields)


class NonfiniteAmax:
    """Logs non-finite amax readings, once per increase of their count."""

    def __init__(self) -> None:
        self.counts: dict[tuple[str, str], int] = {}

    def report(
        self, step: int, counts: dict[tuple[str, str], int], log: MetricsLog, show: Console
    ) -> None:
        """Logs and prints each layer whose count has grown.

        counts  from `narrowgauge.conversion.nonfinite_amax`, of all pipeline stages
        """
        for (module, role), count in counts.items():
            if count > self.counts.get((module, role), 0):
                log.write("nonfinite_amax", step, module=module, role=role, count=count)
                show.say(
                    f"step {step}: amax of {role} in {module} was not finite in {count} steps; kept out of its window"
                )
        self.counts = counts


@contextmanager
def watched(model: nn.Module) -> Iterator[Events]:
    """Collects operand statistics inside the block.

    Yields a table that receives `tensor` events of three layers and `spread` events of all.
    """
    events: Events = {}
    layers = {name: each for name, each in model.named_modules() if isinstance(each, QLinear)}
    names = [
        name
        for name, each in layers.items()
        if each.recipe is not None and each.recipe.output != Gemm()
    ]
    chosen = {names[place] for place in (0, len(names) // 2, -1)} if names else set()
    try:
        for name in names:
            layers[name].observer = partial(_note, events, name, layers[name], name in chosen)
        yield events
    finally:
        for name in names:
            layers[name].observer = None


def _note(
    events: Events, module: str, layer: QLinear, is_chosen: bool, gemm: str, role: str, original: Tensor, operand: QTensor | Tensor
) -> None:  # fmt: skip
    # The first call in the step wins: that is the first micro-batch.
    if (
        is_chosen
        and (module, role) not in events
        and (gemm, role) in WHERE
        and isinstance(operand, QTensor)
    ):
        events[module, role] = (
            "tensor",
            {"module": module, "role": role, **operand_statistics(original, operand)},
        )
    if (module, f"spread of {role}") in events or role not in ("x", "gy"):
        return
    if role == "x" and gemm == "output" and layer.recipe is not None:
        found: Any = {"channels": dict(channel_spread(original, layer.recipe.output.rotate))}
    # grad_weight reads the transpose, which has another shape here
    elif role == "gy" and original.shape[1] == layer.out_features:
        found = {"rows": dict(row_spread(original))}
    else:
        return
    events[module, f"spread of {role}"] = "spread", {"module": module, "role": role, **found}


def operand_statistics(original: Tensor, operand: QTensor) -> dict[str, Any]:
    """Fields of a `tensor` event (docs/architecture.md).

    With several tiles, `scale` is the largest among tiles with a nonzero value: an all-zero tile
    has scale 1, which hid the others.
    """
    format = operand.cast.format
    scales = operand.full_scale()
    spread = times_scale(
        torch.ones(operand.shape, device=operand.device), scales, operand.cast.tile
    )
    found = tensor_statistics(original, format.max, format.smallest, spread)
    present = spread[original != 0]
    return {
        "format": format.name,
        "scale": float((present if present.numel() else scales).max()),
        **found,
    }
