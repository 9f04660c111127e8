"""A tensor cast once more beside codes that should be its cast: by the scales of those codes, and the scales that are its own."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowgauge.ops.quantize.definition import calibrated_amax, encoded, filled, scales
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast, LearnedStep, Window
from narrowgauge.scaling import times_scale

if TYPE_CHECKING:
    from narrowgauge.ops.random import Key


def recast(x: Tensor, like: QTensor, noise: Tensor | Key | None = None) -> Tensor:
    """x cast once more by the scales of `like`, decoded: [outer, inner] float32, equal to `dequantize(like)` if x made it.

    x      [outer, inner], of the shape of `like`
    noise  that `like` was rounded with, if its cast rounds stochastically
    """
    cast = like.cast
    data = encoded(filled(x, cast.tile), like.shape, like.scale, like.global_scale, cast, noise, torch.float32)
    return times_scale(data, like.full_scale(), cast.tile)


def own_scale(x: Tensor, cast: Cast) -> Tensor | None:
    """The scale that `cast` gives x, as `QTensor.full_scale`; None where it depends on more than x (history, learned step)."""
    if isinstance(cast.calibrate, Window | LearnedStep):
        return None
    scale, shared = scales(calibrated_amax(x, cast), cast)
    return scale if shared is None else scale * shared
