"""How long messages between ranks take: an alpha-beta model of each collective.

    seconds = a log2(N) + B (N - 1) / N / b        a collective of B bytes among N ranks

a and b of a node (8 ranks), or of the network between nodes: of an H100 by NVLink, and of 400 Gbit/s per GPU between nodes [assumed, not
measured]. What of it is hidden behind the device's work is not known beforehand: a step takes as long as the larger of the two at least,
and as both together at most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

RANKS_PER_NODE = 8


@dataclass(frozen=True)
class Link:
    """start: seconds of each doubling of the ranks; rate: bytes/s of a rank."""

    start: float
    rate: float


NODE, NETWORK = Link(5e-6, 450e9), Link(15e-6, 50e9)


def link(ranks: int) -> Link:
    return NODE if ranks <= RANKS_PER_NODE else NETWORK


def collective(nbytes: float, ranks: int) -> float:
    """Seconds to gather, or to reduce and scatter, so many bytes in all."""
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
    """Seconds of the messages of one step.

    weights   bytes of all weights, whole; their gradients are as large
    messages  into how many they are cut: blocks
    copies    ranks of DistributedDataParallel, which reduce and gather gradients once a step
    shards    ranks of fully_shard, which gather weights twice in each micro-batch and reduce gradients once
    gathered, reduced  the share of the weights' bytes that travels where codes of weights are gathered and gradients are narrow
    """
    part = weights / messages
    whole = 2 * collective(reduced * weights / shards / messages, copies)
    sharded = micro_batches * (2 * collective(gathered * part, shards) + collective(reduced * part, shards))
    return messages * (whole + sharded)
