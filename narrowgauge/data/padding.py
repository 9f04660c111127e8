"""Chooses a few batch widths for all lengths, with the least padding, and counts what padding costs.

A batch is as wide as its longest example, rounded up to one of the widths. Few widths mean few shapes to compile, to select kernels for
and to allocate. 8-bit products need rows x width to be a multiple of 16: it is the contracted axis of `grad_weight`.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from narrowgauge.data.order import Indices, permutation
from narrowgauge.errors import DataError

GRID = 512  # largest number of candidate widths; more are thinned evenly by rank


def round_up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def width_of(longest: int, rows: int, widths: Sequence[int], tokens_multiple: int) -> int:
    """The smallest of the ascending `widths` that holds `longest`, rounded up so that rows x width is a tokens_multiple.

    Raises DataError for an example that is longer than every width.
    """
    place = bisect_left(widths, longest)
    if place == len(widths):
        raise DataError(
            f"an example has {longest} tokens, but the widths end at {widths[-1] if widths else 0}. "
            "Give the collator the widths of the sampler that draws from the same lengths."
        )
    return round_up(widths[place], tokens_multiple // math.gcd(rows, tokens_multiple))


def choose_widths(lengths: Indices, *, count: int, multiple: int) -> tuple[int, ...]:
    """At most `count` ascending multiples of `multiple` that hold all `lengths` with the least total padding.

    Dynamic programming over the distinct rounded lengths, or over GRID of them taken evenly by rank: O(count GRID^2).
    """
    if not len(lengths):
        return ()
    rounded = np.maximum(-(-lengths // multiple) * multiple, multiple)
    values, counts = np.unique(rounded, return_counts=True)
    if len(values) <= count:
        return tuple(int(value) for value in values)
    if len(values) > GRID:
        ranks = np.searchsorted(np.cumsum(counts), np.linspace(0, counts.sum(), GRID + 1)[1:])
        kept = np.unique([*np.minimum(ranks, len(values) - 1), len(values) - 1])
        groups = np.searchsorted(kept, np.arange(len(values)))
        values, counts = values[kept], np.bincount(groups, weights=counts).astype(np.int64)
    return tuple(int(values[place]) for place in _cuts(values, counts, count))


def _cuts(values: np.ndarray[Any, Any], counts: np.ndarray[Any, Any], count: int) -> list[int]:
    """Indices of the `count` values to round up to, with the least sum(counts x rounded value)."""
    size = len(values)
    below = np.concatenate([[0], np.cumsum(counts)])  # below[i]: examples narrower than values[i]
    best = below[1:] * values  # one width for values[0..i]
    chosen = []
    for _ in range(1, count):
        # cost[i, j]: values[j+1..i] are rounded up to values[i], the rest is best[j]
        cost = best[None, :] + (below[1:, None] - below[None, 1:]) * values[:, None]
        cost[np.triu_indices(size)] = np.iinfo(np.int64).max
        previous = np.argmin(cost, axis=1)
        better = cost[np.arange(size), previous] < best
        chosen.append(np.where(better, previous, -1))
        best = np.where(better, cost[np.arange(size), previous], best)
    places, place = [size - 1], size - 1
    for step in reversed(chosen):
        if step[place] < 0:
            continue
        place = int(step[place])
        places.append(place)
    return places[::-1]


@dataclass(frozen=True, slots=True)
class Waste:
    """tokens: of the examples. positions: rows x width of their batches, padding included."""

    tokens: int
    positions: int

    @property
    def padding(self) -> int:
        return self.positions - self.tokens

    @property
    def percent(self) -> float:
        """Padding as a share of all positions; 0 if there are none."""
        return 100 * self.padding / self.positions if self.positions else 0.0

    def __str__(self) -> str:
        return f"{self.padding:,} of {self.positions:,} positions ({self.percent:.1f} %)"


@dataclass(frozen=True, slots=True)
class PaddingReport:
    """The same examples batched in three ways.

    fixed     every row as wide as the longest example
    shuffled  random batches, each as wide as its longest example (dynamic padding)
    planned   this plan
    """

    fixed: Waste
    shuffled: Waste
    planned: Waste

    def __str__(self) -> str:
        return f"padding: {self.planned}; shuffled batches would have {self.shuffled}, one fixed width {self.fixed}"

    def as_dict(self) -> dict[str, Any]:
        """JSON values: tokens, positions and percent of each way."""
        return {name: {**waste, "percent": getattr(self, name).percent} for name, waste in asdict(self).items()}


def fixed_waste(lengths: Indices, multiple: int) -> Waste:
    """Every row as wide as the longest, rounded up to the multiple."""
    width = round_up(int(lengths.max()), multiple) if len(lengths) else 0
    return Waste(int(lengths.sum()), width * len(lengths))


def shuffled_waste(lengths: Indices, rows: int, multiple: int, key: bytes = b"padding") -> Waste:
    """Batches of `rows` in one random order, each as wide as its longest, rounded up to the multiple."""
    shuffled = lengths[permutation(len(lengths), key)]
    starts = np.arange(0, len(shuffled), rows)
    if not len(starts):
        return Waste(0, 0)
    widths = -(-np.maximum.reduceat(shuffled, starts) // multiple) * multiple
    return Waste(int(lengths.sum()), int((widths * np.diff([*starts, len(shuffled)])).sum()))
