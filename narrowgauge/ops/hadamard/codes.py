"""codes: a matrix and its one scale into 4-bit whole numbers, with what backward keeps of them; and back.

    codes = round(clip(y / scale, -max, max)), ties to even           int8, one to a byte: what an integer GEMM reads
    packed                                                            two to a byte, the first in the low nibble
    bits    |y / scale| <= max, the first of eight in the lowest bit  what was not clipped

Contract

    y       [outer, n], any float dtype; NaN becomes code 0 and counts as clipped (its scale is NaN and carries it)
    scale   [1, 1] float32
    format  INT4 or another IntFormat with codes of 8 bits at most; of more than 4 bits `packed` is a view of the codes

One read and one write of memory with a compiler (native-cpp), about ten passes in plain torch.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from narrowgauge.formats import Format
from narrowgauge.ops.cpp import int4 as cpp
from narrowgauge.ops.registry import Device, Kernel, Refusal, Registry, device_of


class Codes(NamedTuple):
    """codes int8 [outer, n]; packed uint8 [outer, ceil(n / codes per byte)]; bits uint8 [outer, ceil(n / 8)]."""

    codes: Tensor
    packed: Tensor | None
    bits: Tensor | None


def _encode_in_torch(y: Tensor, scale: Tensor, format: Format, packed: bool, bits: bool) -> tuple[Tensor | None, ...]:
    ratio = y.to(torch.float32) / scale
    codes = format.encode(ratio)
    inside = pack_bits(ratio.abs() <= format.max) if bits else None
    return codes, format.pack(codes) if packed else None, inside


def _encode_in_cpp(y: Tensor, scale: Tensor, format: Format, packed: bool, bits: bool) -> tuple[Tensor | None, ...]:
    if y.numel() == 0:  # its scale may be empty too
        return _encode_in_torch(y, scale, format, packed, bits)
    two = packed and format.codes_per_byte == 2
    codes, pairs, inside = cpp.encode(y, float(scale), format.max, two, bits)
    return codes, format.pack(codes) if packed and not two else pairs, inside


def _refuse(device: Device) -> Refusal | None:
    return cpp.refuse(device.type)


def _unclipped_in_cpp(d: Tensor, bits: Tensor) -> Tensor:
    return cpp.turn(d, d.shape[1], d.shape[1], 1, None, bits, inverse=True)


def _unclipped_in_torch(d: Tensor, bits: Tensor) -> Tensor:
    return torch.where(unpack_bits(bits, d.shape[1]), d, 0.0)


ENCODE: Registry[Device] = Registry("codes")
ENCODE.register(Kernel("native-cpp", _refuse, _encode_in_cpp))
ENCODE.register(Kernel("reference", lambda device: None, _encode_in_torch, by_torch=True))

UNPACK: Registry[Device] = Registry("codes, two to a byte")  # of 4-bit formats
UNPACK.register(Kernel("native-cpp", _refuse, lambda packed, format, length: cpp.decode(packed, length)))
UNPACK.register(
    Kernel(
        "reference", lambda device: None, lambda packed, format, length: format.unpack(packed, length), by_torch=True
    )
)

UNCLIPPED: Registry[Device] = Registry("unclipped")
UNCLIPPED.register(Kernel("native-cpp", _refuse, _unclipped_in_cpp))
UNCLIPPED.register(Kernel("reference", lambda device: None, _unclipped_in_torch, by_torch=True))


@torch.no_grad()
def encode(
    y: Tensor, scale: Tensor, format: Format, *, packed: bool = False, bits: bool = False, backend: str | None = None
) -> Codes:
    """y [outer, n] -> Codes, of which `packed` and `bits` only if they are asked for."""
    return Codes(*ENCODE.choose(device_of(y, scale), backend).kernel.run(y, scale, format, packed, bits))


@torch.no_grad()
def decode(packed: Tensor, format: Format, length: int) -> Tensor:
    """packed -> int8 codes [outer, length]."""
    if format.codes_per_byte != 2:
        return format.unpack(packed, length)
    codes: Tensor = UNPACK.choose(device_of(packed)).kernel.run(packed, format, length)
    return codes


@torch.no_grad()
def unclipped(d: Tensor, bits: Tensor) -> Tensor:
    """d [outer, n] float32 where its bit is set, else zero."""
    inside: Tensor = UNCLIPPED.choose(device_of(d, bits)).kernel.run(d, bits)
    return inside


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
