"""Duration of collectives between ranks: an alpha-beta model.

    seconds = a log2(N) + B (N - 1) / N / b        a collective of B bytes among N ranks

a and b are constants of a node (8 ranks) or of the network between nodes: for an H100 with NVLink,
and for 400 Gbit/s per GPU between nodes [assumed, not measured]. The overlap with computation is
unknown in advance. A step takes at least the larger of the two times, and at most their sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

RANKS_PER_NODE = 8


@dataclass(frozen=True)
class Connection:
    """A connection.

    start  seconds per doubling of the ranks
    rate   bytes/s of a rank
    """

    start: float
    rate: float


NODE, NETWORK = Connection(5e-6, 450e9), Connection(15e-6, 50e9)


def link(ranks: int) -> Connection:
    return NODE if ranks <= RANKS_PER_NODE else NETWORK


def collective(nbytes: float, ranks: int) -> float:
    """Return the seconds to all-gather, or to reduce-scatter, this many bytes in total."""
    if ranks < 2:
        return 0.0
    way = link(ranks)
    return way.start * math.log2(ranks) + nbytes * (ranks - 1) / ranks / way.rate


def of_step(
    weights: float,
    messages: int,
    *,
    copies: int,
    shards: int,
    micro_batches: int = 1,
    gathered: float = 1.0,
    reduced: float = 1.0,
) -> float:
    """Return the seconds of all collectives of one step.

    weights        bytes of all weights; their gradients have the same size
    messages       number of collectives into which they are split: blocks
    copies         ranks of DistributedDataParallel, which all-reduce gradients once per step
    shards         ranks of fully_shard, which gather weights twice and reduce-scatter gradients
                   once per micro-batch
    micro_batches  micro-batches of a step
    gathered       bytes that are gathered, relative to the weights' bytes; below 1 if codes of
                   weights are gathered
    reduced        bytes that are reduced, relative to the weights' bytes; below 1 for low-precision
                   gradients
    """
    part = weights / messages
    # An all-reduce is a reduce-scatter and an all-gather.
    whole = 2 * collective(reduced * weights / shards / messages, copies)
    # fully_shard gathers weights for the forward and again for the backward pass.
    sharded = micro_batches * (
        2 * collective(gathered * part, shards) + collective(reduced * part, shards)
    )
    return messages * (whole + sharded)
