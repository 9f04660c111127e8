"""Launches of the grouped kernels (kernels.py), one for all experts each.

    operand      x [S, K] -> codes of x and of x.T                     one launch, one read of x
    product      x [S, K] times each expert's matrix -> [S, N]         one launch
    gradient     the product over each expert's tokens -> [E, M, N]    one launch
    sums         the sum of each expert's rows -> [E, N]               one launch

The host never reads how many rows an expert has, so nothing waits for the router. Results are those
of a loop over experts with the kernels of `ops.quantize` and `ops.mm.triton`, bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowgauge.formats import E4M3
from narrowgauge.ops.mm.triton import Blocks, blocks_for
from narrowgauge.ops.quantize import definition
from narrowgauge.ops.quantize.triton_launch import LARGE_BLOCK_WARPS, constants
from narrowgauge.ops.registry import device_facts
from narrowgauge.ops.triton.launch import Kernels, Matrix, launch
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast

TILE = 128  # tokens, and elements of a tile along either axis
SUM_ROWS, SUM_COLUMNS, SUM_WARPS = 32, 128, 4

kernels = Kernels("narrowgauge.ops.grouped.kernels")


class Codes(NamedTuple):
    """The codes of x [S, K] and of x.T; None where they were not asked for.

    rows    QTensor [S, K] with one scale per 1 x TILE
    cols    codes [K, slots * TILE], see kernels.py
    scales  float32 [K, slots], those of `cols`
    """

    rows: QTensor | None
    cols: Tensor | None
    scales: Tensor | None


class Place(NamedTuple):
    """Where element (n, k) of expert e lies: `expert * e + stride * n + k`; the same for scales."""

    stride: Any
    expert: Any
    scale_stride: Any
    scale_expert: Any


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


def slots_for(rows: int, experts: int) -> int:
    """Return the largest number of tiles that so many rows can take."""
    return (rows + (TILE - 1) * experts) // TILE


def operand(x: Tensor, cast: Cast, counts: Tensor, rows: bool, cols: bool) -> Codes:
    """Cast x [S, K], and x.T with `cols`, in tiles of 1 x TILE."""
    x = x if x.stride(1) == 1 else x.contiguous()
    groups, (outer, inner) = Groups.of(counts), x.shape
    slots, width = slots_for(outer, groups.experts), -(-inner // TILE)
    empty = x.new_empty
    codes = empty(outer, inner, dtype=E4M3.storage) if rows else None
    scales = empty(outer, width, dtype=torch.float32) if rows else None
    turned = empty(inner, slots * TILE, dtype=E4M3.storage) if cols else None
    turned_scales = empty(inner, slots, dtype=torch.float32) if cols else None
    as_bytes = [None if each is None else each.view(torch.uint8) for each in (codes, turned)]
    launch(
        kernels.cast_groups, slots * width, Matrix.of(x), as_bytes[0], scales, as_bytes[1], turned_scales,
        counts, slots, G=groups, C=constants(x, cast), warps=LARGE_BLOCK_WARPS,
    )  # fmt: skip
    made = None
    if codes is not None and scales is not None:
        made = QTensor(data=codes, scale=scales, cast=cast, inner=inner)
    return Codes(made, turned, turned_scales)


def product(
    x: QTensor, w: QTensor, counts: Tensor, bias: Tensor | None, dtype: torch.dtype, is_outer: bool
) -> Tensor:
    """x [S, K] times the matrix [N, K] of each row's expert, plus bias [E, N] -> [S, N].

    w         [E N, K] if `is_outer`, else [N, E K], in square tiles
    is_outer  the experts' matrices lie below each other, else beside each other
    """
    groups, (rows, inner) = Groups.of(counts), x.shape
    shape = place_of(w, groups.experts, is_outer)
    columns = w.shape[0] // (groups.experts if is_outer else 1)
    out = x.data.new_empty(rows, columns, dtype=dtype)
    blocks = _blocks(x.cast.tile, w.cast.tile, x.data.device)
    tiles = slots_for(rows, groups.experts + 1)
    _launch_product(
        kernels.grouped_mm, tiles * -(-columns // blocks.n), blocks,
        x.data, x.scale, w.data.contiguous(), w.scale.contiguous(), None if bias is None else bias.contiguous(), out, counts,
        tiles, columns, inner, shape, G=groups,
    )  # fmt: skip
    return out


def gradient(
    lhs: Tensor,
    lhs_scales: Tensor,
    rhs: Tensor,
    rhs_scales: Tensor,
    counts: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Sum over each expert's tokens: `cols` of two operands, for M and N features -> [E, M, N]."""
    groups, slots = Groups.of(counts), lhs_scales.shape[1]
    rows, columns = lhs.shape[0], rhs.shape[0]
    out = lhs.new_empty(groups.experts, rows, columns, dtype=dtype)
    blocks = _blocks((1, TILE), (1, TILE), lhs.device)
    tiles = -(-rows // blocks.m) * -(-columns // blocks.n)
    _launch_product(
        kernels.grouped_grad, groups.experts * tiles, blocks,
        lhs, lhs_scales, rhs, rhs_scales, out, counts, slots, rows, columns, G=groups,
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


def _blocks(lhs: tuple[int, int], rhs: tuple[int, int], device: torch.device) -> Blocks:
    capability = device_facts(device.type, device.index).capability
    return blocks_for([*lhs, *rhs], capability, TILE)


def _launch_product(kernel: Any, programs: int, blocks: Blocks, *given: Any, G: Groups) -> None:
    """Launch a product with contraction, as `ops.mm.triton` does."""
    launch(
        kernel, programs, *given, G=G, B=blocks, warps=blocks.warps, num_stages=blocks.stages, enable_fp_fusion=True
    )  # fmt: skip


def place_of(w: QTensor, experts: int, is_outer: bool) -> Place:
    """Return where the experts' matrices lie in the codes of their stack."""
    (rows, inner), (tiles, wide) = w.data.shape, w.scale.shape
    if is_outer:
        return Place(inner, rows // experts * inner, wide, tiles // experts * wide)
    return Place(inner, inner // experts, wide, wide // experts)


def passes(
    x: Tensor, w: Tensor, bias: Tensor | None, gy: Tensor, counts: Tensor, casts: tuple[Cast, Cast]
) -> tuple[Tensor, ...]:
    """Return output, grad_input, grad_weight and the bias' gradient of a stack, for the self-check.

    w  [E, N, K]; casts: of x and gy, and of w
    """
    stack = w.flatten(0, 1)
    matrix, turned = (definition.quantize(each, casts[1], None, None, None) for each in (stack, stack.T))
    codes, grads = (operand(each, casts[0], counts, rows=True, cols=True) for each in (x, gy))
    assert codes.rows is not None and grads.rows is not None
    assert grads.cols is not None and grads.scales is not None
    assert codes.cols is not None and codes.scales is not None
    grad_weight = gradient(
        grads.cols, grads.scales, codes.cols, codes.scales, counts, torch.float32
    )
    return (
        product(codes.rows, matrix, counts, bias, torch.float32, is_outer=True),
        product(grads.rows, turned, counts, None, torch.float32, is_outer=False),
        grad_weight,
        sums(gy, counts, torch.float32),
    )
