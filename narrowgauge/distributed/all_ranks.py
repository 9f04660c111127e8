"""Run a function on all ranks so that either every rank succeeds or all raise the same error.

    index = run_on_all_ranks(lambda: read(folder), group)

Each rank gets its own result, or all ranks raise the error of the first failed rank. Only an
error's class name and message are exchanged; the message begins with the rank, "rank 1: cannot save
...".
"""

from __future__ import annotations

import re
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


def run_on_all_ranks(
    work: Callable[[], T], group: Group, compare: Callable[[T], Any] | None = None, what: str = ""
) -> T:
    """Return work() of this rank once it has succeeded on all ranks; else raise the same error on all.

    work     function to call
    group    process group; None: the default group
    compare  function of the result whose value must be equal on all ranks
    what     name of that value, for the error message
    """
    rank, world = rank_and_world(group)
    result: Any = None
    failure: tuple[str, str, str] | None = None
    cause: BaseException | None = None
    try:
        result = work()
    # Interrupts too: the other ranks wait in the all_gather_object below for this rank's report.
    except BaseException as error:
        cause, failure = error, _described(error)
    if world == 1:
        if cause is not None:
            raise cause
        return result
    reports: list[Any] = [None] * world
    dist.all_gather_object(
        reports, (failure, compare(result) if compare and failure is None else None), group=group
    )
    # An interrupt stays an interrupt on its own rank.
    if cause is not None and not isinstance(cause, Exception):
        raise cause
    for other, (failed, _) in enumerate(reports):
        if failed is not None:
            raise _error_of_rank(failed, other) from (cause if other == rank else None)
    for other, (_, value) in enumerate(reports):
        if value != reports[0][1]:
            raise CheckpointError(
                f"{what} is another one on rank {other} than on rank 0. Use a file system that all ranks share.",
                code="checkpoint.unshared-files",
            )
    return result


@contextmanager
def first_rank_error(group: Group) -> Iterator[None]:
    """Convert torch's CheckpointException into the error of the lowest failed rank.

    torch's exception is a BaseException with the tracebacks of all ranks.
    """
    _, world = rank_and_world(group)
    try:
        with warnings.catch_warnings():
            if not (dist.is_available() and dist.is_initialized()):
                # torch warns about saving without a process group, which is supported here.
                warnings.filterwarnings(
                    "ignore", "torch.distributed is disabled, unavailable or uninitialized"
                )
            yield
    except CheckpointException as error:
        rank, (cause, _) = min(error.failures.items())
        if world == 1 or isinstance(cause, KeyboardInterrupt):
            raise cause from None
        raise _error_of_rank(_described(cause), rank) from None


def _described(error: BaseException) -> tuple[str, str, str]:
    """Class name, message and code of an error, as they are sent to other ranks."""
    kind = type(error).__name__
    if isinstance(error, NarrowgaugeError):
        return kind, str(error), error.code
    return kind, f"{kind}: {error}", ""


def _error_of_rank(failed: tuple[str, str, str], rank: int) -> NarrowgaugeError:
    kind, message, code = failed
    # Only the class name was sent: look up the class, so that callers can catch it.
    found = _subclasses(NarrowgaugeError).get(kind, CheckpointError)
    return found(f"rank {rank}: {message}", code=code)


def _subclasses(base: type[NarrowgaugeError]) -> dict[str, type[NarrowgaugeError]]:
    found = {base.__name__: base}
    for each in base.__subclasses__():
        found |= _subclasses(each)
    return found


# Messages of gloo's TCP transport (pair.cc, unbound_buffer.cc) and of the store for a peer that is
# gone. Paths of gloo's sources do not count: they begin errors of mismatched sizes too.
BROKEN = re.compile(
    r"[Cc]onnection (closed|reset|refused)|Socket (unexpectedly )?closed|Pair is not connected|[Tt]imed out"
    r"|(Connect|Read|Write) timeout|Read error|writev|Broken pipe|connectFullMesh failed"
)


def is_lost(error: Exception) -> bool:
    """Return True if a collective failed because another rank died or hangs.

    torch raises dist.DistError for some failures. Others, such as broken gloo connections, are
    plain RuntimeErrors that only their message identifies.
    """
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and BROKEN.search(str(error)) is not None
    )
