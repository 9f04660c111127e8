"""Validation data shared among the ranks: batch i is computed by rank i modulo their count, and every rank learns of all.

loss = (l_0 + l_1 + ...) / targets      float64, in the order of batches whoever computed them: one process's figure, to the bit
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

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
    """The loss of every batch, and what `read` says of it and its logits; all of them, in order, on every rank.

    compute  in the place of the loss and the logits
    share  (number of this rank, count) among those that read other data
    knows  whether `score` gives this rank the loss: of a model in stages the last one alone has it

    All compute equally often, since shards of a model are gathered by all together: one for whom no batch is left repeats another's,
    and forgets it. Waits for a GPU once, unless `read` does.
    """
    number, count = share
    losses, own = list[Tensor](), dict[int, Any]()
    for first, some in _turns(batches, count):
        batch = some[number % len(some)]
        loss, logits = score(batch) if compute is None else score(batch, compute)
        if number < len(some) and knows:
            losses.append(loss)
            own[first + number] = read(batch, logits)
    values = torch.stack(losses).tolist() if losses else []
    return ranks.joined({place: (loss, own[place]) for place, loss in zip(own, values, strict=True)})


def _turns(batches: Iterator[Batch], count: int) -> Iterator[tuple[int, list[Batch]]]:
    """So many batches at a time, and the number of the first; the last ones may be fewer."""
    first = 0
    while some := list(islice(batches, count)):
        yield first, some
        first += len(some)
