"""The ops of `ops.norm_act` on NVIDIA GPUs by Triton kernels (narrowgauge/ops/norm_act/triton_launch.py).

    tile            launches of forward                                   reads of x
    tensor, delayed values and cast, settle                               1; a norm a second time, out of the cache
    tensor          values and maximum, cast                              1, then y once, out of the cache where it fits
    row             values and cast                                       1; a second time out of the cache, of a norm a third
    blocks          values and cast                                       1; a norm a second time, out of the cache

Refused, with the reason: what torch.compile fuses itself, casts that round stochastically or that `quantize` has no kernel for, rows
of both orientations, norms of rows that do not stay in registers in their backward pass, gradients cast by more than one scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from narrowgauge.ops.norm_act.spec import CastRequest, CastResult, Kind, NormActSpec, Requests
from narrowgauge.ops.quantize import triton as quantizing
from narrowgauge.ops.quantize.spec import Spec
from narrowgauge.ops.registry import Refusal, device_facts
from narrowgauge.ops.triton import refuse as refuse_device
from narrowgauge.ops.triton.cast_constants import CastConstants, constants_of
from narrowgauge.recipe import Cast, ClippedRms, LearnedStep
from narrowgauge.scaling import WHOLE

LONGEST_ROW = 8192  # of a norm, whose backward pass keeps rows and the sums for the weight in registers
Statistics = tuple[Tensor, ...]


def refuse(spec: NormActSpec) -> Refusal | None:
    """Why these kernels do not compute that, or None."""
    refusal = refuse_device(spec.device.type, spec.device.capability)
    if refusal is not None:
        return refusal
    if 0 in spec.shape:
        return Refusal("shape", "there is nothing to compute")
    for dtype in spec.dtypes:
        if dtype not in quantizing.DTYPES:
            return Refusal("dtype", f"reads float32, bfloat16 and float16, not {dtype}")
    if spec.kind.is_norm and spec.shape[1] > LONGEST_ROW:
        return Refusal("shape", f"norms rows of at most {LONGEST_ROW} elements, not {spec.shape[1]}")
    for cast, transposed in spec.casts:
        refusal = _refuse_cast(cast, transposed) or quantizing.refuse(
            Spec(spec.device, spec.dtypes[0], spec.shape, cast)
        )
        if refusal is not None:
            return refusal
    return None


def refuse_backward(spec: NormActSpec) -> Refusal | None:
    """As `refuse`, of gradients."""
    refusal = refuse(spec)
    if refusal is None and any(cast.tile != (WHOLE, WHOLE) for cast, _ in spec.casts):
        refusal = Refusal("tile", "casts gradients by one scale per tensor")
    return refusal


def _refuse_cast(cast: Cast, transposed: bool) -> Refusal | None:
    if cast.rounding != "nearest":
        return Refusal("rounding", f"rounds to nearest, not {cast.rounding}")
    if isinstance(cast.calibrate, ClippedRms | LearnedStep):
        return Refusal("calibration", f"takes the largest magnitude, not {cast.calibrate}")
    if cast.format.codes_per_byte > 1:
        return Refusal("format", f"writes a byte per element, and two {cast.format} share one")
    if cast.scale.two_level:
        return Refusal("scale", f"knows the largest magnitude that {cast.scale} wants after a pass over all rows")
    return _refuse_tile(cast, transposed)


def _refuse_tile(cast: Cast, transposed: bool) -> Refusal | None:
    reason = ""
    if cast.tile not in ((WHOLE, WHOLE), (1, WHOLE)) and (cast.tile[0] != 1 or cast.tile[1] > 128):
        reason = f"casts tensors, rows and pieces of rows, not tiles of {cast.tile}"
    elif transposed and cast.tile == (1, WHOLE):
        reason = "knows the maxima of columns after a pass over all rows"
    elif transposed and WHOLE not in cast.tile:
        reason = "pieces of columns as well as of rows do not stay in registers beside what computes them"
    return Refusal("tile", reason) if reason else None


def norm_cast(kind: Kind, tensors: Sequence[Tensor], request: CastRequest | None) -> tuple[CastResult, Statistics]:
    """See `ops.norm_act`."""
    return _kernels().norm_cast(kind, tensors, request, _constants(tensors[0], request))


def act_cast(kind: Kind, tensors: Sequence[Tensor], request: CastRequest | None) -> tuple[CastResult, Statistics]:
    """See `ops.norm_act`."""
    return _kernels().act_cast(kind, tensors, request, _constants(tensors[0], request)), ()


def norm_backward(
    kind: Kind, tensors: Sequence[Tensor], statistics: Statistics, gy: Tensor, requests: Requests
) -> tuple[list[CastResult], list[Tensor]]:
    """See `ops.norm_act`."""
    dx, of_parameters = _kernels().norm_backward(kind, tensors, statistics, gy)
    return [CastResult(dx)], of_parameters


def act_backward_cast(
    kind: Kind, tensors: Sequence[Tensor], statistics: Statistics, gy: Tensor, requests: Requests
) -> tuple[list[CastResult], list[Tensor]]:
    """See `ops.norm_act`."""
    constants = [_constants(tensors[0], each) for each in requests]
    return _kernels().act_backward_cast(kind, tensors, gy, requests, constants), []


def _kernels() -> Any:
    """Imports Triton, and is therefore called when a kernel is wanted and not before."""
    from narrowgauge.ops.norm_act import triton_launch

    return triton_launch


def _constants(x: Tensor, request: CastRequest | None) -> CastConstants | None:
    if request is None:
        return None
    return constants_of(request.cast, device_facts(x.device.type, x.device.index).capability)
