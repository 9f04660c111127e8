"""The definition of quantize and dequantize in plain torch; also the CPU's and the compiler's path.

Tiles (a, b) on [outer, inner] are looked at as [outer tiles, a, inner tiles, b]; scales as [outer tiles, 1, inner tiles, 1].
A ragged tensor is first filled up with zeros, which change no amax, and cut again at the end.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.errors import ShapeError
from narrowgauge.qtensor import QTensor, scale_shape, spread, tile_sizes
from narrowgauge.recipe import WHOLE, Cast
from narrowgauge.scaling import two_level_global


def tile_amax(x: Tensor, tile: tuple[int, int]) -> Tensor:
    """Largest magnitude in each tile.

    x     [outer, inner], any float dtype. NaN and infinity propagate, so a poisoned tile is visible in its scale.
    tile  elements per tile along (outer, inner); -1 takes the whole axis. The last tile may be short.
    ->    [ceil(outer / tile[0]), ceil(inner / tile[1])] float32; zero for an empty tensor.

    One pass over x, no copy when the tile divides the shape. Raises ShapeError if x is not two-dimensional.
    """
    if x.ndim != 2:
        raise ShapeError(f"tile_amax: x is {list(x.shape)}; it must be two-dimensional. Flatten the leading axes.")
    shape = scale_shape(tuple(x.shape), tile)
    if x.numel() == 0:
        return x.new_zeros(shape, dtype=torch.float32)
    if tile == (WHOLE, WHOLE):
        low, high = torch.aminmax(x)  # no |x| in memory
        return torch.maximum(-low, high).to(torch.float32).reshape(1, 1)
    return _as_tiles(x, tile).abs().amax(dim=(1, 3)).to(torch.float32)


def quantize(x: Tensor, cast: Cast, amax: Tensor | None, noise: Tensor | None, expand: torch.dtype | None) -> QTensor:
    """See `ops.quantize`; arguments are checked there."""
    shape = scale_shape(tuple(x.shape), cast.tile)
    amax = tile_amax(x, cast.tile) if amax is None else amax.to(torch.float32).expand(shape)
    scale, global_scale = _scales(amax, cast)
    divisor = scale if global_scale is None else scale * global_scale
    if cast.scale.two_level:
        divisor = torch.where(divisor == 0, torch.inf, divisor)  # a tile too small for its e4m3 scale becomes zeros
    y = _divide(x, divisor, cast.tile)
    format = cast.format
    if expand is not None:
        data = format.round(y, noise).to(expand)
    else:
        data = format.encode(y, noise)
        data = format.pack(data) if format.codes_per_byte > 1 else data
    return QTensor(data=data, scale=scale, cast=cast, inner=x.shape[1], global_scale=global_scale)


def dequantize(q: QTensor) -> Tensor:
    """decode(data) * spread(scale), float32."""
    return q.values().to(torch.float32) * spread(q.full_scale(), q.shape, q.cast.tile)


def _scales(amax: Tensor, cast: Cast) -> tuple[Tensor, Tensor | None]:
    if not cast.scale.two_level:
        return cast.scale(amax, cast.format), None
    global_scale = two_level_global(amax, cast.format) if amax.numel() else amax.new_ones(())
    return cast.scale(amax / global_scale, cast.format), global_scale


def _divide(x: Tensor, divisor: Tensor, tile: tuple[int, int]) -> Tensor:
    """x / divisor, tile by tile, float32. Division, not a multiplication by a reciprocal that was itself rounded."""
    x = x.to(torch.float32)
    if divisor.numel() == 1 or tile in ((1, WHOLE), (WHOLE, 1)):
        return x / divisor
    tiled = _as_tiles(x, tile) / divisor[:, None, :, None]
    outer, a, inner, b = tiled.shape
    return tiled.reshape(outer * a, inner * b)[: x.shape[0], : x.shape[1]]


def _as_tiles(x: Tensor, tile: tuple[int, int]) -> Tensor:
    """[outer, inner] -> [outer tiles, a, inner tiles, b], filled up with zeros where the last tile is short."""
    a, b = tile_sizes(tuple(x.shape), tile)
    outer, inner = scale_shape(tuple(x.shape), tile)
    fill = (0, inner * b - x.shape[1], 0, outer * a - x.shape[0])
    if any(fill):
        x = torch.nn.functional.pad(x, fill)
    return x.reshape(outer, a, inner, b)
