"""Integers with a scale per tensor or row, rounded stochastically in one pass of C++ that makes its noise itself; the reference's bits."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.formats import IntFormat
from narrowgauge.ops.quantize import definition
from narrowgauge.ops.quantize.spec import Spec
from narrowgauge.ops.random import Key
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast
from narrowgauge.scaling import WHOLE


def refuse(spec: Spec) -> str | None:
    """Why this kernel does not quantize such a tensor, or None."""
    if spec.noise != "key" or not isinstance(spec.cast.format, IntFormat):
        return "rounds integers stochastically with the noise of a key, nothing else"
    if spec.cast.tile not in ((WHOLE, WHOLE), (1, WHOLE)) or spec.cast.has_global_scale or spec.amax:
        return "takes one scale per tensor or row, from the tensor"
    if spec.is_empty:
        return "there is nothing to round"
    from narrowgauge.ops.cpp import int4 as cpp

    return cpp.refuse(spec.device.type)


def run(x: Tensor, cast: Cast, amax: None, noise: Key, expand: torch.dtype | None) -> QTensor:
    """See `ops.quantize`."""
    from narrowgauge.ops.cpp import int4 as cpp

    # x.T, as grad_weight may give it, has the noise of its own order: made contiguous, it is read in that.
    x = x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
    scale = cast.scale(definition.calibrated_amax(x, cast), cast.format)
    codes = cpp.round_stochastically(x, scale, cast.format.max, (noise.low, noise.high))
    data = cast.format.pack(codes) if expand is None and cast.format.codes_per_byte > 1 else codes
    return QTensor(data=data if expand is None else data.to(expand), scale=scale, cast=cast, inner=x.shape[1])
