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

from narrowgauge.scaling import WHOLE, tile_sizes, to_exponents

if TYPE_CHECKING:
    from narrowgauge.qtensor import QTensor
    from narrowgauge.recipe import Cast

MX, NV = 32, 16  # elements of a tile along the contracted axis
Q8, NV_BLOCK = 32, 64  # elements of a block of GGUF's Q8_0 and NVFP4
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


def modelopt_tensors(q: QTensor) -> dict[str, Tensor]:
    """As `nv_tensors` under the names of NVIDIA's modelopt, whose second scale multiplies."""
    found = nv_tensors(q)
    assert q.global_scale is not None
    return {
        "weight": found["weight_packed"],
        "weight_scale": found["weight_scale"],
        "weight_scale_2": q.global_scale.to(torch.float32),
    }


def gguf_type(cast: Cast) -> str:
    """The type of GGUF that holds codes of the cast, by its name there."""
    if cast.format.name == "int8":
        return "Q8_0"
    return "NVFP4" if cast.scale.two_level else "MXFP4"


def gguf_tensors(q: QTensor) -> dict[str, Tensor]:
    """`weight` u8 [N, bytes of a row], blocks of scale and codes; NVFP4's float32 as `scale` [1].

    Q8_0    32 elements: float16, 32 int8
    MXFP4   32 elements: an exponent, 16 bytes; byte j has element j low and element 16 + j high
    NVFP4   64 elements: 4 e4m3, 32 bytes; each 16 elements as above with 8
    """
    rows = q.shape[0]
    kind = gguf_type(q.cast)
    if kind == "Q8_0":
        scale = _spread(q.full_scale(), q, Q8).to(torch.float16).view(torch.uint8)
        codes = q.data.view(torch.uint8).reshape(rows, -1, Q8)
        return {"weight": torch.cat((scale.reshape(rows, -1, 2), codes), -1).flatten(1)}
    tile = MX if kind == "MXFP4" else NV
    low, high = q.one_to_a_byte().reshape(rows, -1, 2, tile // 2).unbind(-2)
    codes = low | (high << 4)
    if kind == "MXFP4":
        exponents = to_exponents(_spread(q.scale, q, MX))
        return {"weight": torch.cat((exponents[..., None], codes), -1).flatten(1)}
    assert q.global_scale is not None
    scale = _spread(q.scale, q, NV).to(torch.float8_e4m3fn).view(torch.uint8)
    four = NV_BLOCK // NV
    blocks = (scale.reshape(rows, -1, four), codes.reshape(rows, -1, four * NV // 2))
    return {"weight": torch.cat(blocks, -1).flatten(1), "scale": q.global_scale.reshape(1)}


def _spread(scale: Tensor, q: QTensor, block: int) -> Tensor:
    """[N, K/block]: a scale for each block of a row, from scales of the cast's larger tiles."""
    (rows, columns), (outer, inner) = q.shape, tile_sizes(q.shape, q.cast.tile)
    scale = scale.repeat_interleave(outer, 0)[:rows]
    # Tiles longer than the row have one scale.
    return scale.repeat_interleave(max(inner // block, 1), 1)[:, : columns // block].contiguous()


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


def gguf_decode(tensors: Mapping[str, Tensor]) -> Tensor:
    """weight, decoded by the package gguf, times the scale that llama.cpp applies to a product."""
    weight = tensors["weight"]
    return weight * tensors["scale"] if "scale" in tensors else weight


def modelopt_decode(tensors: Mapping[str, Tensor]) -> Tensor:
    scale = tensors["weight_scale"].to(torch.float32) * tensors["weight_scale_2"]
    return _unpacked(tensors["weight"]) * scale.repeat_interleave(NV, 1)
