"""Turns examples into rows, padded to a few widths or packed, and measures the padding.

Padded rows of a batch are as wide as its longest example, rounded up to the next of a few widths.
That limits the number of shapes to compile, to select kernels for and to allocate. 8-bit matmuls
need rows x width to be a multiple of 16, because it is the contracted axis of `grad_weight`.

Packing uses best fit decreasing: the longest example first, each into the fullest row that still
holds it. That needs at most 11/9 of the fewest possible rows, plus one (Johnson 1974). A row of two
documents (3 and 2 tokens) and 3 positions of padding:

    input_ids       a0 a1 a2 b0 b1 p p p
    position_ids     0  1  2  0  1 0 1 2     restart in each document and in the padding
    document_ids     0  0  0  1  1 2 2 2     padding counts as a document, so that no row of the
                                             attention mask is empty
    labels           - a1 a2  - b1 - - -     (unshifted) a document's first token is no target

Tokens attend to each other only if their document ids are equal. A model that ignores these arrays,
or whose convolution or recurrence crosses documents, raises no error: the loss only gets slightly
worse. `collate.check_packing` detects that before training.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from narrowgauge.errors import DataError

if TYPE_CHECKING:
    from narrowgauge.data.batches import Indices

GRID = 512  # candidate widths at most; more are thinned evenly by rank


def round_up(number: int, multiple: int) -> int:
    """Smallest multiple of `multiple` that is >= `number`."""
    return -(-number // multiple) * multiple


def width_of(longest: int, rows: int, widths: Sequence[int], tokens_multiple: int) -> int:
    """Smallest of the ascending `widths` that holds `longest`, rounded up.

    The rounding makes rows x width a multiple of `tokens_multiple`.
    """
    place = bisect_left(widths, longest)
    if place == len(widths):
        raise DataError(
            f"an example has {longest} tokens, but the widths end at {widths[-1] if widths else 0}. "
            "Give the collator the widths of the sampler that draws from the same lengths.",
            code="collator.widths",
        )
    return round_up(widths[place], tokens_multiple // math.gcd(rows, tokens_multiple))


def choose_widths(lengths: Indices, *, count: int, multiple: int) -> tuple[int, ...]:
    """At most `count` ascending multiples of `multiple` that hold all lengths with least padding.

    Dynamic programming over the distinct rounded lengths, or over GRID lengths taken evenly by
    rank: O(count GRID^2).
    """
    rounded = np.maximum(-(-lengths // multiple) * multiple, multiple)
    values, counts = np.unique(rounded, return_counts=True)
    if len(values) > max(count, GRID):
        ranks = np.searchsorted(np.cumsum(counts), np.linspace(0, counts.sum(), GRID + 1)[1:])
        chosen_ranks = np.unique([*np.minimum(ranks, len(values) - 1), len(values) - 1])
        groups = np.searchsorted(chosen_ranks, np.arange(len(values)))
        values, counts = values[chosen_ranks], np.bincount(groups, weights=counts).astype(np.int64)
    size = len(values)
    if size <= count:
        return tuple(values.tolist())
    below = np.concatenate([[0], np.cumsum(counts)])  # below[i]: examples narrower than values[i]
    # best[i]: positions of all examples up to values[i]. One width at first, one more in each pass.
    best = below[1:] * values
    chosen = []
    for _ in range(1, count):
        # cost[i, j]: values[j+1..i] are rounded up to values[i]; best[j] covers the rest.
        cost = best[None, :] + (below[1:, None] - below[None, 1:]) * values[:, None]
        cost[np.triu_indices(size)] = np.iinfo(np.int64).max
        previous = np.argmin(cost, axis=1)
        least = cost[np.arange(size), previous]
        chosen.append(np.where(least < best, previous, -1))
        best = np.minimum(least, best)
    places = [size - 1]
    for step in reversed(chosen):
        if step[places[-1]] >= 0:
            places.append(int(step[places[-1]]))
    return tuple(values[places[::-1]].tolist())


def pack(lengths: Sequence[int] | Indices, row_length: int) -> list[list[int]]:
    """Rows of at most `row_length` tokens, as lists of example indices; best fit decreasing.

    Ties keep the given order. Every index is in exactly one row. O(N log N), about 1 us per
    example. Raises DataError if an example is longer than a row.
    """
    sizes = np.asarray(lengths, dtype=np.int64)
    if len(sizes) and int(sizes.max()) > row_length:
        raise DataError(
            f"pack: {int((sizes > row_length).sum())} of {len(sizes)} examples are longer than row_length {row_length}; the "
            f"longest has {int(sizes.max())} tokens. Pass a longer row, or truncate or skip them first.",
            code="packing.too-long",
        )
    rows: list[list[int]] = []
    # Bisection in a sorted list of free sizes; a two-level bit set was slower (1.4 against 1.2 us).
    by_room: dict[int, list[int]] = {}  # free tokens -> rows with that many
    rooms: list[int] = []  # the keys of by_room, ascending
    for index in np.argsort(-sizes, kind="stable").tolist():
        size = int(sizes[index])
        place = bisect_left(rooms, size)
        if place == len(rooms):
            rows.append([])
            room, row = row_length, len(rows) - 1
        else:
            room = rooms[place]
            row = by_room[room].pop()
            if not by_room[room]:
                del by_room[room], rooms[place]
        rows[row].append(index)
        if room - size not in by_room:
            insort(rooms, room - size)
            by_room[room - size] = []
        by_room[room - size].append(row)
    return rows


def positions(document_lengths: Sequence[int], row_length: int) -> tuple[Tensor, Tensor]:
    """(position_ids, document_ids) of one row, int64 [row_length]; padding is one more document."""
    sizes = [*document_lengths, row_length - sum(document_lengths)]
    position = torch.cat([torch.arange(size) for size in sizes])
    document = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return position, document


def block_mask(document_ids: Tensor, *, causal: bool = True) -> Tensor:
    """Block-diagonal attention mask from document ids [rows, row_length].

    ->  [rows, 1, queries, keys] bool, True if a query attends to a key; row_length^2 bytes per
        row

    This is the four-dimensional `attention_mask` of transformers with sdpa attention.
    """
    mask = document_ids[:, None, :, None] == document_ids[:, None, None, :]
    return mask.tril() if causal else mask


def cumulative_lengths(document_ids: Tensor) -> tuple[Tensor, int]:
    """(cu_seqlens int32 [documents + 1], longest document) of all rows concatenated.

    For variable-length attention kernels.
    """
    flat = document_ids.flatten()
    starts = torch.ones_like(flat, dtype=torch.bool)
    starts[1:] = flat[1:] != flat[:-1]
    # Document ids restart in each row: equal neighbours across a row's border are two documents.
    starts[:: document_ids.shape[1]] = True
    bounds = torch.cat([starts.nonzero().flatten(), torch.tensor([len(flat)], device=flat.device)])
    return bounds.int(), int(bounds.diff().max()) if len(flat) else 0


@dataclass(frozen=True, slots=True)
class Waste:
    """Padding of a set of batches.

    tokens     tokens of the examples
    positions  rows x width of their batches, padding included
    """

    tokens: int
    positions: int

    @property
    def padding(self) -> int:
        """Positions without a token."""
        return self.positions - self.tokens

    @property
    def percent(self) -> float:
        """Padding as a percentage of all positions; 0 if there are none."""
        return 100 * self.padding / self.positions if self.positions else 0.0

    def __str__(self) -> str:
        return f"{self.padding:,} of {self.positions:,} positions ({self.percent:.1f} %)"


@dataclass(frozen=True, slots=True)
class PaddingReport:
    """Padding of the same examples batched in three ways.

    fixed     every row as wide as the longest example
    shuffled  random batches, each as wide as its longest example (dynamic padding)
    planned   this plan
    """

    fixed: Waste
    shuffled: Waste
    planned: Waste

    def __str__(self) -> str:
        return (
            f"padding: {self.planned}; random batches, each as wide as its longest, would have {self.shuffled}, "
            f"one fixed width {self.fixed}"
        )

    def as_dict(self) -> dict[str, Any]:
        """JSON values: tokens, positions and percent of each way."""
        return {
            name: {**waste, "percent": getattr(self, name).percent}
            for name, waste in asdict(self).items()
        }


def dynamic_waste(lengths: Indices, rows: int, multiple: int) -> Waste:
    """Padding of batches of `rows` examples in the given order, each as wide as its longest."""
    starts = np.arange(0, len(lengths), rows)
    if not len(starts):
        return Waste(0, 0)
    widths = -(-np.maximum.reduceat(lengths, starts) // multiple) * multiple
    return Waste(int(lengths.sum()), int((widths * np.diff([*starts, len(lengths)])).sum()))
