"""The ops of `ops.norm_act` on NVIDIA GPUs by Triton kernels (triton_launch.py).

    tile            launches of forward                                   reads of x
    tensor, delayed values and cast, settle                               1; a norm a second time, out of the cache
    tensor          values and maximum, cast                              1, then y once, out of the cache where it fits
    row             values and cast                                       1; a second time out of the cache, of a norm a third
    blocks          values and cast                                       1; a norm a second time, out of the cache

Refused, with the reason: what torch.compile fuses itself, casts that round stochastically or that `quantize` has no kernel for, rows
of both orientations, norms of rows that do not stay in registers in their backward pass, gradients cast by more than one scale.
"""

from __future__ import annotations

from typing import Any

from narrowgauge.ops.norm_act.spec import NormActSpec
from narrowgauge.ops.quantize import triton as quantizing
from narrowgauge.ops.quantize.spec import Spec
from narrowgauge.ops.registry import Refusal
from narrowgauge.ops.triton import refuse_tensors
from narrowgauge.recipe import Cast
from narrowgauge.scaling import WHOLE

LONGEST_ROW = 8192  # of a norm, whose backward pass keeps rows and the sums for the weight in registers


def forward(*given: Any) -> Any:
    """See `ops.norm_act`."""
    from narrowgauge.ops.norm_act import triton_launch  # imports Triton

    return triton_launch.forward(*given)


def backward(*given: Any) -> Any:
    """See `ops.norm_act`."""
    from narrowgauge.ops.norm_act import triton_launch  # imports Triton

    return triton_launch.backward(*given)


def refuse(spec: NormActSpec) -> Refusal | None:
    """Why these kernels do not compute that, or None."""
    if (refusal := refuse_tensors(spec.device, spec.dtypes, spec.is_empty)) is not None:
        return refusal
    if spec.kind.is_norm and spec.columns > LONGEST_ROW:
        return Refusal("shape", f"norms rows of at most {LONGEST_ROW} elements, not {spec.columns}")
    for cast, transposed in spec.casts:
        plain = Spec(spec.device, spec.dtypes[0], (1, spec.columns), cast)
        refusal = _refuse_cast(cast, transposed) or quantizing.refuse(plain)
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
    """Why a cast that `quantize` has a kernel for is not made in the pass that computes, or None."""
    if cast.rounding != "nearest":
        return Refusal("rounding", f"rounds to nearest, not {cast.rounding}")
    if cast.format.codes_per_byte > 1:
        return Refusal("format", f"writes a byte per element, and two {cast.format} share one")
    if cast.scale.two_level:
        return Refusal("scale", f"knows the largest magnitude that {cast.scale} wants after a pass over all rows")
    if cast.tile == (WHOLE, WHOLE):
        return None
    if cast.tile[0] != 1 or cast.tile[1] > 128:
        return Refusal("tile", f"casts tensors, rows and pieces of rows, not tiles of {cast.tile}")
    if not transposed:
        return None
    if cast.tile[1] == WHOLE:
        return Refusal("tile", "knows the maxima of columns after a pass over all rows")
    return Refusal("tile", "pieces of columns as well as of rows do not stay in registers beside what computes them")
