"""Repeat the cast of a tensor, for comparison with existing codes."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowgauge.ops.quantize.definition import calibrated_amax, encoded, filled, scales
from narrowgauge.recipe import Cast, DelayedScaling, LearnedStep
from narrowgauge.scaling import times_scale

if TYPE_CHECKING:
    from narrowgauge.ops.random import Key
    from narrowgauge.qtensor import QTensor


def recast(x: Tensor, like: QTensor, noise: Tensor | Key | None = None) -> Tensor:
    """Cast x by the scales of `like` and decode: [outer, inner] float32.

    The result equals `dequantize(like)` if `like` was cast from x.

    x      [outer, inner], the shape of `like`
    noise  the noise that `like` was rounded with, if its cast rounds stochastically
    """
    cast = like.cast
    data = encoded(
        filled(x, cast.tile), like.shape, like.scale, like.global_scale, cast, noise, torch.float32
    )
    return times_scale(data, like.full_scale(), cast.tile)


def own_scale(x: Tensor, cast: Cast) -> Tensor | None:
    """Return the scale that `cast` gives x, in the form of `QTensor.full_scale`.

    None if the scale depends on more than x (amax history, learned step).
    """
    if isinstance(cast.calibrate, DelayedScaling | LearnedStep):
        return None
    scale, shared = scales(calibrated_amax(x, cast), cast)
    return scale if shared is None else scale * shared
