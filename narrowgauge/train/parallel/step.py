"""Exchanges between ranks in an optimizer step: targets, losses, norm, non-finite values.

targets of the step = sum over ranks            int64 on the host, before the first forward pass
loss = l_0 + l_1 + ...  float32                 in the order of all micro-batches, as in one process
norm                                            of the summed gradient: one number on all ranks
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import nn

from narrowgauge.data import valid_targets
from narrowgauge.diagnose.nonfinite import NOTHING, first_nonfinite, first_seen, nonfinite_parameter
from narrowgauge.errors import DataError, DriftError
from narrowgauge.train.loss import targets_of_step
from narrowgauge.train.signals import AgreedStop, StopRequest

if TYPE_CHECKING:
    from narrowgauge.train.parallel.ranks import Ranks
    from narrowgauge.train.tasks.task import StepBatch


def targets_of_ranks(
    batch: StepBatch, number: int, stop: StopRequest | AgreedStop, ranks: Ranks
) -> tuple[int, dict[str, Any]]:
    """Returns (targets of the step on all ranks, facts of its event).

    Requests to stop travel in the same message.
    """
    facts = dict(batch.facts)
    if ranks.world == 1:
        return targets_of_step(batch.batches, number), facts
    assert isinstance(stop, AgreedStop)
    # One all-gather for all three numbers, before any rank starts the forward pass.
    own = [sum(map(valid_targets, batch.batches)), facts.get("positions", 0), stop.own]
    told = ranks.numbers(own)
    stop.agree([asked for *_, asked in told])
    for rank, (*counts, _) in enumerate(told):
        first = ranks.layout.readers(rank)[0]
        if counts != told[first][:2]:
            raise DataError(
                f"step {number}: ranks {first} and {rank} share matrix products or stages, and must read the same data, but have "
                f"{told[first][0]} and {counts[0]} targets. Give all machines the same data.",
                code="ranks.other-data",
            )
    targets, positions, _ = zip(*_once(told, ranks), strict=True)
    if "positions" in facts:
        facts["positions"] = sum(positions)
    # Called with no batches, `targets_of_step` raises its error for a step without targets.
    return sum(targets) or targets_of_step([], number), facts


def agreed(losses: list[float], norm: float, ranks: Ranks) -> tuple[float, float]:
    """Returns (loss of the step, gradient norm).

    losses  this rank's micro-batches; ranks of other stages have the same

    Raises DriftError on all ranks if norms differ, or losses of the same data.
    """
    of_ranks = ranks.reals([*losses, norm])
    for rank, (*own, other) in enumerate(of_ranks):
        first = ranks.layout.readers(rank)[0]
        for what, here, there, place in (
            ("the norm of the summed gradient", of_ranks[0][-1], other, 0),
            ("the losses of the same micro-batches", of_ranks[first][:-1], own, first),
        ):
            # repr: NaN != NaN, but two ranks with NaN agree.
            if repr(here) != repr(there):
                raise DriftError(
                    f"{ranks.place}: {what} is {here!r} on rank {place} and {there!r} on rank {rank}, and must be one "
                    "number. Nothing was saved since the last checkpoint. Take equal machines and threads on all ranks, and resume.",
                    code="ranks.drift",
                )
    # float32 additions in the order of global micro-batches: one process adds its losses so.
    total = np.float32(0)
    with np.errstate(all="ignore"):
        for turn in zip(*(each[:-1] for each in _once(of_ranks, ranks)), strict=True):
            for loss in turn:
                total += np.float32(loss)
    return float(total), norm


def _once(of_ranks: list[list[Any]], ranks: Ranks) -> list[list[Any]]:
    """Keeps one rank's entry for each group of ranks that read the same data."""
    return [each for rank, each in enumerate(of_ranks) if rank == ranks.layout.readers(rank)[0]]


def where_nonfinite(
    model: nn.Module,
    repeat: Callable[[], None],
    loss: float,
    ranks: Ranks,
    forward: Callable[[], None] | None = None,
    order: Mapping[str, int] | None = None,
) -> str:
    """As `first_nonfinite`, with the rank that found the value.

    repeat   recomputes the step, forward and backward
    forward  recomputes the forward pass alone; pipeline stages only
    order    {module name: position in the model}; pipeline stages only

    Parameters are checked first, on all ranks together: a rank that returned early would leave the
    others in a forward pass that gathers parameters. Then the rank that had checked the fewest
    tensors wins. Within a tp group, that rank has the value in its own features, before a sum
    spreads it. Under pp, a value in the forward pass is reported at its first module, a value in a
    gradient at its last.
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
    # Backward runs from the last module to the first.
    return ranks.first_of(own, NOTHING, -place(own))
