"""The tensors of a QTensor in files, and their numbers as readers decode them.

    tensors   Q -> {last part of a tensor's name: tensor}, without a rounding
    decode    {last part: tensor} -> [N, K] float32

The two directions share no code: `decode` follows the definitions of compressed-tensors and of
transformers' FP8 format, so that it checks `tensors`. Shapes and names are in `file_formats`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowgauge.scaling import WHOLE, to_exponents

if TYPE_CHECKING:
    from narrowgauge.qtensor import QTensor

MX, NV = 32, 16  # elements of a tile along the contracted axis
# Value of each code of E2M1, the sign in the highest bit.
# (OCP MX v1.0, section 5.3.3)
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def row_scales(q: QTensor) -> Tensor:
    """[N, 1] float32, from one scale per row or for several rows."""
    scale, rows = q.full_scale(), q.shape[0]
    tile = rows if q.cast.tile[0] == WHOLE else q.cast.tile[0]
    return scale.repeat_interleave(max(tile, 1), 0)[:rows].contiguous()


def fp8(q: QTensor) -> Tensor:
    return q.data.view(torch.float8_e4m3fn)


def mx_tensors(name: str) -> Callable[[QTensor], dict[str, Tensor]]:
    def tensors(q: QTensor) -> dict[str, Tensor]:
        codes = q.data if name == "weight_packed" else fp8(q)
        return {name: codes, "weight_scale": to_exponents(q.scale)}

    return tensors


def nv_tensors(q: QTensor) -> dict[str, Tensor]:
    assert q.global_scale is not None
    # Readers know tiles of one row: a tile of 16 rows has its scale 16 times.
    scale = q.scale.repeat_interleave(q.cast.tile[0], 0)[: q.shape[0]]
    return {
        "weight_packed": q.data,
        "weight_scale": scale.to(torch.float8_e4m3fn),
        "weight_global_scale": (1 / q.global_scale).reshape(1),
    }


def times(name: str) -> Callable[[Mapping[str, Tensor]], Tensor]:
    """weight times a scale for each block; the block follows from the two shapes."""

    def decode(tensors: Mapping[str, Tensor]) -> Tensor:
        weight, scale = tensors["weight"].to(torch.float32), tensors[name]
        for axis in (0, 1):
            scale = scale.repeat_interleave(weight.shape[axis] // scale.shape[axis], axis)
        return weight * scale

    return decode


def _unpacked(packed: Tensor) -> Tensor:
    # The first of two elements is in the low nibble, in compressed-tensors as here.
    codes = torch.stack((packed & 0xF, packed >> 4), dim=-1).flatten(-2)
    values = torch.tensor(_E2M1, dtype=torch.float32, device=packed.device)
    return torch.cat((values, -values))[codes.to(torch.int64)]


def mx_decode(tensors: Mapping[str, Tensor]) -> Tensor:
    packed = tensors.get("weight_packed")
    weight = tensors["weight"].to(torch.float32) if packed is None else _unpacked(packed)
    scale = torch.exp2(tensors["weight_scale"].to(torch.float32) - 127)
    return weight * scale.repeat_interleave(MX, 1)


def nv_decode(tensors: Mapping[str, Tensor]) -> Tensor:
    scale = tensors["weight_scale"].to(torch.float32) * (1 / tensors["weight_global_scale"])
    return _unpacked(tensors["weight_packed"]) * scale.repeat_interleave(NV, 1)
