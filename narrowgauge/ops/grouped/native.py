"""torch's grouped GEMM of FP8 with a scale for each row (CUTLASS, compute capability 9.0).

    torch._scaled_grouped_mm(a [S, K], b [E, K, N], scale_a [S], scale_b [E, N], offs [E])    output
    torch._scaled_grouped_mm(a [N, S'], b [S', K], scale_a [E N], scale_b [E K], offs [E])    gradient

`offs` are int32 ends of the groups on the device: along rows of `a`, or along the contracted axis,
where each group begins and ends at a multiple of TILE. Only E4M3 by E4M3, bfloat16 results, no bias;
every row of codes is a multiple of 16 bytes (GroupedBlas.cpp, _meta_registrations.py of torch 2.13).
Rows beyond the last end are left as they were, so they are set to zero here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowgauge.ops.grouped import launches
from narrowgauge.ops.grouped.launches import (
    TILE,
    GroupedCodes,
    Matrices,
    clear_rest,
    operand,
    stack_cols,
    sums,
)

if TYPE_CHECKING:
    from narrowgauge.qtensor import QTensor
    from narrowgauge.recipe import Cast

__all__ = ["gradient", "operand", "passes", "product", "stack_cols", "sums"]


def product(
    x: QTensor, w: Matrices, counts: Tensor, bias: Tensor | None, dtype: torch.dtype, fast: bool
) -> Tensor:
    """See `launches.product`; no bias, a bfloat16 result."""
    assert bias is None and dtype == torch.bfloat16
    experts, place = counts.shape[0] - 1, w.place
    codes = w.codes.as_strided(
        (experts, x.shape[1], place.rows), (place.expert, 1, place.stride)
    )  # fmt: skip
    ends = counts[:-1].cumsum(0, dtype=torch.int32)
    out: Tensor = torch._scaled_grouped_mm(
        x.data, codes, x.scale.view(-1), w.scales.view(experts, place.rows), ends,
        out_dtype=dtype, use_fast_accum=fast,
    )  # fmt: skip
    clear_rest(out, counts)
    return out


def gradient(
    lhs: GroupedCodes,
    rhs: GroupedCodes,
    counts: Tensor,
    dtype: torch.dtype,
    by_row: bool,
    fast: bool,
) -> Tensor:
    """See `launches.gradient`; a scale for each row, a bfloat16 result."""
    assert by_row and dtype == torch.bfloat16
    assert lhs.cols is not None and lhs.scales is not None
    assert rhs.cols is not None and rhs.scales is not None
    ends = ((counts[:-1] + (TILE - 1)) // TILE * TILE).cumsum(0, dtype=torch.int32)
    return torch._scaled_grouped_mm(
        lhs.cols, rhs.cols.t(), lhs.scales.view(-1), rhs.scales.view(-1), ends,
        out_dtype=dtype, use_fast_accum=fast,
    )  # fmt: skip


def passes(
    x: Tensor, w: Tensor, bias: Tensor | None, gy: Tensor, counts: Tensor, casts: tuple[Cast, Cast]
) -> tuple[Tensor, ...]:
    """See `launches.passes`."""
    return launches.passes(x, w, bias, gy, counts, casts, product, gradient)
