"""How a matrix is cut into tiles: shapes, and that every element meets the scale of its own tile (exact)."""

from __future__ import annotations

import pytest
import torch

from narrowgauge.scaling import (
    WHOLE,
    as_tiles,
    padded_to_tiles,
    per_tile,
    scale_shape,
    tile_sizes,
    times_scale,
)
from tests.compare import assert_same

SHAPES = ((5, 9), (1, 9), (6, 8), (5, 1), (1, 1), (0, 3), (3, 0), (0, 0))
TILES = (
    (2, 4),
    (1, 3),
    (WHOLE, 2),
    (1, WHOLE),
    (WHOLE, 1),
    (2, WHOLE),
    (WHOLE, WHOLE),
    (128, 128),
    (1, 1),
)

every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)
every_tile = pytest.mark.parametrize("tile", TILES, ids=str)


@pytest.mark.parametrize(
    ("shape", "tile", "sizes", "scales"),
    [
        ((5, 9), (WHOLE, WHOLE), (5, 9), (1, 1)),
        ((5, 9), (1, WHOLE), (1, 9), (5, 1)),
        ((5, 9), (2, 4), (2, 4), (3, 3)),
        ((4, 8), (2, 4), (2, 4), (2, 2)),
        ((5, 9), (128, 128), (128, 128), (1, 1)),
        ((0, 9), (WHOLE, WHOLE), (1, 9), (0, 1)),
        ((5, 0), (1, WHOLE), (1, 1), (5, 0)),
        ((0, 0), (2, 2), (2, 2), (0, 0)),
    ],
)
def test_sizes_and_scales_of_tiles(shape, tile, sizes, scales):
    assert tile_sizes(shape, tile) == sizes and scale_shape(shape, tile) == scales


@every_shape
@every_tile
def test_each_element_meets_the_scale_of_its_tile(shape, tile):
    """Against a loop over elements; the scale is taken in the dtype of the values."""
    rows, columns = scale_shape(shape, tile)
    scale = torch.arange(1.0, rows * columns + 1).reshape(rows, columns)
    a, b = tile_sizes(shape, tile)
    expected = torch.tensor(
        [[scale[i // a, j // b] for j in range(shape[1])] for i in range(shape[0])]
    ).reshape(shape)
    for dtype in (torch.float32, torch.bfloat16):
        ones = torch.ones(shape, dtype=dtype)
        for values in (ones, torch.ones(shape[::-1], dtype=dtype).T):
            found = times_scale(values, scale, tile)
            assert_same(found.contiguous(), expected.to(dtype))
            fits = padded_to_tiles(values, tile) is values
            # Columns lie together only where those of the values do, and the tiles divide them.
            if min(shape) > 1:
                assert found.stride(0) > found.stride(1) or (fits and values is not ones)


@every_shape
@every_tile
def test_tiles_cover_a_filled_up_matrix(shape, tile):
    """Zeros at the ends only, and none where tiles fit; the views hold every element once, in order."""
    x = torch.arange(1.0, shape[0] * shape[1] + 1).reshape(shape)
    full, (a, b) = padded_to_tiles(x, tile), tile_sizes(shape, tile)
    assert full.shape[0] % a == 0 and full.shape[1] % b == 0
    assert full.shape[0] - shape[0] < a and full.shape[1] - shape[1] < b
    assert_same(full[: shape[0], : shape[1]].contiguous(), x)
    assert full.sum() == x.sum() and (full is x) == (full.shape == x.shape)
    tiles = as_tiles(full, tile)
    assert_same(tiles.reshape(full.shape), full)
    scale = torch.ones(scale_shape(shape, tile))
    assert (tiles * per_tile(scale, tile)).numel() == full.numel()
    assert tiles.data_ptr() == full.data_ptr(), "no copy"
