"""The definition of quantize and dequantize in plain torch; also the CPU's and the compiler's path.

A ragged tensor is first filled up with zeros, which change no amax, and cut again at the end; see `scaling` for the layout.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowgauge.addresses import PIECE, holds_numbers
from narrowgauge.errors import ShapeError
from narrowgauge.qtensor import QTensor
from narrowgauge.recipe import Cast, ClippedRms, LearnedStep
from narrowgauge.scaling import (
    WHOLE,
    as_tiles,
    filled_up,
    of_tiles,
    per_tile,
    scale_shape,
    tile_sizes,
    times_scale,
    two_level_scales,
)  # fmt: skip

if TYPE_CHECKING:
    from narrowgauge.ops.random import Key

_SHRINK = 2.0**-100  # of numbers whose squares overflow: nothing that counts beside them vanishes


def tile_amax(x: Tensor, tile: tuple[int, int]) -> Tensor:
    """Largest magnitude in each tile.

    x     [outer, inner], any float dtype. NaN and infinity propagate, so a poisoned tile is visible in its scale.
    tile  elements per tile along (outer, inner); -1 takes the whole axis. The last tile may be short.
    ->    [ceil(outer / tile[0]), ceil(inner / tile[1])] float32; zero for an empty tensor.

    One pass over x, no copy when the tile divides the shape. Raises ShapeError if x is not two-dimensional.
    """
    if x.ndim != 2:
        raise ShapeError(f"tile_amax: x is {list(x.shape)}; it must be two-dimensional. Flatten the leading axes.")
    if x.numel() == 0:
        return x.new_zeros(scale_shape(tuple(x.shape), tile), dtype=torch.float32)
    if x.stride(0) < x.stride(1) and not torch.compiler.is_compiling():
        # Along the axis that lies scattered in memory torch takes 8 ms for 786,432 elements, and 0.2 ms the other way (torch 2.13).
        return tile_amax(x.T, (tile[1], tile[0])).T
    if tile == (WHOLE, WHOLE) and torch.compiler.is_compiling():
        # In the loop that computes x; of aminmax Inductor makes two reductions and a float32 copy of x (torch 2.11, 2.13).
        return x.abs().amax().to(torch.float32).reshape(1, 1)
    if tile == (WHOLE, WHOLE):
        low, high = torch.aminmax(x)  # no |x| in memory
        return torch.maximum(-low, high).to(torch.float32).reshape(1, 1)
    tiles = as_tiles(filled_up(x, tile), tile)
    amax = tiles.abs().amax(dim=(1, 3) if tiles.ndim == 4 else -1, keepdim=tiles.ndim == 2)
    return amax.to(torch.float32)


def tile_rms(x: Tensor, tile: tuple[int, int]) -> Tensor:
    """sqrt(mean x**2) of each tile, in the shape of the scales; a tile cut short by the edge counts what it has.

    The squares are summed in float32: magnitudes below 1e-19 count as zero. Where the sum overflows, from magnitudes of 1e19 on, it is
    taken anew of x made smaller, so that finite numbers have a finite spread; infinity and NaN stay what they are. Only a GPU in
    eager mode leaves such a tile infinite: to look for it would be a synchronisation or one more read of x in every call.
    """
    sizes = _tile_sizes(x, tile)

    def rms(x: Tensor) -> Tensor:
        return _tile_norm(x, tile, 2.0).square().div(sizes).sqrt()

    found = rms(x)
    # A compiler has both in one loop; of a tensor without numbers there is no sum to look at.
    looks = not torch.compiler.is_compiling() and holds_numbers(x)
    if looks and (x.device.type != "cpu" or not math.isinf(float(found.sum()))):
        return found
    return torch.where(found.isinf(), rms(x.to(torch.float32) * _SHRINK) / _SHRINK, found)


def row_squares(x: Tensor) -> Tensor:
    """sum x**2 of each row, [outer] float64."""
    return torch.linalg.vector_norm(x, 2.0, dim=1, dtype=torch.float64).square()


def spread(squares: Tensor, columns: int) -> Tensor:
    """sqrt(mean x**2) of a whole tensor, 0-d float32, from its `row_squares`: the same bits whichever ranks had the rows."""
    return (squares.sum() / max(squares.numel() * columns, 1)).sqrt().to(torch.float32)


def _tile_norm(x: Tensor, tile: tuple[int, int], order: float) -> Tensor:
    shape = scale_shape(tuple(x.shape), tile)
    if x.numel() == 0:
        return x.new_zeros(shape, dtype=torch.float32)
    if tile == (WHOLE, WHOLE):
        return torch.linalg.vector_norm(x, order, dtype=torch.float32).reshape(1, 1)
    tiles = as_tiles(filled_up(x, tile), tile)
    axes = (1, 3) if tiles.ndim == 4 else -1
    return torch.linalg.vector_norm(tiles, order, dim=axes, keepdim=tiles.ndim == 2, dtype=torch.float32)


def _tile_sizes(x: Tensor, tile: tuple[int, int]) -> Tensor:
    """Elements of x in each tile, float32, in the shape of the scales."""
    shape = (x.shape[0], x.shape[1])
    rows, columns = (
        (length - torch.arange(number, device=x.device) * size).clamp(1, size).to(torch.float32)
        for length, size, number in zip(shape, tile_sizes(shape, tile), scale_shape(shape, tile), strict=True)
    )
    return rows[:, None] * columns[None, :]


def calibrated_amax(x: Tensor, cast: Cast, shape: tuple[int, ...] | None = None) -> Tensor:
    """The largest magnitude that each tile's scale shall reach, by `cast.calibrate`, in the shape of the scales.

    shape  of x before it was filled up with zeros, if it was. A LearnedStep gives the value with which it begins.
    """
    x = x if shape is None else x[: shape[0], : shape[1]]
    if isinstance(cast.calibrate, ClippedRms):
        return tile_rms(x, cast.tile) * cast.calibrate.clip
    if isinstance(cast.calibrate, LearnedStep):
        mean = _tile_norm(x, cast.tile, 1.0) / _tile_sizes(x, cast.tile)
        return mean * (2 * math.sqrt(cast.format.max))
    return tile_amax(x, cast.tile)


def quantize(
    x: Tensor, cast: Cast, amax: Tensor | None, noise: Tensor | Key | None, expand: torch.dtype | None
) -> QTensor:
    """See `ops.quantize`; arguments are checked there. On a GPU piece by piece, with the same bits."""
    shape = (x.shape[0], x.shape[1])
    given = None if amax is None else amax.to(torch.float32).expand(scale_shape(shape, cast.tile))
    if x.numel() > PIECE:
        from narrowgauge.ops.quantize.in_pieces import slices_of, work

        if len(slices := slices_of(x, cast)) > 1:
            return work((calibrated_amax, filled, _amax, scales, encoded), slices, x, cast, given, noise, expand)
    full = filled(x, cast.tile)
    scale, global_scale = scales(_amax(full, shape, cast) if given is None else given, cast)
    data = encoded(full, shape, scale, global_scale, cast, noise, expand)
    return QTensor(data=data, scale=scale, cast=cast, inner=shape[1], global_scale=global_scale, checked=True)


def _is_tiled(tile: tuple[int, int]) -> bool:
    return tile[1] != WHOLE or tile[0] not in (1, WHOLE)


def filled(x: Tensor, tile: tuple[int, int]) -> Tensor:
    """In float32, in whole tiles.

    Filled up before, and looked at as tiles until after rounding: Inductor (2.13) splits a loop that divides its index by
    the tile's size, and then drops a vector tail or fails an assertion (try_loop_split in codegen/cpp.py).
    """
    return (filled_up(x, tile) if _is_tiled(tile) else x).to(torch.float32)


def _amax(full: Tensor, shape: tuple[int, ...], cast: Cast) -> Tensor:
    """Of what `filled` made of a tensor of that shape."""
    return calibrated_amax(full, cast, shape if _is_tiled(cast.tile) else None)


def encoded(
    full: Tensor, shape: tuple[int, ...], scale: Tensor, global_scale: Tensor | None, cast: Cast,
    noise: Tensor | Key | None, expand: torch.dtype | None,
) -> Tensor:  # fmt: skip
    """The data of a QTensor, of what `filled` made of a tensor of that shape."""
    tile, format, tiled = cast.tile, cast.format, _is_tiled(cast.tile)
    if noise is not None and not isinstance(noise, Tensor):
        noise = noise.uniform(shape)
    y = _times_reciprocal(as_tiles(full, tile) if tiled else full, scale, global_scale, cast)
    if tiled and noise is not None:
        noise = filled_up(noise, tile).reshape(y.shape)
    data = format.encode(y, noise) if expand is None else format.round(y, noise).to(expand)
    if tiled:
        data = of_tiles(data, full, *shape)
    return format.pack(data) if expand is None and format.codes_per_byte > 1 else data


def dequantize(q: QTensor) -> Tensor:
    """decode(data) times the scale of its tile, float32."""
    return times_scale(q.values().to(torch.float32), q.full_scale(), q.cast.tile)


def scales(amax: Tensor, cast: Cast) -> tuple[Tensor, Tensor | None]:
    """The scales of the tiles, and the factor that all of them share: of a two-level rule, of headroom, or of both."""
    if not cast.scale.two_level:
        shared = amax.new_full((), cast.headroom) if cast.headroom != 1 else None
        return cast.scale(amax, cast.format), shared
    scale, whole = two_level_scales(amax, cast.format, cast.scale)
    return scale, whole * cast.headroom


def _times_reciprocal(tiles: Tensor, scale: Tensor, global_scale: Tensor | None, cast: Cast) -> Tensor:
    """x times the reciprocal of its scale, in the shape of `as_tiles`."""
    if cast.scale.two_level:
        assert global_scale is not None
        reciprocal = (1 / global_scale) / scale  # in this order: see scaling
        # A tile too small for its e4m3 scale becomes zeros.
        return tiles * per_tile(torch.where(scale == 0, 0.0, reciprocal), cast.tile)
    return tiles * per_tile(1 / (scale if global_scale is None else scale * global_scale), cast.tile)
