"""Check that all ranks were given the same settings, and raise the same error on each if not.

Ranks with different settings would deadlock in a collective or silently train different models.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from narrowgauge.errors import ConfigError


def require_same(
    settings: Mapping[str, Any],
    groups: Iterable[dist.ProcessGroup],
    device: torch.device | str,
    timeout_s: float | None = None,
) -> None:
    """Raise ConfigError on every rank of each group if a setting differs between its ranks.

    settings   name -> value: numbers, strings, None or tuples; the names must be the same on all
               ranks
    groups     process groups to compare within, one after the other
    device     where the compared tensor is created; must suit the groups' backend
    timeout_s  seconds to wait for the other ranks, else RuntimeError; None: the group's timeout

    Cost: one small all-reduce per group, and an all_gather_object if a value differs.
    """
    # 56 bits of SHA-256: digest and negated digest both fit into int64.
    digests = [
        int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "big")
        for value in settings.values()
    ]
    for group in groups:
        # One MAX gives both bounds, max(d) and -min(d); the values are equal if and only if they
        # agree.
        both = torch.tensor([digests, [-digest for digest in digests]], device=device)
        if timeout_s is None:
            dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
        else:
            work = dist.all_reduce(both, dist.ReduceOp.MAX, group=group, async_op=True)
            work.wait(timedelta(seconds=timeout_s))
        highest, lowest = both.tolist()
        for (name, value), high, low in zip(settings.items(), highest, lowest, strict=True):
            if high == -low:
                continue
            # All ranks see the same bounds and take this branch together, so the collective cannot
            # deadlock.
            reported: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(reported, (dist.get_rank(), value), group=group)
            words = "; ".join(f"{own!r} on rank {rank}" for rank, own in _differing_items(reported))
            raise ConfigError(
                f"distribute: ranks differ in {name}: {words}. Give all ranks the same.",
                code="distribute.ranks-differ",
            )


def _differing_items(reported: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
    """Return [(rank, value)], reduced to the first differing item if all values are tuples.

    None stands for an item that a shorter tuple lacks.
    """
    if not all(isinstance(value, tuple) for _, value in reported):
        return reported
    longest = max(len(value) for _, value in reported)
    for index in range(longest):
        items = [(rank, value[index] if index < len(value) else None) for rank, value in reported]
        if any(item != items[0][1] for _, item in items):
            return items
    return reported
