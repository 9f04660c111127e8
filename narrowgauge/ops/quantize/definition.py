"""Definition of quantize and dequantize in plain torch, which CPUs and compilers also run.

A ragged tensor is first padded with zeros, which change no amax, and cut at the end; `scaling`
describes the layout.
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
    SMALLEST_NORMAL,
    WHOLE,
    as_tiles,
    from_tiles,
    halved_sum,
    least_error_clip,
    padded_to_tiles,
    per_tile,
    relative_scales,
    scale_shape,
    tile_sizes,
    times_scale,
    two_level_scales,
)  # fmt: skip

if TYPE_CHECKING:
    from narrowgauge.ops.random import Key

# Factor for numbers whose squares overflow: no number that counts beside them underflows.
_SHRINK = 2.0**-100


def tile_amax(x: Tensor, tile: tuple[int, int]) -> Tensor:
    """Largest magnitude in each tile.

    x     [outer, inner], any float dtype. NaN and infinity propagate, so a poisoned tile is visible
          in its scale.
    tile  elements per tile along (outer, inner); -1 takes the whole axis. The last tile may be
          short.
    ->    [ceil(outer / tile[0]), ceil(inner / tile[1])] float32; zero for an empty tensor.

    One pass over x, no copy when the tile divides the shape. Raises ShapeError if x is not
    two-dimensional.
    """
    if x.ndim != 2:
        raise ShapeError(
            f"tile_amax: x is {list(x.shape)}; it must be two-dimensional. Flatten the leading axes.",
            code="quantize.amax-axes",
        )
    if x.numel() == 0:
        return x.new_zeros(scale_shape(tuple(x.shape), tile), dtype=torch.float32)
    if x.stride(0) < x.stride(1) and not torch.compiler.is_compiling():
        # Along the strided axis torch takes 8 ms for 786,432 elements, along the contiguous one 0.2
        # ms (torch 2.13).
        return tile_amax(x.T, (tile[1], tile[0])).T
    if tile == (WHOLE, WHOLE) and torch.compiler.is_compiling():
        # Inductor fuses this into the loop that computes x. For aminmax it makes two reductions and
        # a float32 copy of x (torch 2.11, 2.13).
        return x.abs().amax().to(torch.float32).reshape(1, 1)
    if tile == (WHOLE, WHOLE):
        low, high = torch.aminmax(x)  # one pass, without a copy |x|
        return torch.maximum(-low, high).to(torch.float32).reshape(1, 1)
    tiles = as_tiles(padded_to_tiles(x, tile), tile)
    amax = tiles.abs().amax(dim=(1, 3) if tiles.ndim == 4 else -1, keepdim=tiles.ndim == 2)
    return amax.to(torch.float32)


def whole_amax(x: Tensor) -> Tensor:
    """`tile_amax` of one tile, the whole tensor: [1, 1]."""
    return tile_amax(x, (WHOLE, WHOLE))


def tile_rms(x: Tensor, tile: tuple[int, int]) -> Tensor:
    """sqrt(mean x**2) of each tile, in the shape of the scales.

    A ragged tile averages over its own elements.

    The squares are summed in float32: magnitudes below 1e-19 count as zero. If the sum overflows
    (magnitudes of 1e19 or more), it is recomputed from x times 2**-100, so finite numbers have a
    finite RMS. Infinity and NaN remain. Only a GPU in eager mode leaves such a tile infinite: a
    look at the sum would be a synchronization, or one more read of x in every call.
    """
    sizes = _tile_sizes(x, tile)

    def rms(x: Tensor) -> Tensor:
        return _tile_norm(x, tile, 2.0).square().div(sizes).sqrt()

    found = rms(x)
    # A compiler fuses both branches into one loop. A tensor without data has no sum to look at.
    looks = not torch.compiler.is_compiling() and holds_numbers(x)
    if looks and (x.device.type != "cpu" or not math.isinf(float(found.sum()))):
        return found
    return torch.where(found.isinf(), rms(x.to(torch.float32) * _SHRINK) / _SHRINK, found)


def row_squares(x: Tensor) -> Tensor:
    """Sum of x**2 of each row, [outer] float64."""
    return torch.linalg.vector_norm(x, 2.0, dim=1, dtype=torch.float64).square()


def spread(squares: Tensor, columns: int) -> Tensor:
    """RMS of a whole tensor, sqrt(mean x**2), 0-d float32, from its `row_squares`.

    It is bit-identical for any distribution of the rows over ranks.
    """
    return (squares.sum() / max(squares.numel() * columns, 1)).sqrt().to(torch.float32)


def _tile_norm(x: Tensor, tile: tuple[int, int], order: float) -> Tensor:
    if x.numel() == 0:
        return x.new_zeros(scale_shape(tuple(x.shape), tile), dtype=torch.float32)
    if tile == (WHOLE, WHOLE):
        return torch.linalg.vector_norm(x, order, dtype=torch.float32).reshape(1, 1)
    tiles = as_tiles(padded_to_tiles(x, tile), tile)
    axes = (1, 3) if tiles.ndim == 4 else -1
    return torch.linalg.vector_norm(
        tiles, order, dim=axes, keepdim=tiles.ndim == 2, dtype=torch.float32
    )


def _tile_sizes(x: Tensor, tile: tuple[int, int]) -> Tensor:
    """Number of elements of x in each tile, float32, in the shape of the scales."""
    shape = (x.shape[0], x.shape[1])
    if tile == (WHOLE, WHOLE) and x.numel() and not torch.compiler.is_compiling():
        return torch.full((1, 1), x.numel(), dtype=torch.float32, device=x.device)
    rows, columns = (
        (length - torch.arange(number, device=x.device) * size).clamp(1, size).to(torch.float32)
        for length, size, number in zip(
            shape, tile_sizes(shape, tile), scale_shape(shape, tile), strict=True
        )
    )
    return rows[:, None] * columns[None, :]


def calibrated_amax(x: Tensor, cast: Cast, shape: tuple[int, ...] | None = None) -> Tensor:
    """Magnitude that each tile's scale shall represent, by `cast.calibrate`.

    ->     [A, B], the shape of the scales
    shape  shape of x before zero padding, if it was padded. LearnedStep returns its initial value.
    """
    x = x if shape is None else x[: shape[0], : shape[1]]
    if isinstance(cast.calibrate, ClippedRms):
        return tile_rms(x, cast.tile) * cast.calibrate.clip
    if isinstance(cast.calibrate, LearnedStep):
        return tile_rms(x, cast.tile) * least_error_clip(cast.format.max)
    return tile_amax(x, cast.tile)


def quantize(
    x: Tensor,
    cast: Cast,
    amax: Tensor | None,
    noise: Tensor | Key | None,
    expand: torch.dtype | None,
) -> QTensor:
    """See `ops.quantize`, which checks the arguments.

    On a GPU, process chunks of rows; results are bit-identical.
    """
    shape = (x.shape[0], x.shape[1])
    given = None if amax is None else amax.to(torch.float32).expand(scale_shape(shape, cast.tile))
    if x.numel() > PIECE:
        from narrowgauge.ops.quantize.chunked import chunks_of, quantize_chunked

        if len(slices := chunks_of(x, cast)) > 1:
            return quantize_chunked(
                (calibrated_amax, filled, _amax, scales, tiles_cast),
                slices,
                x,
                cast,
                given,
                noise,
                expand,
            )
    full = filled(x, cast.tile)
    given = _amax(full, shape, cast) if given is None else given
    scale, global_scale = scales(given, cast)
    data, scale = tiles_cast(full, shape, given, scale, global_scale, cast, noise, expand)
    return QTensor(
        data=data, scale=scale, cast=cast, inner=shape[1], global_scale=global_scale, checked=True
    )


def tiles_cast(
    full: Tensor, shape: tuple[int, ...], amax: Tensor, scale: Tensor, global_scale: Tensor | None, cast: Cast,
    noise: Tensor | Key | None, expand: torch.dtype | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return the data of a QTensor and the scales of its tiles; arguments as of `least_error`."""
    scale = least_error(full, amax, scale, global_scale, cast)
    if cast.rounding != "eden":
        return encoded(full, shape, scale, global_scale, cast, noise, expand), scale
    from narrowgauge.ops.quantize import eden  # only for casts that correct their scales

    # Numbers are drawn for the scales, and elements go to nearest.
    data = encoded(full, shape, scale, global_scale, cast, None, expand)
    return data, eden.corrected_scales(
        full, values_of(full, scale, global_scale, cast), scale, cast, noise
    )


def values_of(full: Tensor, scale: Tensor, global_scale: Tensor | None, cast: Cast) -> Tensor:
    """Return the result of `filled` rounded to nearest and decoded, in the shape of `as_tiles`."""
    tiles = as_tiles(full, cast.tile)
    codes = cast.format.round(_times_reciprocal(tiles, scale, global_scale, cast), None)
    whole = scale if global_scale is None else scale * global_scale
    return codes * per_tile(whole, cast.tile)


def _is_tiled(tile: tuple[int, int]) -> bool:
    return tile[1] != WHOLE or tile[0] not in (1, WHOLE)


def filled(x: Tensor, tile: tuple[int, int]) -> Tensor:
    """Return x in float32, padded with zeros to whole tiles."""
    # Padded first, and kept in the view of tiles until after rounding: Inductor (2.13) splits a
    # loop that divides its index by the tile's size, and then drops a vector tail or fails an
    # assertion (try_loop_split in codegen/cpp.py).
    return (padded_to_tiles(x, tile) if _is_tiled(tile) else x).to(torch.float32)


def _amax(full: Tensor, shape: tuple[int, ...], cast: Cast) -> Tensor:
    """`calibrated_amax` of the result of `filled`, for a tensor of that shape."""
    return calibrated_amax(full, cast, shape if _is_tiled(cast.tile) else None)


def encoded(
    full: Tensor, shape: tuple[int, ...], scale: Tensor, global_scale: Tensor | None, cast: Cast,
    noise: Tensor | Key | None, expand: torch.dtype | None,
) -> Tensor:  # fmt: skip
    """Return the data of a QTensor, from the result of `filled` for a tensor of that shape."""
    tile, format, tiled = cast.tile, cast.format, _is_tiled(cast.tile)
    if noise is not None and not isinstance(noise, Tensor):
        noise = noise.uniform(shape)
    y = _times_reciprocal(as_tiles(full, tile) if tiled else full, scale, global_scale, cast)
    if tiled and noise is not None:
        noise = padded_to_tiles(noise, tile).reshape(y.shape)
    data = format.encode(y, noise) if expand is None else format.round(y, noise).to(expand)
    if tiled:
        data = from_tiles(data, full, *shape)
    return format.pack(data) if expand is None and format.codes_per_byte > 1 else data


def dequantize(q: QTensor) -> Tensor:
    """Return decode(data) times the scale of its tile, float32."""
    return times_scale(q.values().to(torch.float32), q.full_scale(), q.cast.tile)


def scales(amax: Tensor, cast: Cast) -> tuple[Tensor, Tensor | None]:
    """Return the scales of the tiles, and the factor that all tiles share, or None.

    A rule that reads elements gets its first candidates, and `scales_of` chooses. The factor is the
    second level of a two-level rule, or headroom, or both.
    """
    if not cast.scale.two_level:
        shared = amax.new_full((), cast.headroom) if cast.headroom != 1 else None
        return cast.scale(amax, cast.format), shared
    scale, whole = two_level_scales(amax, cast.format, cast.scale)
    return scale, whole * cast.headroom


def scales_of(full: Tensor, amax: Tensor, cast: Cast) -> tuple[Tensor, Tensor | None]:
    """Return the same for the result of `filled`, whose elements a rule may compare."""
    scale, shared = scales(amax, cast)
    return least_error(full, amax, scale, shared, cast), shared


def least_error(
    full: Tensor, amax: Tensor, scale: Tensor, global_scale: Tensor | None, cast: Cast
) -> Tensor:
    """Return the scales of the tiles after all of the rule's candidates were tried, [A, B].

    full          the result of `filled`
    amax          of each tile
    scale         the rule's first candidates, which `scales` has computed with global_scale
    ->            `scale` itself for a rule that reads no elements. Of equal errors the first wins;
                  tiles that are not finite keep their NaN
    """
    rule, format = cast.scale, cast.format
    if not rule.reads_elements:
        return scale
    assert global_scale is not None and cast.headroom == 1  # see Cast
    tiles = as_tiles(full, cast.tile)

    def squared_error(scale: Tensor) -> Tensor:
        off = tiles - values_of(full, scale, global_scale, cast)
        # Subnormal differences count as zero, whether or not the subtraction flushes them.
        off = torch.where(off.abs() < SMALLEST_NORMAL, 0.0, off)
        return halved_sum(off.to(torch.float64).square())

    least = squared_error(scale)
    for factor in rule.tries[1:]:
        other = relative_scales(amax, global_scale, format, rule, factor)
        error = squared_error(other)
        scale, least = torch.where(error < least, other, scale), torch.minimum(error, least)
    return scale


def _times_reciprocal(
    tiles: Tensor, scale: Tensor, global_scale: Tensor | None, cast: Cast
) -> Tensor:
    """Return x times the reciprocal of its scale, in the shape of `as_tiles`."""
    if cast.scale.two_level:
        assert global_scale is not None
        reciprocal = (1 / global_scale) / scale  # in this order, as NVFP4 hardware, see scaling
        # A tile whose e4m3 scale underflows to zero becomes zeros.
        return tiles * per_tile(torch.where(scale == 0, 0.0, reciprocal), cast.tile)
    return tiles * per_tile(
        1 / (scale if global_scale is None else scale * global_scale), cast.tile
    )
