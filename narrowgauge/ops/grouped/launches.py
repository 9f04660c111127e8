"""Launches of the grouped kernels (kernels.py), each for all experts.

    operand      x [S, K] -> codes of x and of x.T      one launch and one read of x; two with a scale
                                                        for a row, as maxima come first
    product      x [S, K] times each expert's matrix -> [S, N]         one launch
    gradient     the product over each expert's tokens -> [E, M, N]    one launch
    sums         the sum of each expert's rows -> [E, N]               one launch

The host never reads how many rows an expert has, so nothing waits for the router. Codes and scales
are those of a loop over experts with the kernels of `ops.quantize`, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from narrowgauge.formats import E4M3
from narrowgauge.ops.grouped import TILE, slots_for
from narrowgauge.ops.mm.triton import Blocks, blocks_for
from narrowgauge.ops.quantize import quantize
from narrowgauge.ops.quantize.triton_launch import LARGE_BLOCK_WARPS, constants
from narrowgauge.ops.registry import device_facts
from narrowgauge.ops.triton.launch import Kernels, Matrix, Orientation, launch
from narrowgauge.scaling import WHOLE

if TYPE_CHECKING:
    from narrowgauge.qtensor import QTensor
    from narrowgauge.recipe import Cast

SUM_ROWS, SUM_COLUMNS, SUM_WARPS = 32, 128, 4
Optional = Tensor | None

kernels = Kernels("narrowgauge.ops.grouped.kernels")


class GroupedCodes(NamedTuple):
    """The codes of x [S, K] and of x.T; None where they were not asked for.

    rows    codes [S, K] with scales, float32: [S, ceil(K / TILE)] for tiles, [S, 1] with one for a row
    cols    codes [K, slots * TILE], see kernels.py, with scales [K, slots] or [E, K]

    Scales of 1 x 32 are exponents, bytes in the order of `scaling.swizzled`: [slots * TILE, K / 32] and
    [K, slots * TILE / 32], the blocks of an expert together.
    """

    rows: Tensor | None = None
    row_scales: Tensor | None = None
    cols: Tensor | None = None
    col_scales: Tensor | None = None


class Place(NamedTuple):
    """Sizes of an expert's matrix, and where its elements are.

    Element (n, k) of expert e is at `expert * e + stride * n + k`; the same for scales.
    """

    rows: Any
    columns: Any
    stride: Any
    expert: Any
    scale_stride: Any
    scale_expert: Any


class Matrices(NamedTuple):
    """Codes of the matrices [N, K] of all experts, whose rows are contracted, and their scales.

    by_row  there is one scale for a row
    """

    codes: Tensor
    scales: Tensor
    place: Place
    by_row: bool


@dataclass(frozen=True)
class Groups:
    """Compile-time constants. wide: the power of two that holds `experts + 1` numbers."""

    experts: int
    wide: int
    tile: int = TILE

    @classmethod
    def of(cls, counts: Tensor) -> Groups:
        """counts: int32 [E + 1], rows of each expert, and rows without one."""
        return cls(counts.shape[0] - 1, 1 << (counts.shape[0] - 1).bit_length())


def operand(x: Tensor, cast: Cast, counts: Tensor, rows: bool, cols: bool) -> GroupedCodes:
    """Cast x [S, K] with `rows`, and x.T with `cols`."""
    if not (rows or cols):
        return GroupedCodes()
    x = x if x.stride(1) == 1 else x.contiguous()
    return _cast(x, cast, counts, rows, cols, slots_for(x.shape[0], counts.shape[0] - 1))


def turned_stack(stack: Tensor, cast: Cast, experts: int) -> Matrices:
    """Cast the transposed matrices [K, N] of a stack [E N, K], each by itself."""
    own, inner = stack.shape[0] // experts, stack.shape[1]
    counts = torch.full((experts + 1,), own, dtype=torch.int32, device=stack.device)
    counts[-1:].zero_()
    slots = stack.shape[0] // TILE
    made = _cast(stack.detach(), cast, counts, False, True, slots, apart=True)
    assert made.cols is not None and made.col_scales is not None
    scales = made.col_scales.view(experts, -1)
    return Matrices(
        made.cols, scales, Place(inner, own, own, inner * own, 1, inner), is_by_row(cast)
    )


def _cast(
    x: Tensor, cast: Cast, counts: Tensor, rows: bool, cols: bool, slots: int, apart: bool = False
) -> GroupedCodes:
    groups, (outer, inner), by_row = Groups.of(counts), x.shape, is_by_row(cast)
    width, matrix, mx = -(-inner // TILE), Matrix.of(x), cast.tile[1] if cast.mx_kind else 0
    of_rows = of_columns = scales = turned_scales = None
    if by_row:
        count = outer * rows + groups.experts * inner * cols
        zeros = torch.zeros(count, dtype=torch.int32, device=x.device)
        of_rows = zeros[: outer * rows] if rows else None
        of_columns = zeros[outer * rows :] if cols else None
        launch(
            kernels.group_maxima, slots * width, matrix, of_rows, of_columns, counts, G=groups, warps=LARGE_BLOCK_WARPS
        )  # fmt: skip
    # Ones: a row without an expert, and an expert without rows, have no largest magnitude.
    make = partial(
        torch.ones if by_row else torch.empty,
        dtype=torch.uint8 if mx else torch.float32,
        device=x.device,
    )
    if rows:
        sizes = (slots * TILE, inner // mx) if mx else (outer, 1 if by_row else width)
        scales = make(sizes)
    if cols:
        columns = slots * TILE // mx if mx else slots
        turned_scales = make((groups.experts, inner) if by_row else (inner, columns))
    codes = x.new_empty(outer, inner, dtype=E4M3.storage) if rows else None
    turned = x.new_empty(inner, slots * TILE, dtype=E4M3.storage) if cols else None
    plain = Orientation(None if codes is None else codes.view(torch.uint8), scales, of_rows)
    across = None if turned is None else turned.view(torch.uint8)
    transposed = Orientation(across, turned_scales, of_columns)
    launch(
        kernels.cast_groups, slots * width, matrix, plain, transposed, counts, slots,
        G=groups, C=constants(x, cast), APART=apart, MX=mx, warps=LARGE_BLOCK_WARPS,
    )  # fmt: skip
    return GroupedCodes(codes, scales, turned, turned_scales)


def is_by_row(cast: Cast) -> bool:
    return cast.tile == (1, WHOLE)


def below(w: QTensor, experts: int) -> Matrices:
    """The matrices of a stack [E N, K], which lie below each other."""
    own, inner = w.data.shape[0] // experts, w.data.shape[1]
    if w.units is not None:  # whole blocks of 128 rows for each expert, one after another
        place = Place(own, inner, inner, own * inner, 0, 0)
        return Matrices(w.data, w.units.view(experts, -1), place, False)
    tiles, wide = w.scale.shape
    place = Place(own, inner, inner, own * inner, wide, tiles // experts * wide)
    return Matrices(w.data.contiguous(), w.scale.contiguous(), place, is_by_row(w.cast))


def beside(w: QTensor, experts: int) -> Matrices:
    """The matrices of a turned stack [N, E K] in square tiles, which lie beside each other."""
    (rows, inner), wide = w.data.shape, w.scale.shape[1]
    place = Place(rows, inner // experts, inner, inner // experts, wide, wide // experts)
    return Matrices(w.data.contiguous(), w.scale.contiguous(), place, False)


def product(
    x: GroupedCodes, w: Matrices, counts: Tensor, bias: Optional, dtype: torch.dtype, fast: bool
) -> Tensor:
    """x [S, K] times the matrix [N, K] of each row's expert, plus bias [E, N] -> [S, N]."""
    assert x.rows is not None and x.row_scales is not None
    groups, rows, columns = Groups.of(counts), x.rows.shape[0], w.place.rows
    out = x.rows.new_empty(rows, columns, dtype=dtype)
    blocks = _blocks(((1, 0), (1, 0)) if w.by_row else ((1, TILE), (TILE, TILE)), fast, out.device)
    tiles = slots_for(rows, groups.experts + 1)
    _launch_product(
        kernels.grouped_mm, tiles * -(-columns // blocks.n), blocks,
        x.rows, x.row_scales, w.codes, w.scales, None if bias is None else bias.contiguous(), out, counts,
        tiles, w.place, G=groups,
    )  # fmt: skip
    return out


def gradient(
    lhs: GroupedCodes,
    rhs: GroupedCodes,
    counts: Tensor,
    dtype: torch.dtype,
    by_row: bool,
    fast: bool,
) -> Tensor:
    """Sum over each expert's tokens: `cols` of operands with M and N features -> [E, M, N]."""
    assert lhs.cols is not None and lhs.col_scales is not None
    assert rhs.cols is not None and rhs.col_scales is not None
    groups, slots = Groups.of(counts), lhs.cols.shape[1] // TILE
    rows, columns = lhs.cols.shape[0], rhs.cols.shape[0]
    out = lhs.cols.new_empty(groups.experts, rows, columns, dtype=dtype)
    blocks = _blocks(((1, 0), (1, 0)) if by_row else ((1, TILE), (1, TILE)), fast, out.device)
    tiles = -(-rows // blocks.m) * -(-columns // blocks.n)
    _launch_product(
        kernels.grouped_grad, groups.experts * tiles, blocks,
        lhs.cols, lhs.col_scales, rhs.cols, rhs.col_scales, out, counts, slots, rows, columns, G=groups,
    )  # fmt: skip
    return out


def sums(x: Tensor, counts: Tensor, dtype: torch.dtype) -> Tensor:
    """Sum each expert's rows in float32: x [S, N] -> [E, N]."""
    x, groups = x if x.stride(1) == 1 else x.contiguous(), Groups.of(counts)
    out = x.new_empty(groups.experts, x.shape[1], dtype=dtype)
    launch(
        kernels.sum_groups, groups.experts * -(-x.shape[1] // SUM_COLUMNS), Matrix.of(x), out, counts,
        G=groups, ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS, warps=SUM_WARPS,
    )  # fmt: skip
    return out


def clear_rest(y: Tensor, counts: Tensor) -> None:
    """Set the rows of y [S, N] that belong to no expert to zero."""
    launch(
        kernels.clear_rest, -(-y.shape[0] // SUM_ROWS), Matrix.of(y), counts,
        G=Groups.of(counts), ROWS=SUM_ROWS, COLUMNS=SUM_COLUMNS, warps=SUM_WARPS,
    )  # fmt: skip


def _blocks(tiles: tuple[tuple[int, int], ...], fast: bool, device: torch.device) -> Blocks:
    capability = device_facts(device.type, device.index).capability
    return replace(blocks_for([*tiles[0], *tiles[1]], capability, TILE), fast=fast)


def _launch_product(kernel: Any, programs: int, blocks: Blocks, *given: Any, G: Groups) -> None:
    """Launch a product with contraction, as `ops.mm.triton` does."""
    launch(
        kernel, programs, *given, G=G, B=blocks, warps=blocks.warps, num_stages=blocks.stages, enable_fp_fusion=True
    )  # fmt: skip


def passes(
    x: Tensor, w: Tensor, bias: Optional, gy: Tensor, counts: Tensor, casts: tuple[Cast, Cast],
    multiply: Callable[..., Tensor] = product, contract: Callable[..., Tensor] = gradient,
) -> tuple[Tensor, ...]:  # fmt: skip
    """Return output, grad_input, grad_weight and the bias' gradient of a stack, for the self-check.

    w         [E, N, K]; casts: of x and gy, and of w
    multiply  as `product`; contract: as `gradient`
    """
    experts, stack, by_row = w.shape[0], w.flatten(0, 1), is_by_row(casts[1])
    codes, grads = (operand(each, casts[0], counts, rows=True, cols=True) for each in (x, gy))
    matrices = below(quantize(stack, casts[1]), experts)
    turned = (
        beside(quantize(stack.T, casts[1]), experts)
        if casts[1].is_symmetric
        else turned_stack(stack, casts[1], experts)
    )
    dtype = torch.float32 if multiply is product else torch.bfloat16
    return (
        multiply(codes, matrices, counts, bias, dtype, True),
        multiply(grads, turned, counts, None, dtype, False),
        contract(grads, codes, counts, dtype, by_row, False),
        sums(gy, counts, torch.float32),
    )
