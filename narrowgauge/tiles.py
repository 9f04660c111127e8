"""Tiles: how a matrix is cut into the pieces that share a scale.

A tile (a, b) on [outer, inner] takes a rows and b columns; -1 is a whole axis. With A = ceil(outer / a), B = ceil(inner / b):

    scale      [A, B]
    as_tiles   [A, a, B, b]; [outer, B, b] when a is 1; [outer, inner] when one scale serves everything or each row
    per_tile   the scale as [A, 1, B, 1], [outer, B, 1] or [A, B], so that it broadcasts against as_tiles

The three views exist for speed and for Inductor (2.13): its CPU loop splitting drops a vector tail, or fails an assertion,
where an index is divided by the size of a tile (try_loop_split in codegen/cpp.py). Views of tiles have no such division.
"""

from __future__ import annotations

import torch
from torch import Tensor

WHOLE = -1  # in a tile: the whole axis


def tile_sizes(shape: tuple[int, ...], tile: tuple[int, int]) -> tuple[int, int]:
    """The tile with -1 replaced by the length of its axis (at least 1)."""
    outer, inner = (max(length, 1) if size == WHOLE else size for size, length in zip(tile, shape, strict=True))
    return outer, inner


def scale_shape(shape: tuple[int, ...], tile: tuple[int, int]) -> tuple[int, int]:
    """Scales per axis: ceil(length / tile)."""
    outer, inner = tile_sizes(shape, tile)
    return -(-shape[0] // outer), -(-shape[1] // inner)


def filled_up(x: Tensor, tile: tuple[int, int]) -> Tensor:
    """x [outer, inner] with zeros added at the ends, so that whole tiles cover it; x itself if they do."""
    a, b = tile_sizes(tuple(x.shape), tile)
    fill = (0, -x.shape[1] % b, 0, -x.shape[0] % a)
    return torch.nn.functional.pad(x, fill) if any(fill) else x


def as_tiles(x: Tensor, tile: tuple[int, int]) -> Tensor:
    """A filled-up x as tiles, see the module. No copy if x is contiguous."""
    if tile[1] == WHOLE and tile[0] in (1, WHOLE):
        return x
    a, b = tile_sizes(tuple(x.shape), tile)
    if a == 1:
        return x.reshape(x.shape[0], x.shape[1] // b, b)
    return x.reshape(x.shape[0] // a, a, x.shape[1] // b, b)


def per_tile(scale: Tensor, tile: tuple[int, int]) -> Tensor:
    """scale [A, B], so shaped that it broadcasts against `as_tiles` of the same tile."""
    if tile[1] == WHOLE and tile[0] in (1, WHOLE):
        return scale
    return scale[:, :, None] if tile[0] == 1 else scale[:, None, :, None]


def times_scale(values: Tensor, scale: Tensor, tile: tuple[int, int]) -> Tensor:
    """values [outer, inner] times their tile's scale, in the dtype of values."""
    full = filled_up(values, tile)
    scaled = as_tiles(full, tile) * per_tile(scale, tile).to(values.dtype)
    return scaled.reshape(full.shape)[: values.shape[0], : values.shape[1]]
