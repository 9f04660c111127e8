"""How block-scaled GEMMs want their scales in memory (cuBLAS 12.9, "Block scaling factors layout"; torch's ScaledBlas.cpp).

R is the outer axis, C the number of tiles along the contracted axis.

    outer_major      1x128 tiles     [R, C] with strides [1, R]: neighbours in memory are the same block of neighbouring rows
    padded_to_four   128x128 tiles   [C4, R/128] with strides [1, C4], C4 = C rounded up to a multiple of 4
    swizzled         1x32 and 1x16   one byte each, flat: blocks of 128 rows and 4 columns, 512 bytes, the blocks of a row panel
                                     one after another; within a block, row r and column c are at (r % 32) * 16 + (r // 32) * 4 + c

What is filled up is zero. Its codes are zeros too, so no product changes.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

ROWS, COLUMNS, GROUP = 128, 4, 32  # of a swizzled block; rows that lie together in it


def outer_major(scale: Tensor, rows: int) -> Tensor:
    """scale [R, C] float32 -> [rows, C] with strides [1, rows], rows >= R. One copy."""
    return pad(scale.T, (0, rows - scale.shape[0])).contiguous().T


def padded_to_four(scale: Tensor) -> Tensor:
    """scale [R, C] float32, one per 128x128 tile -> [C rounded up to 4, R] with strides [1, C rounded up]. One copy."""
    return pad(scale, (0, -scale.shape[1] % COLUMNS)).contiguous().T


def swizzled(scale: Tensor) -> Tensor:
    """scale [R, C], one byte per element -> flat, R rounded up to 128 times C rounded up to 4. One copy."""
    bytes_ = pad(scale.view(torch.uint8), (0, -scale.shape[1] % COLUMNS, 0, -scale.shape[0] % ROWS))
    panels, columns = bytes_.shape[0] // ROWS, bytes_.shape[1] // COLUMNS
    blocks = bytes_.view(panels, ROWS // GROUP, GROUP, columns, COLUMNS)
    return blocks.permute(0, 3, 2, 1, 4).reshape(-1).view(scale.dtype)


def to_e8m0(scale: Tensor) -> Tensor:
    """Powers of two, 2**-126 to 2**127, or NaN, float32 -> float8_e8m0fnu of the same shape: the exponent bits as they are."""
    exponents = (scale.contiguous().view(torch.int32) >> 23) & 0xFF  # NaN has 0xFF there, which is E8M0's NaN
    return exponents.to(torch.uint8).view(torch.float8_e8m0fnu)
