"""Ranks that were given different settings would wait for each other for ever, or train another model: they refuse, all of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from narrowgauge.errors import ConfigError


def refuse_others(
    asked: Mapping[str, Any],
    groups: Iterable[dist.ProcessGroup],
    device: torch.device | str,
    timeout_s: float | None = None,
) -> None:
    """Raises ConfigError on every rank of each group if a value differs on one: numbers, words, None and tuples of them.

    The names must be the same on all ranks. Costs one small all-reduce, and a second exchange where something differs.
    timeout_s: for the other ranks to join in, or RuntimeError; None: the group's own.
    """
    digests = [int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "big") for value in asked.values()]
    for group in groups:
        both = torch.tensor([digests, [-digest for digest in digests]], device=device)
        if timeout_s is None:
            dist.all_reduce(both, dist.ReduceOp.MAX, group=group)
        else:
            work = dist.all_reduce(both, dist.ReduceOp.MAX, group=group, async_op=True)
            work.wait(timedelta(seconds=timeout_s))
        highest, lowest = both.tolist()
        for (name, value), high, low in zip(asked.items(), highest, lowest, strict=True):
            if high == -low:
                continue
            told: list[Any] = [None] * dist.get_world_size(group)
            dist.all_gather_object(told, (dist.get_rank(), value), group=group)
            words = "; ".join(f"{own!r} on rank {rank}" for rank, own in _different(told))
            raise ConfigError(f"distribute: ranks differ in {name}: {words}. Give all ranks the same.")


def _different(told: list[tuple[int, Any]]) -> list[tuple[int, Any]]:
    """(rank, value), of tuples the first item that is not the same everywhere; None: a rank has no such item."""
    if not all(isinstance(value, tuple) for _, value in told):
        return told
    longest = max(len(value) for _, value in told)
    for place in range(longest):
        items = [(rank, value[place] if place < len(value) else None) for rank, value in told]
        if any(item != items[0][1] for _, item in items):
            return items
    return told
