"""Counts what padding costs: data tokens against computed positions."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from narrowgauge.data.order import Indices, permutation
from narrowgauge.data.widths import round_up


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
