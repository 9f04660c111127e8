"""FP8 GEMM with power-of-two tiles, where cuBLAS has none.

This covers tiles with sides other than 128, and tiles of 128 on Ada, on Hopper before CUDA 12.9,
and on Blackwell.

Tiles are (a, b): a from 1 up, b along the contracted axis from 64 up; each operand has its own.
Shorter b (MX) is left to cuBLAS and to the emulation: sums would leave the tensor core after 32
products, and the additions in registers would take as long as a bfloat16 GEMM.

There is no padding: the kernel (triton_blocks.py) masks elements beyond the edges. It is compiled
at the first call, which takes seconds; Triton caches the binary. torch.compile sees one opaque
operator, `narrowgauge::block_mm`, so there is no graph break.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowgauge.addresses import dry_run_on, refuse_wrappers, tell_launch
from narrowgauge.ops import triton
from narrowgauge.ops.mm import definition
from narrowgauge.ops.registry import Refusal

if TYPE_CHECKING:
    from narrowgauge.ops.mm.spec import MmSpec
    from narrowgauge.qtensor import QTensor

LONGEST_STEP = 128  # products that the tensor cores sum before a scale multiplies the sum
Bias = Tensor | None


@dataclass(frozen=True)
class Blocks:
    """Compile-time constants of the kernel.

    lhs_rows, lhs_columns  sides of a tile of lhs with one scale, powers of two; the same for rhs.
                           0 columns: one scale for a row, in grouped products (ops/grouped)
    fast                   of one scale for a row: the tensor core adds all products itself
    m, n                   rows and columns of the result that a program computes
    k                      step along the contracted axis

    They must not spill registers, and must fit into shared memory (tests/ops/test_mm_triton.py).
    """

    lhs_rows: int
    lhs_columns: int
    rhs_rows: int
    rhs_columns: int
    m: int
    n: int
    k: int
    warps: int
    stages: int
    group_m: int = 8
    fast: bool = False


def blocks_for(tiles: list[int], capability: tuple[int, int], rows: int) -> Blocks:
    """Return the constants for a compute capability.

    9.x and 10.x multiply from shared memory (227 KiB): 128 x 128 results, and a stage of both
    operands is 32 KiB. Ada and Blackwell 12.x multiply from registers and have 99 KiB: 128 x 128
    would spill there. So it would, from 10.0 on and in grouped products, where both operands have a
    scale for each row: their products take 64 registers more. Few rows get a lower tile.
    """
    m, n, warps, stages = 128, 128, 8, 4
    if capability[0] not in (9, 10):
        n, stages = 64, 3
    elif rows <= 64:
        m, warps = 64, 4
    elif tiles[0] == tiles[2] == 1 and tiles[1]:
        n = 64
    step = min(tiles[1] or LONGEST_STEP, tiles[3] or LONGEST_STEP, LONGEST_STEP)
    of_lhs, of_rhs = (tiles[0], tiles[1]), (tiles[2], tiles[3])
    stages = triton.stages(stages, capability)
    return Blocks(*of_lhs, *of_rhs, m=m, n=n, k=step, warps=warps, stages=stages)


def refuse(spec: MmSpec) -> Refusal | None:
    """Refuse if Triton is not installed."""
    # In a dry run nothing is known about the software on the pretended device's machine.
    missing = "" if dry_run_on() is not None else triton.unavailable()
    return Refusal("toolchain", missing) if missing else None


def run(
    lhs: QTensor, rhs: QTensor, bias: Tensor | None, out_dtype: torch.dtype, fast_accumulate: bool
) -> Tensor:
    """See `ops.mm`. The result is rounded once, to out_dtype.

    fast_accumulate has no effect: sums leave the tensor core after at most 128 products.
    """
    if 0 in (lhs.shape[0], rhs.shape[0], lhs.shape[1]):
        return definition.run(lhs, rhs, bias, out_dtype, fast_accumulate)
    call = torch.ops.narrowgauge.block_mm if torch.compiler.is_compiling() else launch
    return call(
        lhs.data.contiguous(), lhs.scale.contiguous(), rhs.data.contiguous(), rhs.scale.contiguous(),
        bias, [*lhs.cast.tile, *rhs.cast.tile], out_dtype,
    )  # fmt: skip


def launch(
    lhs: Tensor,
    lhs_scale: Tensor,
    rhs: Tensor,
    rhs_scale: Tensor,
    bias: Bias,
    tiles: list[int],
    out_dtype: torch.dtype,
) -> Tensor:
    """Launch the kernel: lhs [M, K], rhs [N, K] and their scales, all contiguous -> [M, N].

    tiles  sides of the tiles of lhs, then of rhs
    """
    (m, k), n = lhs.shape, rhs.shape[0]
    out = torch.empty(m, n, dtype=out_dtype, device=lhs.device)
    if dry_run_on() is not None:
        tell_launch(
            "narrowgauge.ops.mm.triton_blocks.block_mm", [lhs, rhs, lhs_scale, rhs_scale, out]
        )
        return out
    from narrowgauge.ops.mm.triton_blocks import block_mm

    refuse_wrappers(lhs, lhs_scale, rhs, rhs_scale, bias)
    capability = (
        torch.cuda.get_device_capability(lhs.device) if lhs.device.type == "cuda" else (0, 0)
    )
    blocks = blocks_for(tiles, capability, m)
    grid = (-(-m // blocks.m) * -(-n // blocks.n),)
    # Triton launches on the current device.
    with torch.cuda.device(lhs.device if lhs.device.type == "cuda" else -1):
        # Contraction is on, unlike in the casts: total + part * scale is then rounded once, at no
        # cost. Triton 3.9 warns unless the option is given, because its default changes in 3.10.
        block_mm[grid](
            lhs, rhs, lhs_scale, rhs_scale, None if bias is None else bias.contiguous(), out, m, n, k,
            B=blocks, num_warps=blocks.warps, num_stages=blocks.stages, enable_fp_fusion=True,
        )  # fmt: skip
    return out


torch.library.define(
    "narrowgauge::block_mm",
    "(Tensor lhs, Tensor lhs_scale, Tensor rhs, Tensor rhs_scale, Tensor? bias, int[] tiles, ScalarType out_dtype) -> Tensor",
)
torch.library.impl("narrowgauge::block_mm", "CUDA", launch)


torch.library.register_fake(
    "narrowgauge::block_mm",
    lambda lhs, _, rhs, *rest: lhs.new_empty((lhs.shape[0], rhs.shape[0]), dtype=rest[-1]),
)
