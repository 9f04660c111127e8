"""The scales of sharded weights: what a rank has to know of the other ranks' rows before it can cast its own, exchanged once per step.

    w [N, K] lies by rows on S ranks: P = ceil(N / S) each, the last ones fewer or none; K is whole

A tile of (r, c) rows and columns of w has one largest magnitude. Where r divides P, each tile lies on one rank, and the grids are
gathered; else a tile may straddle ranks, or be the whole axis, and the grid is their MAX. Whichever it is, every rank then knows every
scale of every layer, so codes travel alone. One all-gather and at most two all-reduces for all layers of a group.

Bytes: rules whose scales are powers of two send exponents, one byte; the others amaxes, float32. NaN never travels, a MAX of it is lost
on some backends: what is not finite is sent as infinity, which gives the same scale, NaN.

A scale by the spread of a tensor sends the sum of squares of each row, float64, added in the order of rows: it does not depend on how
many ranks there are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from narrowgauge.ops.quantize import row_squares, spread, tile_amax
from narrowgauge.recipe import Cast
from narrowgauge.scaling import SMALLEST_NORMAL, WHOLE, scale_shape

_NOT_FINITE = 255  # the exponent of NaN; 0 says that a tile has no numbers but zeros
_MANTISSA = 23


@dataclass(frozen=True)
class Rows:
    """Which rows of a weight this rank has. See the module."""

    whole: int
    world: int
    rank: int

    @property
    def padded(self) -> int:
        return -(-self.whole // self.world)

    @property
    def first(self) -> int:
        return min(self.rank * self.padded, self.whole)

    @property
    def count(self) -> int:
        return min(self.padded, self.whole - self.first)


class Statistic(Protocol):
    """What one exchange says of one weight. gathers: whether the ranks' parts lie one after the other; else their MAX is taken."""

    gathers: bool

    def part(self, shard: Tensor) -> Tensor:
        """Of this rank, the same shape on all ranks."""

    def take(self, found: Tensor) -> None:
        """found: the parts of all ranks [S, ...], or their MAX."""


class TileAmaxes:
    """The largest magnitudes of the tiles of w, turned if it is cast turned. tile: (rows, columns) of w.

    amax  [ceil(N / r), ceil(K / c)] float32; of a power-of-two rule numbers that give the same scales
    """

    amax: Tensor | None = None

    def __init__(self, rows: Rows, cast: Cast, tile: tuple[int, int], turn: Callable[[Tensor], Tensor]) -> None:
        self.rows, self.cast, self.tile, self.turn = rows, cast, tile, turn
        self.gathers = tile[0] != WHOLE and rows.padded % tile[0] == 0

    def part(self, shard: Tensor) -> Tensor:
        shape = scale_shape((self.rows.padded if self.gathers else self.rows.whole, shard.shape[1]), self.tile)
        found = torch.zeros(shape, dtype=torch.float32, device=shard.device)
        if self.rows.count:
            own = tile_amax(self.aligned(shard), self.tile)
            first = 0 if self.gathers else self.first_tile
            found[first : first + len(own)] = torch.where(own.isfinite(), own, float("inf"))
        return self._exponents(found) if self.cast.scale.power_of_two else found

    def take(self, found: Tensor) -> None:
        grid = found.flatten(0, 1) if self.gathers else found
        grid = grid[: -(-self.rows.whole // self.tile[0])] if self.tile[0] != WHOLE else grid
        self.amax = self._amaxes(grid) if grid.dtype == torch.uint8 else grid

    # --- tiles and the rows of this rank

    @property
    def first_tile(self) -> int:
        return 0 if self.tile[0] == WHOLE else self.rows.first // self.tile[0]

    @property
    def rows_before(self) -> int:
        """Rows of other ranks in the tile of this rank's first row."""
        return 0 if self.tile[0] == WHOLE else self.rows.first % self.tile[0]

    def aligned(self, shard: Tensor) -> Tensor:
        """The shard, turned, with rows of zeros before it so that it begins where a tile does."""
        turned = self.turn(shard)
        return torch.nn.functional.pad(turned, (0, 0, self.rows_before, 0)) if self.rows_before else turned

    def own(self) -> Tensor:
        """The tiles that `aligned` has."""
        assert self.amax is not None
        if self.tile[0] == WHOLE:
            return self.amax
        return self.amax[self.first_tile : -(-(self.rows.first + self.rows.count) // self.tile[0])]

    # --- powers of two

    def _exponents(self, amax: Tensor) -> Tensor:
        scale = self.cast.scale(amax, self.cast.format)
        found = torch.where(amax < SMALLEST_NORMAL, 0, scale.view(torch.int32) >> _MANTISSA)
        return torch.where(amax.isfinite(), found, _NOT_FINITE).to(torch.uint8)

    def _amaxes(self, exponents: Tensor) -> Tensor:
        """Numbers of which the rule makes these scales."""
        scale = (exponents.to(torch.int32) << _MANTISSA).view(torch.float32)
        amax = (scale.to(torch.float64) * self.cast.format.max).clamp(max=torch.finfo(torch.float32).max)
        return torch.where(exponents == _NOT_FINITE, float("inf"), amax.to(torch.float32))


class Spread:
    """The root mean square of w: `rms`, 0-d float32."""

    gathers = True
    rms: Tensor | None = None

    def __init__(self, rows: Rows) -> None:
        self.rows, self._columns = rows, 0

    def part(self, shard: Tensor) -> Tensor:
        found = torch.zeros(self.rows.padded, dtype=torch.float64, device=shard.device)
        if self.rows.count:
            found[: self.rows.count] = row_squares(shard)
        self._columns = shard.shape[1]
        return found

    def take(self, found: Tensor) -> None:
        self.rms = spread(found.flatten()[: self.rows.whole], self._columns)


@torch.no_grad()
def exchange(
    found: Iterable[tuple[Statistic, Tensor]], group: dist.ProcessGroup, count: Callable[[str, Tensor], None]
) -> None:
    """Of all weights that are sharded in this group: (statistic, this rank's rows)."""
    parts = [(statistic, statistic.part(shard)) for statistic, shard in found]
    gathered = [(statistic, part) for statistic, part in parts if statistic.gathers]
    gathered.sort(key=lambda each: -each[1].element_size())  # so that views of bytes are aligned
    if gathered:
        bytes_of = [part.contiguous().view(-1).view(torch.uint8) for _, part in gathered]
        whole = gather(torch.cat(bytes_of), group)
        count("weight scales", whole)
        for (statistic, part), own in zip(gathered, whole.split([len(each) for each in bytes_of], dim=1), strict=True):
            statistic.take(own.contiguous().view(part.dtype).view(len(whole), *part.shape))
    for dtype in (torch.float32, torch.uint8):
        largest = [(statistic, part) for statistic, part in parts if not statistic.gathers and part.dtype == dtype]
        if largest:
            together = torch.cat([part.flatten() for _, part in largest])
            dist.all_reduce(together, dist.ReduceOp.MAX, group=group)
            count("weight scales", together)
            for (statistic, part), own in zip(
                largest, together.split([part.numel() for _, part in largest]), strict=True
            ):
                statistic.take(own.view(part.shape))


def gather(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Bytes [...] of each rank -> [S, ...]."""
    world = dist.get_world_size(group)
    found = own.new_empty((world * own.numel(),))
    # torch 2.13 has a new name for it, and warns of the old one
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    all_gather(found, own.contiguous().view(-1), group=group)
    return found.view(world, *own.shape)
