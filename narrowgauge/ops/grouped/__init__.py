"""grouped: casts and products of rows sorted by expert, each in one or two launches for all experts.

    x [S, K], sorted by expert; w [E, N, K]; counts int32 [E + 1] on the device, rows of each
    expert and rows without one

    output       y_e  = x_e  @ w_e.T + b_e     [n_e, N]; zero for rows without an expert
    grad_input   gx_e = gy_e @ w_e             [n_e, K]
    grad_weight  gw_e = gy_e.T @ x_e           [N, K]; zero for an expert without rows

Contract: the codes and scales of a loop over experts that casts x_e, gy_e and w_e by themselves, and
products of these as `ops.mm` defines them. The host does not read `counts`.

`choose` asks the kernels in the order of speed. The host waits in the last one alone:

    native     one scale for a row (fp8-row): torch's grouped GEMM, on 9.0
    native-mx  one scale for 1 x 32 (mxfp8): torch's grouped GEMM, on 10.x
    triton     one scale for a row, or tiles of 1 x 128 beside 128 x 128 (fp8-block); from 8.9 on
    reference  the definition: the caller multiplies expert by expert, and reads `counts` once

Left out: one scale for an expert (fp8-current, int8), and state for each expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from narrowgauge.formats import E4M3
from narrowgauge.ops.registry import Device, Kernel, KernelChoice, Refusal, Registry, imported
from narrowgauge.ops.triton import refuse_tensors
from narrowgauge.recipe import CurrentScaling
from narrowgauge.scaling import WHOLE

if TYPE_CHECKING:
    from narrowgauge.ops.selfcheck import KernelCheck
    from narrowgauge.recipe import Cast

TILE, ALIGNMENT, MX = 128, 16, 32  # TILE: tokens, and elements of a tile along either axis
MOST_EXPERTS = 1023  # a program holds one number for each in registers


@dataclass(frozen=True)
class GroupSpec:
    """Properties of a stack of experts that decide which kernel is chosen.

    x, w     casts of the rows and of the weights
    device   where they are
    dtypes   of x, of the result and of the weights
    experts  number of matrices
    sizes    rows and columns of a matrix as it lies in memory
    biased   the result has a bias
    """

    x: Cast | None
    w: Cast | None
    device: Device
    dtypes: tuple[torch.dtype, ...]
    experts: int
    sizes: tuple[int, int]
    biased: bool


def refuse(spec: GroupSpec) -> Refusal | None:
    """Return the reason why the grouped kernels do not take such a stack, or None."""
    if _tiles(spec) not in (((1, TILE), (TILE, TILE)), ((1, WHOLE), (1, WHOLE))):
        words = f"the grouped kernels take E4M3 with a scale for a row, or for 1x{TILE} beside {TILE}x{TILE}"
        return Refusal("tile", words)
    return _refuse_stack(spec)


def _tiles(spec: GroupSpec) -> tuple[tuple[int, int] | None, ...]:
    casts = (spec.x, spec.w)
    return tuple(None if cast is None or not _is_plain(cast) else cast.tile for cast in casts)


def _refuse_stack(spec: GroupSpec) -> Refusal | None:
    """Return why no grouped kernel takes a stack of this dtype and these sizes here, or None."""
    refusal = refuse_tensors(spec.device, spec.dtypes[:1], False)
    if refusal is not None:
        return refusal
    if spec.device.capability < (8, 9):
        found = ".".join(map(str, spec.device.capability))
        return Refusal("capability", f"compute capability {found}, FP8 needs 8.9")
    if spec.experts > MOST_EXPERTS:
        return Refusal("shape", f"{spec.experts} experts, more than {MOST_EXPERTS}")
    if spec.sizes[0] % TILE:
        rows = f"a tile of {TILE} rows would hold two experts, which have {spec.sizes[0]}"
        return Refusal("shape", rows)
    return None


def refuse_native(spec: GroupSpec) -> Refusal | None:
    """Return the reason why torch's grouped GEMM does not take such a stack, or None."""
    if spec.w is not None and spec.w.tile != (1, WHOLE):
        return Refusal("operands", "takes one scale for a row")
    if (refusal := refuse(spec)) is not None:
        return refusal
    if spec.device.capability != (9, 0):
        return Refusal("capability", "torch's grouped GEMM by rows is made for 9.0")
    if any(dtype != torch.bfloat16 for dtype in spec.dtypes):
        return Refusal("dtype", "torch's grouped GEMM gives bfloat16 alone")
    return _refuse_sizes(spec, ALIGNMENT)


def refuse_mx(spec: GroupSpec) -> Refusal | None:
    """Return the reason why torch's grouped GEMM of MX tiles does not take such a stack, or None."""
    if _tiles(spec) != ((1, MX), (1, MX)) or spec.x is None or spec.x.mx_kind != "mxfp8":
        return Refusal("operands", "takes MXFP8")
    if (refusal := _refuse_stack(spec)) is not None:
        return refusal
    if spec.device.capability[0] != 10 or spec.device.cuda < (12, 8):
        return Refusal("capability", "torch's grouped GEMM of MX tiles needs 10.x and CUDA 12.8")
    if any(dtype != torch.bfloat16 for dtype in spec.dtypes):
        return Refusal("dtype", "torch's grouped GEMM gives bfloat16 alone")
    return _refuse_sizes(spec, TILE)


def _refuse_sizes(spec: GroupSpec, alignment: int) -> Refusal | None:
    if not spec.biased and not any(size % alignment for size in spec.sizes):
        return None
    return Refusal("shape", f"torch's grouped GEMM takes no bias, and multiples of {alignment}")


def _is_plain(cast: Cast) -> bool:
    return (
        (cast.format, cast.rounding) == (E4M3, "nearest")
        and isinstance(cast.calibrate, CurrentScaling)
        and not cast.has_global_scale
    )


def check_of_groups() -> KernelCheck[GroupSpec]:
    """Return the self-check of the grouped kernels."""
    from narrowgauge.ops.grouped.selfcheck import CHECK  # imported only when a kernel is checked

    return CHECK


def _loop(*_: object) -> None:
    raise NotImplementedError("the caller of `choose` multiplies expert by expert")


KERNELS: Registry[GroupSpec] = Registry("grouped")
KERNELS.register(
    Kernel("native", refuse_native, imported(f"{__name__}.native", "passes"), check=check_of_groups),
    Kernel("native-mx", refuse_mx, imported(f"{__name__}.native", "passes"), check=check_of_groups),
    Kernel("triton", refuse, imported(f"{__name__}.launches", "passes"), check=check_of_groups),
    Kernel("reference", lambda spec: None, _loop, by_torch=True),
)  # fmt: skip


def slots_for(rows: int, experts: int) -> int:
    """Return the largest number of tiles that so many rows can take."""
    return (rows + (TILE - 1) * experts) // TILE


def choose(spec: GroupSpec) -> KernelChoice[GroupSpec]:
    """Return the kernel for a stack of experts, "reference" if none takes it."""
    return KERNELS.choose(spec)
