"""Evaluation batches sorted by length, and the way back to the order of the data."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np

from narrowgauge.data.batches import Indices
from narrowgauge.data.plan import Batching
from narrowgauge.data.rows import round_up
from narrowgauge.errors import DataError


def sorted_batches(
    lengths: Sequence[int] | Indices,
    *,
    batch_size: int | None = None,
    token_budget: int | None = None,
    multiple: int = 8,
) -> list[list[int]]:
    """Evaluation batches sorted by length, the longest first; `restore_order` restores the order.

    This "uniform dynamic padding" has the least padding possible for the batch sizes. Do not train
    on it: the order is the same in every epoch. An example above the budget is a batch by itself.
    """
    Batching(batch_size=batch_size, token_budget=token_budget, multiple=multiple)  # validates
    sizes = np.asarray(lengths, dtype=np.int64)
    # stable: equal lengths keep the order of the data, the same on every machine.
    queue, batches = np.argsort(-sizes, kind="stable"), []
    while len(queue):
        width = round_up(max(1, int(sizes[queue[0]])), multiple)
        rows = batch_size or max(1, (token_budget or 0) // width)
        batches.append(queue[:rows].tolist())
        queue = queue[rows:]
    return batches


def restore_order(batches: Sequence[Sequence[int]], results: Sequence[Sequence[Any]]) -> list[Any]:
    """Puts the results of batches into the order of the data.

    Raises DataError if the number of results differs from the number of examples.
    """
    if [len(batch) for batch in batches] != [len(result) for result in results]:
        given, needed = (sum(map(len, each)) for each in (results, batches))
        raise DataError(
            f"restore_order: {given} results for {needed} examples. Pass one result per example.",
            code="restore-order.count",
        )
    by_index = dict(zip(chain.from_iterable(batches), chain.from_iterable(results), strict=True))
    return [by_index[index] for index in range(len(by_index))]
