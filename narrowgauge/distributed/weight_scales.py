"""Scales of sharded weights: exchange tile amaxes once per step, so that each rank can quantize.

    w [N, K] is sharded by rows over S ranks, P = ceil(N / S) each, the last ones fewer or none

Consider tiles of (r, c) rows and columns of w. If r divides P, each tile lies on one rank, and the
amax grids are gathered. Otherwise a tile may span ranks (or be the whole axis), and the grid is
their MAX. Either way every rank knows every scale of every layer, and later messages need codes
alone. Cost: one all-gather and at most two all-reduces for all layers of a group.

Scale rules with powers of two send exponents, one byte per tile; the others send float32 amaxes.
Non-finite amaxes are sent as infinity, which gives the same NaN scale: some backends lose NaN in a
MAX.

A scale based on the standard deviation of a tensor sends the float64 sum of squares of each row,
added in row order. The result does not depend on the number of ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from narrowgauge.ops.quantize import row_squares, spread, tile_amax
from narrowgauge.scaling import SMALLEST_NORMAL, WHOLE, scale_shape

if TYPE_CHECKING:
    from narrowgauge.recipe import Cast

# Exponent byte that means NaN; 0 means that all elements of the tile are zero.
_NOT_FINITE = 255
_MANTISSA = 23


@dataclass(frozen=True)
class LocalRows:
    """The rows of a weight on this rank.

    total         N, rows of the full weight
    world         S, number of ranks
    rank          of this process
    padded        P, rows per rank with padding
    first, count  this rank's first row and number of rows
    """

    total: int
    world: int
    rank: int

    @property
    def padded(self) -> int:
        return -(-self.total // self.world)

    @property
    def first(self) -> int:
        return min(self.rank * self.padded, self.total)

    @property
    def count(self) -> int:
        return min(self.padded, self.total - self.first)


class Statistic(Protocol):
    """A statistic of one weight, computed from all ranks' rows.

    gathers  True: concatenate the ranks' parts; False: take their MAX
    """

    gathers: bool

    def part(self, shard: Tensor) -> Tensor:
        """Return this rank's part, of the same shape on all ranks."""

    def take(self, found: Tensor) -> None:
        """Set the statistic from the gathered parts [S, ...], or from their MAX."""


class TileAmaxes:
    """Amax of each tile of w.

    rows    this rank's rows
    cast    of the weight
    tile    (r, c) rows and columns of w
    rotate  rotates a tensor as the cast does
    amax    [ceil(N / r), ceil(K / c)] float32, set by `take`; for power-of-two rules, values that
            give the same scales
    """

    amax: Tensor | None = None

    def __init__(
        self, rows: LocalRows, cast: Cast, tile: tuple[int, int], rotate: Callable[[Tensor], Tensor]
    ) -> None:
        self.rows, self.cast, self.tile, self.rotate = rows, cast, tile, rotate
        self.gathers = tile[0] != WHOLE and rows.padded % tile[0] == 0

    def part(self, shard: Tensor) -> Tensor:
        shape = scale_shape(
            (self.rows.padded if self.gathers else self.rows.total, shard.shape[1]), self.tile
        )
        found = torch.zeros(shape, dtype=torch.float32, device=shard.device)
        if self.rows.count:
            own = tile_amax(self.padded_to_tiles(shard), self.tile)
            first = 0 if self.gathers else self.first_tile
            # Infinity survives a MAX on every backend, NaN does not.
            found[first : first + len(own)] = torch.where(own.isfinite(), own, float("inf"))
        return self._exponents(found) if self.cast.scale.power_of_two else found

    def take(self, found: Tensor) -> None:
        grid = found.flatten(0, 1) if self.gathers else found
        grid = grid[: -(-self.rows.total // self.tile[0])] if self.tile[0] != WHOLE else grid
        self.amax = self._amaxes(grid) if grid.dtype == torch.uint8 else grid

    # --- tiles and the rows of this rank

    @property
    def first_tile(self) -> int:
        return 0 if self.tile[0] == WHOLE else self.rows.first // self.tile[0]

    @property
    def rows_before(self) -> int:
        """Number of rows of other ranks in the tile of this rank's first row."""
        return 0 if self.tile[0] == WHOLE else self.rows.first % self.tile[0]

    def padded_to_tiles(self, shard: Tensor) -> Tensor:
        """Return the rotated shard, padded with zero rows on top so that it starts at a tile boundary."""
        rotated = self.rotate(shard)
        return (
            torch.nn.functional.pad(rotated, (0, 0, self.rows_before, 0))
            if self.rows_before
            else rotated
        )

    def local_amaxes(self) -> Tensor:
        """Return the amaxes of the tiles that `padded_to_tiles` covers."""
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
        """Return amaxes for which the scale rule gives 2 ** (exponent - 127)."""
        scale = (exponents.to(torch.int32) << _MANTISSA).view(torch.float32)
        # float64: the product may exceed the largest float32 before it is clamped.
        amax = (scale.to(torch.float64) * self.cast.format.max).clamp(
            max=torch.finfo(torch.float32).max
        )
        return torch.where(exponents == _NOT_FINITE, float("inf"), amax.to(torch.float32))


class RootMeanSquare:
    """Root mean square of w: `rms`, 0-d float32, set by `take`."""

    gathers = True
    rms: Tensor | None = None

    def __init__(self, rows: LocalRows) -> None:
        self.rows, self._columns = rows, 0

    def part(self, shard: Tensor) -> Tensor:
        # float64 sums of squares per row: adding rows in order is then independent of the sharding.
        found = torch.zeros(self.rows.padded, dtype=torch.float64, device=shard.device)
        if self.rows.count:
            found[: self.rows.count] = row_squares(shard)
        self._columns = shard.shape[1]
        return found

    def take(self, found: Tensor) -> None:
        self.rms = spread(found.flatten()[: self.rows.total], self._columns)


@torch.no_grad()
def exchange(
    found: Iterable[tuple[Statistic, Tensor]],
    group: dist.ProcessGroup,
    count: Callable[[str, Tensor], None],
) -> None:
    """Compute the statistics of all weights sharded over one group.

    found  (statistic, this rank's rows) of each weight
    group  the ranks that share the weights
    count  count(kind, tensor), called for each message
    """
    parts = [(statistic, statistic.part(shard)) for statistic, shard in found]
    gathered = [(statistic, part) for statistic, part in parts if statistic.gathers]
    # Larger dtypes first, so that views of the byte buffer are aligned.
    gathered.sort(key=lambda each: -each[1].element_size())
    if gathered:
        bytes_of = [part.contiguous().view(-1).view(torch.uint8) for _, part in gathered]
        whole = gather(torch.cat(bytes_of), group)
        count("weight scales", whole)
        for (statistic, part), own in zip(
            gathered, whole.split([len(each) for each in bytes_of], dim=1), strict=True
        ):
            statistic.take(own.contiguous().view(part.dtype).view(len(whole), *part.shape))
    for dtype in (torch.float32, torch.uint8):
        largest = [
            (statistic, part)
            for statistic, part in parts
            if not statistic.gathers and part.dtype == dtype
        ]
        if largest:
            message = torch.cat([part.flatten() for _, part in largest])
            dist.all_reduce(message, dist.ReduceOp.MAX, group=group)
            count("weight scales", message)
            for (statistic, part), own in zip(
                largest, message.split([part.numel() for _, part in largest]), strict=True
            ):
                statistic.take(own.view(part.shape))


def gather(own: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Gather the bytes [...] of each rank into [S, ...]."""
    world = dist.get_world_size(group)
    found = own.new_empty((world * own.numel(),))
    # torch 2.13 renamed all_gather_into_tensor and warns about the old name.
    all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    all_gather(found, own.contiguous().view(-1), group=group)
    return found.view(world, *own.shape)
