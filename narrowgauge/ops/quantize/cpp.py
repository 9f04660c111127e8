"""Casts in one pass of C++, the reference's bits. Two kinds:

stochastically   integers with one scale per tensor or row; the pass makes its noise itself
to nearest       integers, and floats to decoded values for products that are computed in float; tiles of any size
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowgauge.formats import IntFormat
from narrowgauge.ops.quantize import definition
from narrowgauge.ops.quantize.spec import Spec
from narrowgauge.ops.registry import Refusal
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast, ClippedRms, LearnedStep
from narrowgauge.scaling import WHOLE, scale_shape, tile_sizes

if TYPE_CHECKING:
    from narrowgauge.ops.random import Key


def refuse(spec: Spec) -> Refusal | None:
    """Why this kernel does not quantize such a tensor, or None."""
    if spec.is_empty:
        return Refusal("shape", "there is nothing to round")
    return _refuse_nearest(spec) if spec.noise is None else _refuse_stochastic(spec)


def _refuse_stochastic(spec: Spec) -> Refusal | None:
    if spec.noise != "key" or not isinstance(spec.cast.format, IntFormat):
        return Refusal("rounding", "rounds integers stochastically with the noise of a key, nothing else")
    if spec.cast.tile not in ((WHOLE, WHOLE), (1, WHOLE)) or spec.cast.has_global_scale or spec.amax:
        return Refusal("tile", "takes one scale per tensor or row, from the tensor")
    from narrowgauge.ops.cpp import int4 as cpp

    return cpp.refuse(spec.device.type)


def _refuse_nearest(spec: Spec) -> Refusal | None:
    from narrowgauge.ops.cpp import cast as cast_kernel
    from narrowgauge.ops.cpp import int4 as cpp

    if not cast_kernel.rounds(spec.cast.format) or spec.cast.scale.two_level:
        return Refusal("format", "rounds integers and floats with a mantissa to nearest, by one scale per tile")
    if spec.expand is None and not isinstance(spec.cast.format, IntFormat):
        return Refusal("expanded", "makes decoded values of floats, not their codes")
    if spec.dtype not in cast_kernel.DTYPES:
        return Refusal("dtype", f"reads float32 and bfloat16, not {str(spec.dtype).removeprefix('torch.')}")
    if (refusal := cpp.refuse_place(spec.device.type)) is not None:
        return refusal
    return Refusal("toolchain", cast_kernel.unavailable()) if cast_kernel.unavailable() else None


def run(x: Tensor, cast: Cast, amax: Tensor | None, noise: Key | None, expand: torch.dtype | None) -> QTensor:
    """See `ops.quantize`."""
    if noise is None:
        return _nearest(x, cast, amax, expand)
    from narrowgauge.ops.cpp import int4 as cpp

    # x.T, as grad_weight may give it, has the noise of its own order: made contiguous, it is read in that.
    x = x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
    scale = cast.scale(definition.calibrated_amax(x, cast), cast.format)
    codes = cpp.round_stochastically(x, scale, cast.format.max, noise.words)  # type: ignore[arg-type]
    data = cast.format.pack(codes) if expand is None and cast.format.codes_per_byte > 1 else codes
    data = data if expand is None else data.to(expand)
    return QTensor(data=data, scale=scale, cast=cast, inner=x.shape[1], checked=True)


def _nearest(x: Tensor, cast: Cast, amax: Tensor | None, expand: torch.dtype | None) -> QTensor:
    from narrowgauge.ops.cpp import cast as cast_kernel

    shape = (x.shape[0], x.shape[1])
    if amax is None:
        # The reference sums squares and magnitudes in float32; of the largest magnitude the type does not matter.
        sums = isinstance(cast.calibrate, ClippedRms | LearnedStep)
        amax = definition.calibrated_amax(x.to(torch.float32) if sums else x, cast)
    else:
        amax = amax.to(torch.float32).expand(scale_shape(shape, cast.tile))
    scale, shared = definition.scales(amax, cast)
    divisor = scale if shared is None else scale * shared
    dtype = torch.int8 if expand is None else expand
    data = cast_kernel.round_nearest(x, divisor, tile_sizes(shape, cast.tile), cast.format, dtype)
    if expand is None and cast.format.codes_per_byte > 1:
        data = cast.format.pack(data)
    return QTensor(data=data, scale=scale, cast=cast, inner=shape[1], global_scale=shared, checked=True)
