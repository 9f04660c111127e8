"""Rows that are rotated and cast in pieces on a GPU, where a cast looks at rows apart.

A rotated matrix is float32, four bytes for each element of a bfloat16 one; so it is never there as a whole. The codes are the same, noise
included, which is a function of the element.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from narrowgauge.nn.plan import OperandPlan
from narrowgauge.nn.rotation import Rotation
from narrowgauge.ops.pieces import cuts
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast, Current


def casts_apart(cast: Cast, x: Tensor) -> bool:
    """Whether `cast_in_pieces` casts x, [outer, inner], as the whole of it would be."""
    if len(cuts(x)) == 1:
        return False
    if cast.rounding == "stochastic":
        from narrowgauge.ops.random import draws_keys

        if not draws_keys(x.device):
            return False
    return cast.tile[0] == 1 and not cast.scale.two_level and isinstance(cast.calibrate, Current)


def cast_in_pieces(
    x: Tensor, cast: Cast, rotation: Rotation, noise: Any, plan: OperandPlan, expand: torch.dtype | None
) -> QTensor:
    """noise: the Key of all of it, or None. plan: of the operand, which casts rotated rows."""
    parts = []
    for each in cuts(x):
        rows = rotation(x[each])
        some = None if noise is None else noise.after(each.start * rows.shape[1])
        parts.append(plan.quantize(rows, cast, None, some, expand))
        del rows  # before the next ones are made
    data, scale = torch.cat([part.data for part in parts]), torch.cat([part.scale for part in parts])
    first = parts[0]
    return QTensor.of_parts(data, scale, cast, first.inner, first.global_scale)
