"""Run a function on all ranks so that either every rank succeeds or all raise the same error.

    index = together(lambda: read(folder), group)

Each rank gets its own result, or all ranks raise the error of the first failed rank. Only an
error's class name and message are exchanged; the message begins with the rank, "rank 1: cannot save
...".
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from narrowgauge.errors import CheckpointError, NarrowgaugeError

T = TypeVar("T")
Group = dist.ProcessGroup | None


def rank_and_world(group: Group) -> tuple[int, int]:
    is_distributed = dist.is_available() and dist.is_initialized()
    return (dist.get_rank(group), dist.get_world_size(group)) if is_distributed else (0, 1)


def together(work: Callable[[], T], group: Group, compare: Callable[[T], Any] | None = None, what: str = "") -> T:
    """Return work() of this rank once it has succeeded on all ranks; else raise the same error on all.

    work     function to call
    group    process group; None: the default group
    compare  function of the result whose value must be equal on all ranks
    what     name of that value, for the error message
    """
    rank, world = rank_and_world(group)
    result: Any = None
    failure: tuple[str, str] | None = None
    cause: BaseException | None = None
    try:
        result = work()
    # Interrupts too: the other ranks wait in the all_gather_object below for this rank's report.
    except BaseException as error:
        cause, failure = error, (type(error).__name__, _sentence(error))
    if world == 1:
        if cause is not None:
            raise cause
        return result
    told: list[Any] = [None] * world
    dist.all_gather_object(told, (failure, compare(result) if compare and failure is None else None), group=group)
    # An interrupt stays an interrupt on its own rank.
    if cause is not None and not isinstance(cause, Exception):
        raise cause
    for place, (failed, _) in enumerate(told):
        if failed is not None:
            raise _named(failed[0], failed[1], place) from (cause if place == rank else None)
    for place, (_, seen) in enumerate(told):
        if seen != told[0][1]:
            raise CheckpointError(
                f"{what} is another one on rank {place} than on rank 0. Use a file system that all ranks share."
            )
    return result


@contextmanager
def one_sentence(group: Group) -> Iterator[None]:
    """Convert torch's CheckpointException into the error of the lowest failed rank.

    torch's exception is a BaseException with the tracebacks of all ranks.
    """
    _, world = rank_and_world(group)
    try:
        with warnings.catch_warnings():
            if not (dist.is_available() and dist.is_initialized()):
                # torch warns about saving without a process group, which is supported here.
                warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
            yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        if world == 1 or isinstance(cause, KeyboardInterrupt):
            raise cause from None
        raise _named(type(cause).__name__, _sentence(cause), rank) from None


def _sentence(error: BaseException) -> str:
    return str(error) if isinstance(error, NarrowgaugeError) else f"{type(error).__name__}: {error}"


def _named(kind: str, words: str, rank: int) -> NarrowgaugeError:
    # Only the class name was sent: look up the class, so that callers can catch it.
    return _kinds(NarrowgaugeError).get(kind, CheckpointError)(f"rank {rank}: {words}")


def _kinds(base: type[NarrowgaugeError]) -> dict[str, type[NarrowgaugeError]]:
    found = {base.__name__: base}
    for each in base.__subclasses__():
        found |= _kinds(each)
    return found
