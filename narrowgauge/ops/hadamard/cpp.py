"""The C++ kernels of the CPU (ops/cpp/int4.cpp) with the signatures of the definition."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowgauge.ops.cpp.int4 import LIBRARY
from narrowgauge.ops.hadamard import definition

if TYPE_CHECKING:
    from narrowgauge.formats import Format

DTYPES = {torch.float32: 0, torch.bfloat16: 1}  # dtypes of x; others are read as float32


def rotate(x: Tensor, block: int, signs: Tensor | None) -> Tensor:
    """See `ops.hadamard.rotate`."""
    return _turn(x, -(-x.shape[1] // block) * block, x.shape[1], block, signs)


def unrotate(
    y: Tensor, block: int, inner: int, signs: Tensor | None, bits: Tensor | None
) -> Tensor:
    """See `ops.hadamard.unrotate`."""
    return _turn(y, y.shape[1], inner, block, signs, bits, inverse=True)


def _turn(
    x: Tensor,
    whole: int,
    inner: int,
    block: int,
    signs: Tensor | None,
    bits: Tensor | None = None,
    inverse: bool = False,
) -> Tensor:
    """Rotate x [rows, inner] -> [rows, whole] float32; inverse: [rows, whole] -> [rows, inner].

    whole  inner rounded up to whole blocks
    bits   (inverse) uint8 [rows, ceil(whole / 8)]; elements whose bit is zero count as 0. None: all
           count
    """
    x = x if x.dtype in DTYPES else x.to(torch.float32)
    # Rows may have any distance, so a slice of columns needs no copy.
    x = x if x.shape[1] <= 1 or x.stride(1) == 1 else x.contiguous()
    signs = None if signs is None else signs.contiguous()
    bits = None if bits is None else bits.contiguous()
    out = torch.empty(len(x), inner if inverse else whole, dtype=torch.float32, device="cpu")
    sizes = (DTYPES[x.dtype], x.stride(0), inner, whole)
    LIBRARY.call("turn", len(x), len(x) * whole, x, *sizes, signs, bits, block, inverse, out)
    return out


def encode(
    y: Tensor, scale: Tensor, format: Format, packed: bool, bits: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """See `ops.hadamard.encode`."""
    if y.numel() == 0:  # the scale of an empty tensor may be empty too
        return definition.encode(y, scale, format, packed, bits)
    y = y.to(torch.float32).contiguous()
    rows, columns = y.shape
    codes = torch.empty(rows, columns, dtype=torch.int8, device="cpu")
    pairs = inside = None
    if packs := packed and format.codes_per_byte == 2:
        pairs = torch.empty(rows, -(-columns // 2), dtype=torch.uint8, device="cpu")
    if bits:
        inside = torch.empty(rows, -(-columns // 8), dtype=torch.uint8, device="cpu")
    outputs = (codes, pairs, inside)
    LIBRARY.call("encode", rows, y.numel(), y, columns, scale.float(), format.max, *outputs)
    return codes, format.pack(codes) if packed and not packs else pairs, inside


def rotate_encode(
    x: Tensor,
    block: int,
    signs: Tensor | None,
    scale: Tensor,
    format: Format,
    packed: bool,
    bits: bool,
    residual: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """See `ops.hadamard.Functions`."""
    if x.numel() == 0:
        return definition.rotate_encode(x, block, signs, scale, format, packed, bits, residual)
    x = x if x.dtype in DTYPES else x.to(torch.float32)
    x = x if x.shape[1] == 1 or x.stride(1) == 1 else x.contiguous()
    signs = None if signs is None else signs.contiguous()
    (rows, inner), pairs, inside, errors = x.shape, None, None, None
    whole = -(-inner // block) * block
    codes = torch.empty(rows, whole, dtype=torch.int8, device="cpu")
    if packs := packed and format.codes_per_byte == 2:
        pairs = torch.empty(rows, -(-whole // 2), dtype=torch.uint8, device="cpu")
    if bits:
        inside = torch.empty(rows, -(-whole // 8), dtype=torch.uint8, device="cpu")
    if residual:
        errors = torch.empty(rows, whole, dtype=torch.float32, device="cpu")
    LIBRARY.call(
        "turn_encode", rows, rows * whole, x, DTYPES[x.dtype], x.stride(0), inner, whole, signs, block,
        scale.float(), format.max, codes, pairs, inside, errors,
    )  # fmt: skip
    return codes, format.pack(codes) if packed and not packs else pairs, inside, errors


def step_sums(
    d: Tensor, codes: Tensor, bits: Tensor, residual: Tensor | None
) -> tuple[Tensor, Tensor]:
    """See `ops.hadamard.Functions`."""
    d, codes, bits = d.to(torch.float32).contiguous(), codes.contiguous(), bits.contiguous()
    errors = None if residual is None else residual.to(torch.float32).contiguous()
    sums = torch.empty(len(d), 2, dtype=torch.float64, device="cpu")
    LIBRARY.call("step_sums", len(d), d.numel(), d, codes, bits, errors, d.shape[1], sums)
    clipped, rounded = sums.sum(dim=0).to(torch.float32)
    return clipped, rounded


def decode(packed: Tensor, format: Format, length: int) -> Tensor:
    """See `ops.hadamard.decode`."""
    if format.codes_per_byte == 1:
        return format.unpack(packed, length)
    packed = packed.contiguous()
    codes = torch.empty(len(packed), length, dtype=torch.int8, device="cpu")
    LIBRARY.call("decode", len(codes), codes.numel(), packed, length, codes)
    return codes
