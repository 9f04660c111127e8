"""FP8 in tiles of 1x128 and 128x128 where cuBLAS has no such GEMM: Ada, Hopper before CUDA 12.9, Blackwell (see triton_blocks.py).

Takes what `native_block` takes, 128x128 by 128x128 and E5M2 against E4M3 besides. No filling up: the kernel masks what overruns.
Compiled at the first call (seconds, kept by Triton in its own cache). While torch.compile traces it is one opaque operator,
`narrowgauge::block_mm`, so no graph breaks.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from narrowgauge.addresses import refuse_wrappers
from narrowgauge.formats import E4M3, E5M2
from narrowgauge.ops.mm.cublas import empty_product, refuse_without_units
from narrowgauge.ops.mm.cublas_block import NOT_IN_BLOCKS, SQUARE, VECTOR
from narrowgauge.ops.mm.spec import MmSpec
from narrowgauge.ops.registry import constant_while_compiling
from narrowgauge.qtensor import QTensor


@dataclass(frozen=True)
class Shape:
    """The block sizes of a launch. They must leave no register spilled and fit into shared memory (tests/ops/test_mm_triton.py)."""

    m: int
    n: int
    warps: int
    stages: int
    group_m: int = 8


def shape_for(capability: tuple[int, int], rows: int) -> Shape:
    """9.x and 10.x multiply from shared memory, of which they have 227 KiB: 128 x 128 totals, a stage of both operands is 32 KiB.

    Ada and Blackwell 12.x multiply from registers and have 99 KiB: 128 x 128 would spill there. Few rows get a lower tile.
    """
    if capability[0] not in (9, 10):
        return Shape(m=128, n=64, warps=8, stages=3)
    return Shape(m=64, n=128, warps=4, stages=4) if rows <= 64 else Shape(m=128, n=128, warps=8, stages=4)


def refuse(spec: MmSpec) -> str | None:
    """FP8 in blocks of 128 on compute capability 8.9 and above, with Triton installed."""
    casts = (spec.lhs, spec.rhs)
    if any(cast is None or cast.format not in (E4M3, E5M2) or cast.tile not in (VECTOR, SQUARE) for cast in casts):
        return NOT_IN_BLOCKS
    if (reason := refuse_without_units(spec)) is not None:
        return reason
    return None if _has_triton() else "Triton is not installed"


@constant_while_compiling
@cache
def _has_triton() -> bool:
    return importlib.util.find_spec("triton") is not None


def run(lhs: QTensor, rhs: QTensor, bias: Tensor | None, out_dtype: torch.dtype, fast_accumulate: bool) -> Tensor:
    """fast_accumulate has no effect: sums leave the tensor core after 128 products. One rounding, to out_dtype."""
    m, n = lhs.shape[0], rhs.shape[0]
    if 0 in (m, n, lhs.shape[1]):
        return empty_product(m, n, lhs.device, bias, out_dtype)
    call = torch.ops.narrowgauge.block_mm if torch.compiler.is_compiling() else launch
    return call(
        lhs.data.contiguous(), lhs.scale.contiguous(), rhs.data.contiguous(), rhs.scale.contiguous(),
        bias, [lhs.cast.tile[0], rhs.cast.tile[0]], out_dtype,
    )  # fmt: skip


def launch(
    lhs: Tensor,
    lhs_scale: Tensor,
    rhs: Tensor,
    rhs_scale: Tensor,
    bias: Tensor | None,
    tile_rows: list[int],
    out_dtype: torch.dtype,
) -> Tensor:
    """lhs [M, K], rhs [N, K] and their scales [outer / tile_rows, K / 128], all contiguous -> [M, N]."""
    from narrowgauge.ops.mm.triton_blocks import Blocks, block_mm

    refuse_wrappers(lhs, lhs_scale, rhs, rhs_scale, bias)
    (m, k), n = lhs.shape, rhs.shape[0]
    out = torch.empty(m, n, dtype=out_dtype, device=lhs.device)
    capability = torch.cuda.get_device_capability(lhs.device) if lhs.device.type == "cuda" else (0, 0)
    shape = shape_for(capability, m)
    grid = (-(-m // shape.m) * -(-n // shape.n),)
    # Contraction of products and sums is left on: total + part * scale is then rounded once, and costs nothing.
    with torch.cuda.device(lhs.device if lhs.device.type == "cuda" else -1):  # Triton launches on the current device
        block_mm[grid](
            lhs, rhs, lhs_scale, rhs_scale, None if bias is None else bias.contiguous(), out, m, n, k,
            B=Blocks(tile_rows[0], tile_rows[1], shape.m, shape.n, shape.group_m),
            num_warps=shape.warps, num_stages=shape.stages, enable_fp_fusion=True,
        )  # fmt: skip
    return out


torch.library.define(
    "narrowgauge::block_mm",
    "(Tensor lhs, Tensor lhs_scale, Tensor rhs, Tensor rhs_scale, Tensor? bias, int[] tile_rows, ScalarType out_dtype) -> Tensor",
)
torch.library.impl("narrowgauge::block_mm", "CUDA", launch)


@torch.library.register_fake("narrowgauge::block_mm")
def _shape_of_block_mm(
    lhs: Tensor,
    lhs_scale: Tensor,
    rhs: Tensor,
    rhs_scale: Tensor,
    bias: Tensor | None,
    tile_rows: list[int],
    out_dtype: torch.dtype,
) -> Tensor:
    return lhs.new_empty((lhs.shape[0], rhs.shape[0]), dtype=out_dtype)
