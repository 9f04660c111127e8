"""The C++ kernels of the CPU (ops/cpp/int4.py) behind the signatures of the definition."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from narrowgauge.addresses import number
from narrowgauge.ops.cpp import int4
from narrowgauge.ops.hadamard import definition

if TYPE_CHECKING:
    from narrowgauge.formats import Format


def rotate(x: Tensor, block: int, signs: Tensor | None) -> Tensor:
    return int4.turn(
        x, -(-x.shape[1] // block) * block, x.shape[1], block, signs, None, inverse=False
    )


def unrotate(
    y: Tensor, block: int, inner: int, signs: Tensor | None, bits: Tensor | None
) -> Tensor:
    return int4.turn(y, y.shape[1], inner, block, signs, bits, inverse=True)


def encode(
    y: Tensor, scale: Tensor, format: Format, packed: bool, bits: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    if y.numel() == 0:  # the scale of an empty tensor may be empty too
        return definition.encode(y, scale, format, packed, bits)
    two = packed and format.codes_per_byte == 2
    codes, pairs, inside = int4.encode(y, number(scale), format.max, two, bits)
    return codes, format.pack(codes) if packed and not two else pairs, inside


def decode(packed: Tensor, format: Format, length: int) -> Tensor:
    return (
        int4.decode(packed, length) if format.codes_per_byte == 2 else format.unpack(packed, length)
    )
