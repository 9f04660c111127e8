"""grouped: casts and products of rows sorted by expert, one launch for all experts each.

    x [S, K], sorted by expert; w [E, N, K]; counts int32 [E + 1] on the device, rows of each
    expert and rows without one

    output       y_e  = x_e  @ w_e.T + b_e     [n_e, N]; zero for rows without an expert
    grad_input   gx_e = gy_e @ w_e             [n_e, K]
    grad_weight  gw_e = gy_e.T @ x_e           [N, K]; zero for an expert without rows

Contract: the codes and scales of a loop over experts that casts x_e, gy_e and w_e by themselves, and
products of these as `ops.mm` defines them. The host does not read `counts`.

`choose` asks the kernels in the order of speed. "loop" is the definition: the caller multiplies
expert by expert, and reads `counts` once for a layer. It is chosen where the kernels refuse.

Left out: casts that need the largest magnitude of a tensor, a row or a column of one expert, which
take a pass of their own, and MX tiles, whose scales the tensor cores of 10.x multiply.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from narrowgauge.formats import E4M3
from narrowgauge.ops.registry import Device, Kernel, KernelChoice, Refusal, Registry, imported
from narrowgauge.ops.triton import refuse_tensors
from narrowgauge.recipe import CurrentScaling

if TYPE_CHECKING:
    from narrowgauge.ops.selfcheck import KernelCheck
    from narrowgauge.recipe import Cast

TILE = 128
MOST_EXPERTS = 1023  # a program holds one number for each in registers


@dataclass(frozen=True)
class GroupSpec:
    """Properties of a stack of experts that decide which kernel is chosen.

    x, w     casts of the rows and of the weights; those of gy are x's
    device   where they are
    dtype    of x
    experts  number of matrices
    outer    rows of a matrix as it lies in memory
    """

    x: Cast | None
    w: Cast | None
    device: Device
    dtype: torch.dtype
    experts: int
    outer: int


def refuse(spec: GroupSpec) -> Refusal | None:
    """Return the reason why the grouped kernels do not take such a stack, or None."""
    if not _is_tiled(spec.x, (1, TILE)) or not _is_tiled(spec.w, (TILE, TILE)):
        tiles = f"1x{TILE} beside {TILE}x{TILE}"
        return Refusal("tile", f"the grouped kernels take E4M3 in tiles of {tiles}, as fp8-block")
    if (refusal := refuse_tensors(spec.device, (spec.dtype,), False)) is not None:
        return refusal
    if spec.device.capability < (8, 9):
        found = ".".join(map(str, spec.device.capability))
        return Refusal("capability", f"compute capability {found}, FP8 needs 8.9")
    if spec.experts > MOST_EXPERTS:
        return Refusal("shape", f"{spec.experts} experts, more than {MOST_EXPERTS}")
    if spec.outer % TILE:
        rows = f"a tile of {TILE} rows would hold two experts, which have {spec.outer}"
        return Refusal("shape", rows)
    return None


def _is_tiled(cast: Cast | None, tile: tuple[int, int]) -> bool:
    return (
        cast is not None
        and (cast.format, cast.tile, cast.rounding) == (E4M3, tile, "nearest")
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
    Kernel("triton", refuse, imported("narrowgauge.ops.grouped.launches", "passes"), check=check_of_groups),
    Kernel("loop", lambda spec: None, _loop, by_torch=True),
)  # fmt: skip


def choose(spec: GroupSpec) -> KernelChoice[GroupSpec]:
    """Return the kernel for a stack of experts, "loop" if none takes it."""
    return KERNELS.choose(spec)
