"""Launches of the kernel that rotates and encodes, on tensors that the caller has checked. The contract: `ops.hadamard.encoding`."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.ops.hadamard import triton_kernel
from narrowgauge.ops.triton.arguments import Matrix
from narrowgauge.ops.triton.cast_constants import CastConstants
from narrowgauge.ops.triton.launch import launch

# 128 columns are runs of 256 bytes in 16 bits; 32 rows of them are 32 elements for each of 128 threads. Not measured yet on a GPU.
ROWS, COLUMNS, WARPS = 32, 128, 4
SMALLEST_PRODUCT = 16  # of tensor cores, along each axis


def rotate_and_encode(
    x: Tensor, order: int, signs: Tensor | None, scale: Tensor, C: CastConstants, packed: bool, bits: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """x [rows, n], not empty -> (codes, packed, bits), each uint8 [rows, ...] or None; see `hadamard`."""
    x = x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
    rows, columns = x.shape
    whole = -(-columns // order) * order

    def output(per_byte: int) -> Tensor:
        return torch.empty(rows, -(-whole // per_byte), dtype=torch.uint8, device=x.device)

    out = triton_kernel.Outputs(output(1), output(2) if packed else None, output(8) if bits else None)
    programs = -(-rows // ROWS) * -(-whole // COLUMNS)
    launch(
        triton_kernel.rotate_and_encode, programs, Matrix.of(x), signs, scale, out, whole, C=C, ORDER=order,
        SIZE=max(order, SMALLEST_PRODUCT), PIECES=3 if x.dtype == torch.float32 else 1, ROWS=ROWS,
        COLUMNS=COLUMNS, warps=WARPS,
    )  # fmt: skip
    return out.codes, out.packed, out.bits
