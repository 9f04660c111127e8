"""Rotate and quantize a matrix in pieces of rows on a GPU, for casts with scales per row.

A rotated matrix is float32, four bytes per element of a bfloat16 one, so
it never exists as a whole. The codes are identical, with stochastic
rounding too: noise is a function of the element's index.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge.ops.chunking import row_chunks
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast, CurrentScaling

if TYPE_CHECKING:
    from narrowgauge.nn.plan import OperandPlan
    from narrowgauge.nn.rotation import Rotation


def casts_apart(cast: Cast, x: Tensor) -> bool:
    """True if `cast_in_pieces` gives the same codes for x [outer, inner] as a cast of the whole."""
    if len(row_chunks(x)) == 1:
        return False
    if cast.draws:
        from narrowgauge.ops.random import draws_keys

        if not draws_keys(x.device):
            return False
    # A scale must not depend on rows of other pieces.
    return (
        cast.tile[0] == 1
        and not cast.scale.two_level
        and isinstance(cast.calibrate, CurrentScaling)
    )


def cast_in_pieces(
    x: Tensor,
    cast: Cast,
    rotation: Rotation,
    noise: Any,
    plan: OperandPlan,
    expand: torch.dtype | None,
) -> QTensor:
    """Rotate and quantize x [outer, inner] piece by piece.

    noise   the Key of the whole matrix, or None
    plan    plan of the operand, which quantizes the rotated rows
    expand  dtype of dequantized values in place of codes, or None
    """
    parts = []
    for each in row_chunks(x):
        rows = rotation(x[each])
        # rows.shape[1] is the padded length: noise is counted over the rotated matrix.
        some = None if noise is None else noise.after(each.start * rows.shape[1])
        parts.append(plan.quantize(rows, cast, None, some, expand))
        del rows  # free it before the next piece is allocated
    data, scale = (
        torch.cat([part.data for part in parts]),
        torch.cat([part.scale for part in parts]),
    )
    first = parts[0]
    return QTensor.of_parts(data, scale, cast, first.inner, first.global_scale)
