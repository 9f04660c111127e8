"""produce on NVIDIA GPUs by Triton kernels (narrowgauge/ops/norm_act/triton_launch.py).

    tile            launches of forward                                   reads of x
    tensor, delayed values and cast, settle                               1; a norm a second time, out of the cache
    tensor          values and maximum, cast                              1, then y once, out of the cache where it fits
    row             values and cast                                       1; a second time out of the cache, of a norm a third
    blocks          values and cast                                       1; a norm a second time, out of the cache

Refused, with the reason: what torch.compile fuses itself, casts that round stochastically or that `quantize` has no kernel for, rows
of both orientations, norms of rows that do not stay in registers in their backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from narrowgauge.ops.norm_act.spec import Kind, Made, Order, ProduceSpec
from narrowgauge.ops.quantize import triton as quantizing
from narrowgauge.ops.quantize.spec import Spec
from narrowgauge.ops.registry import device_facts
from narrowgauge.ops.triton import cast_constants
from narrowgauge.ops.triton import refuse as refuse_device
from narrowgauge.recipe import ClippedRms, LearnedStep
from narrowgauge.scaling import WHOLE

LONGEST_ROW = 8192  # of a norm, whose backward pass keeps rows and the sums for the weight in registers


def refuse(spec: ProduceSpec) -> str | None:
    """Why these kernels do not produce that, or None."""
    reason = refuse_device(spec.device.type, spec.device.capability)
    if reason is not None:
        return reason
    if 0 in spec.shape:
        return "there is nothing to compute"
    for dtype in spec.dtypes:
        if dtype not in quantizing.DTYPES:
            return f"reads float32, bfloat16 and float16, not {dtype}"
    if spec.kind.is_norm and spec.shape[1] > LONGEST_ROW:
        return f"norms rows of at most {LONGEST_ROW} elements, not {spec.shape[1]}"
    for cast, turned in spec.casts:
        if cast.rounding != "nearest":
            return f"rounds to nearest, not {cast.rounding}"
        if isinstance(cast.calibrate, ClippedRms | LearnedStep):
            return f"takes the largest magnitude, not {cast.calibrate}"
        if cast.format.codes_per_byte > 1:
            return f"writes a byte per element, and two {cast.format} share one"
        if cast.scale.two_level:
            return f"knows the largest magnitude that {cast.scale} wants after a pass over all rows"
        if cast.tile not in ((WHOLE, WHOLE), (1, WHOLE)) and (cast.tile[0] != 1 or cast.tile[1] > 128):
            return f"casts tensors, rows and pieces of rows, not tiles of {cast.tile}"
        if turned and cast.tile == (1, WHOLE):
            return "knows the maxima of columns after a pass over all rows"
        if turned and WHOLE not in cast.tile:
            return "pieces of columns as well as of rows do not stay in registers beside what computes them"
        reason = quantizing.refuse(Spec(spec.device, spec.dtypes[0], spec.shape, cast))
        if reason is not None:
            return reason
    return None


def forward(kind: Kind, tensors: Sequence[Tensor], order: Order | None) -> tuple[Made, tuple[Tensor, ...]]:
    """See `ops.norm_act`."""
    return _kernels().forward(kind, tensors, order, _constants(tensors[0], order))


def gradients(
    kind: Kind, tensors: Sequence[Tensor], found: tuple[Tensor, ...], gy: Tensor, orders: Sequence[Order | None]
) -> tuple[list[Made], list[Tensor]]:
    """See `ops.norm_act`."""
    constants = [_constants(tensors[0], order) for order in orders]
    return _kernels().gradients(kind, tensors, found, gy, orders, constants)


def _kernels() -> Any:
    """Imports Triton, and is therefore called when a kernel is wanted and not before."""
    from narrowgauge.ops.norm_act import triton_launch

    return triton_launch


def _constants(x: Tensor, order: Order | None) -> cast_constants.Settings | None:
    if order is None:
        return None
    return cast_constants.settings(order.cast, device_facts(x.device.type, x.device.index).capability)
