"""What the ranks of a run tell each other in an optimizer step: before it their targets, after it their losses and norm, and who failed.

targets of the step = sum over ranks            before the first forward pass, whole numbers on the host
loss = l_0 + l_1 + ...  float32                 in the order of the global micro-batches, as one process adds them
norm                                            of the summed gradient, so one number on all ranks
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from torch import nn

from narrowgauge.data import valid_targets
from narrowgauge.diagnose.nonfinite import NOTHING, first_nonfinite, first_seen, nonfinite_parameter
from narrowgauge.errors import DataError, DriftError
from narrowgauge.train.loss import targets_of_step
from narrowgauge.train.parallel.ranks import Ranks
from narrowgauge.train.signals import AgreedStop, StopRequest
from narrowgauge.train.tasks.task import StepBatch


def targets_of_ranks(
    batch: StepBatch, number: int, stop: StopRequest | AgreedStop, ranks: Ranks
) -> tuple[int, dict[str, Any]]:
    """The targets of a step, and what its event says of its batch. What each rank was asked for travels with them."""
    facts = dict(batch.facts)
    if ranks.world == 1:
        return targets_of_step(batch.batches, number), facts
    assert isinstance(stop, AgreedStop)
    own = [sum(map(valid_targets, batch.batches)), facts.get("positions", 0), stop.own]
    told = ranks.numbers(own)
    stop.agree([asked for *_, asked in told])
    for rank, (*counts, _) in enumerate(told):
        first = ranks.layout.readers(rank)[0]
        if counts != told[first][:2]:
            raise DataError(
                f"step {number}: ranks {first} and {rank} share matrix products or stages, and must read the same data, but have "
                f"{told[first][0]} and {counts[0]} targets. Give all machines the same data."
            )
    targets, positions, _ = zip(*_once(told, ranks), strict=True)
    if "positions" in facts:
        facts["positions"] = sum(positions)
    return sum(targets) or targets_of_step([], number), facts


def agreed(losses: list[float], norm: float, ranks: Ranks) -> tuple[float, float]:
    """-> the loss of the step, and the norm. DriftError, on all ranks, if they have different norms, or for the same data different losses.

    losses: of a rank's micro-batches, which are those of other stages too
    """
    of_ranks = ranks.reals([*losses, norm])
    for rank, (*own, other) in enumerate(of_ranks):
        first = ranks.layout.readers(rank)[0]
        for what, here, there, place in (
            ("the norm of the summed gradient", of_ranks[0][-1], other, 0),
            ("the losses of the same micro-batches", of_ranks[first][:-1], own, first),
        ):
            if repr(here) != repr(there):  # NaN is NaN
                raise DriftError(
                    f"{ranks.place}: {what} is {here!r} on rank {place} and {there!r} on rank {rank}, and must be one "
                    "number. Nothing was saved since the last checkpoint. Take equal machines and threads on all ranks, and resume."
                )
    total = np.float32(0)
    with np.errstate(all="ignore"):
        for turn in zip(*(each[:-1] for each in _once(of_ranks, ranks)), strict=True):
            for loss in turn:
                total += np.float32(loss)
    return float(total), norm


def _once(of_ranks: list[list[Any]], ranks: Ranks) -> list[list[Any]]:
    """What ranks have of their data, once for each part of it."""
    return [each for rank, each in enumerate(of_ranks) if rank == ranks.layout.readers(rank)[0]]


def where_nonfinite(
    model: nn.Module,
    repeat: Callable[[], None],
    loss: float,
    ranks: Ranks,
    forward: Callable[[], None] | None = None,
    order: Mapping[str, int] | None = None,
) -> str:
    """`first_nonfinite`, with the rank that saw it.

    Parameters first, together: a rank that knows already must not leave the others in a forward pass that gathers them. Then the rank that
    saw it after the fewest tensors: of those that share products one has it in its own features before a sum hands it to the others.
    forward, order: of a model in stages, that of the step alone, and the places of modules. What appears there is named where it comes
    first; else, in a gradient, where it comes last.
    """
    if ranks.world == 1:
        return first_nonfinite(model, repeat, loss)
    if words := ranks.first_of(nonfinite_parameter(model), ""):
        return words
    if forward is None or order is None:
        words, looks = first_seen(model, repeat, math.nan)
        return ranks.first_of(words, NOTHING, looks)

    def place(words: str) -> int:
        named = re.search(r"'([^']+)'", words)
        return order[named[1]] if named else 0

    own = first_nonfinite(model, forward, math.nan)
    words = ranks.first_of(own, NOTHING, place(own))
    if words != NOTHING:
        return words
    own = first_nonfinite(model, repeat, math.nan)
    return ranks.first_of(own, NOTHING, -place(own))
