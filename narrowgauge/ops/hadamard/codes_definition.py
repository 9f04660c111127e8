"""The definition of codes in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.formats import Format


def encode(y: Tensor, scale: Tensor, format: Format, packed: bool, bits: bool) -> tuple[Tensor | None, ...]:
    """See `ops.hadamard.codes`."""
    ratio = y.to(torch.float32) / scale
    codes = format.encode(ratio)
    inside = pack_bits(ratio.abs() <= format.max) if bits else None
    return codes, format.pack(codes) if packed else None, inside


def pack_bits(bits: Tensor) -> Tensor:
    """bool [outer, n] -> uint8 [outer, ceil(n / 8)], the first of eight in the lowest bit."""
    full = torch.nn.functional.pad(bits.to(torch.uint8), (0, -bits.shape[1] % 8))
    return (full.reshape(len(bits), full.shape[1] // 8, 8) << _places(bits.device)).sum(dim=-1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, length: int) -> Tensor:
    """The inverse of `pack_bits`: uint8 [outer, m] -> bool [outer, length]."""
    return ((packed[:, :, None] >> _places(packed.device)) & 1).reshape(len(packed), packed.shape[1] * 8)[
        :, :length
    ] == 1


def _places(device: torch.device) -> Tensor:
    return torch.arange(8, dtype=torch.uint8, device=device)
