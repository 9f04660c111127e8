"""Evaluation on several ranks: rank i mod W computes batch i, and every rank receives all results.

loss = (l_0 + l_1 + ...) / targets      float64, summed in batch order: bit-identical to one process
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from narrowgauge.train.loss import Batch
    from narrowgauge.train.parallel.ranks import Ranks
    from narrowgauge.train.tasks.task import Compute, Read, Score


def readings(
    batches: Iterator[Batch],
    read: Read,
    compute: Compute | None = None,
    *,
    score: Score,
    share: tuple[int, int],
    ranks: Ranks,
    knows: bool = True,
) -> list[tuple[float, Any]]:
    """Returns (loss, result of `read`) for every batch, in order, on every rank.

    batches  evaluation batches
    read     extracts the values that a metric needs from a batch and its logits
    compute  replaces the forward pass and loss
    score    computes loss and logits of a batch
    share    (index, count) of this rank's group among the groups that read different data
    ranks    the ranks of the run
    knows    True if `score` returns the loss on this rank; under pp, only on the last stage

    Waits for a GPU once, unless `read` does.
    """
    number, count = share
    losses, own = list[Tensor](), dict[int, Any]()
    for first, some in _turns(batches, count):
        # Shards are gathered by all ranks together, so all must run equally many forward passes. A
        # rank without a batch repeats another rank's and discards the result.
        batch = some[number % len(some)]
        loss, logits = score(batch) if compute is None else score(batch, compute)
        if number < len(some) and knows:
            losses.append(loss)
            own[first + number] = read(batch, logits)
    # One copy to the host for all losses; .item() for each batch would wait for the GPU each time.
    values = torch.stack(losses).tolist() if losses else []
    return ranks.joined(
        {place: (loss, own[place]) for place, loss in zip(own, values, strict=True)}
    )


def _turns(batches: Iterator[Batch], count: int) -> Iterator[tuple[int, list[Batch]]]:
    """Yields (index of the first batch, `count` batches); the last group may be shorter."""
    first = 0
    while some := list(islice(batches, count)):
        yield first, some
        first += len(some)
