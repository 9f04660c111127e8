"""torch's grouped GEMMs of FP8: a scale for each row (CUTLASS, 9.0), or for 1 x 32 (MX, 10.x).

    torch._scaled_grouped_mm(a [S, K], b [E, K, N], scale_a [S], scale_b [E, N], offs [E])    output
    torch._scaled_grouped_mm(a [N, S'], b [S', K], scale_a [E N], scale_b [E K], offs [E])    gradient

With MX tiles, scales are exponents in the order of `scaling.swizzled`: of a 2-D operand each group's
by themselves, filled up to 128 rows or 4 columns; of b [E, N K / 32].

`offs` are int32 ends of the groups on the device: along rows of `a`, or along the contracted axis,
where each group begins and ends at a multiple of TILE. Only E4M3 by E4M3, bfloat16 results, no bias;
every row of codes is a multiple of 16 bytes (GroupedBlas.cpp, _meta_registrations.py of torch 2.13).
Rows beyond the last end are left as they were, so they are set to zero here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowgauge.ops.grouped import TILE, launches
from narrowgauge.ops.grouped.launches import GroupedCodes, Matrices, clear_rest

if TYPE_CHECKING:
    from narrowgauge.recipe import Cast


def product(
    x: GroupedCodes,
    w: Matrices,
    counts: Tensor,
    bias: Tensor | None,
    dtype: torch.dtype,
    fast: bool,
) -> Tensor:
    """See `launches.product`; no bias, a bfloat16 result."""
    assert bias is None and dtype == torch.bfloat16
    assert x.rows is not None and x.row_scales is not None
    experts, place, is_mx = counts.shape[0] - 1, w.place, x.row_scales.dtype == torch.uint8
    codes = w.codes.as_strided(
        (experts, place.columns, place.rows), (place.expert, 1, place.stride)
    )  # fmt: skip
    scales = _exponents(x.row_scales) if is_mx else x.row_scales.view(-1)
    of_w = _exponents(w.scales) if is_mx else w.scales.view(experts, place.rows)
    ends = counts[:-1].cumsum(0, dtype=torch.int32)
    out: Tensor = torch._scaled_grouped_mm(
        x.rows, codes, scales, of_w, ends, out_dtype=dtype, use_fast_accum=fast and not is_mx
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
    """See `launches.gradient`; a bfloat16 result."""
    assert dtype == torch.bfloat16
    assert lhs.cols is not None and lhs.col_scales is not None
    assert rhs.cols is not None and rhs.col_scales is not None
    as_read = Tensor.flatten if by_row else _exponents
    ends = ((counts[:-1] + (TILE - 1)) // TILE * TILE).cumsum(0, dtype=torch.int32)
    return torch._scaled_grouped_mm(
        lhs.cols, rhs.cols.t(), as_read(lhs.col_scales), as_read(rhs.col_scales), ends,
        out_dtype=dtype, use_fast_accum=fast and by_row,
    )  # fmt: skip


def _exponents(units: Tensor) -> Tensor:
    return units.view(torch.float8_e8m0fnu)


def passes(
    x: Tensor, w: Tensor, bias: Tensor | None, gy: Tensor, counts: Tensor, casts: tuple[Cast, Cast]
) -> tuple[Tensor, ...]:
    """See `launches.passes`."""
    return launches.passes(x, w, bias, gy, counts, casts, product, gradient)
