"""Scales that are corrected after rounding to nearest: EDEN, for operands under a random rotation.

    x    [outer, inner], a rotated operand:  x = t diag(s) H, H in blocks of `cast.block`, s random
    q    x rounded to nearest by the scales of its tiles, and decoded
    S    sum x^2 / sum x q of each block of a row
    ->   scales of the tiles times S; E4M3 scales are then rounded stochastically

S makes the inner product of a block with itself exact: <S q, x> = <x, x>. A rotation with random
signs makes x nearly normal and symmetric. Then the error of S q has no other direction, on average
over the signs: E[S q] = x up to terms that fall with the block. Sources: EDEN (arXiv 2108.08842);
for NVFP4 "MS-EDEN" of Quartet II (arXiv 2601.22813).

Elements are rounded to nearest. Random numbers are drawn for the scale of a tile, not for each
element. So for normal numbers in tiles of 16 the squared error is 0.0098 of their square. With
stochastic rounding it is 0.0189, or 0.0222 with scales rounded up.

    block 128    where nine elements in ten are zero, the squared bias is 1 % of the error of one draw
    block 16     a third of it there, and a tenth with columns of log-normal size
    two rounds   no bias in either (`Hadamard(rounds=2)`): one round leaves a block that few elements
                 fill with numbers of few magnitudes, and the second makes these nearly normal

`python -m benchmarks.closed frontier casts` measures them. INT4 with one float32 scale for each block needs no
random number beside the signs, since a float32 takes S as it is.

Scales are corrected where sum x q > 0. A block of zeros has none, and a poisoned one keeps its NaN.
Sums are float64, in the order of `halved_sum`: bit-identical on every device. Costs three passes
over x more than a cast to nearest in torch, and none in C++ (eden_cpp.py). Left out: scales that
are powers of two, which S would leave, and tiles of several rows.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from narrowgauge.formats import E4M3
from narrowgauge.scaling import LARGEST_SCALE, as_tiles, halved_sum, smallest_scale

if TYPE_CHECKING:
    from narrowgauge.ops.random import Key
    from narrowgauge.recipe import Cast


def corrections(full: Tensor, values: Tensor, cast: Cast) -> Tensor:
    """Return S of the block of each tile, [outer, B] float32 for B tiles in a row.

    full    [outer, inner in whole tiles] float32
    values  `full` rounded and decoded, [outer, B, tile], as `scaling.as_tiles`
    """
    tiles, per_block = as_tiles(full, cast.tile).to(torch.float64), cast.block // cast.tile[1]
    products = tiles * values

    def of_blocks(elements: Tensor) -> Tensor:
        sums = halved_sum(elements)
        sums = pad(sums, (0, -sums.shape[1] % per_block))
        blocks = sums.reshape(len(sums), sums.shape[1] // per_block, per_block)
        return halved_sum(blocks)

    squares, along = of_blocks(tiles.square()), of_blocks(products)
    # One where nothing is along x: zeros, and blocks whose scales underflowed.
    correction = torch.where(along > 0, squares / along, 1.0).to(torch.float32)
    return correction.repeat_interleave(per_block, dim=1)[:, : tiles.shape[1]]


def corrected_scales(
    full: Tensor, values: Tensor, scale: Tensor, cast: Cast, noise: Tensor | Key | None
) -> Tensor:
    """Return the scales times the correction of their block, [outer, B] float32.

    full, values  see `corrections`
    noise         [outer, B] in [0, 1), or its Key, for E4M3 scales; None for float32 scales
    """
    wanted = scale * corrections(full, values, cast)
    if not cast.scale.two_level:
        return wanted.clamp(smallest_scale(cast.format), LARGEST_SCALE)
    assert noise is not None  # `quantize` requires it
    drawn = noise if isinstance(noise, Tensor) else noise.uniform(tuple(scale.shape))
    return E4M3.round(wanted, drawn)
