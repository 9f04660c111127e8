"""Counters and maxima of kernels: int32 memory that kernels find zero and leave zero.

No launch has to clear it, so it is kept, one buffer per size, device and stream (`of_stream`). Two
launches may share a buffer: the first leaves maxima, the second reads and clears them. If the second
one raises, or Ctrl-C comes between the two, the buffer keeps the maxima, and a later cast would take
them for its own. So no buffer outlives an exception of a call that launches (`dropped_on_error`).

A fault within a kernel needs no more: CUDA then refuses all further work of the process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from narrowgauge.addresses import cached

# Buffers of earlier generations are not used again. [0] is the present one.
_GENERATION = [0]
Known = dict[tuple[int, int], Tensor]  # (stream, generation) -> buffer


def of_stream(count: int, device: torch.device, written: int, known: Known) -> Tensor:
    """Return the buffer of the current stream, int32 [count], zero from element `written` on.

    known  buffers by stream, for a replayed call
    """
    stream = 0
    if device.type == "cuda":
        if torch._C._cuda_isCurrentStreamCapturing():
            return torch.zeros(count, dtype=torch.int32, device=device)
        # Cheaper than torch.cuda.current_stream, which makes a Stream.
        stream = torch._C._cuda_getCurrentRawStream(device.index)
    place = stream, _GENERATION[0]
    if (found := known.get(place)) is None:
        for old in [each for each in known if each[1] != place[1]]:
            del known[old]
        found = _zeros(count, device, written, stream)
        # A fake tensor must not be kept: later real calls would receive it.
        if type(found) is Tensor:
            known[place] = found
    return found


@cached
def _zeros(count: int, device: torch.device, written: int, stream: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.zeros(count, dtype=torch.int32, device=device)


def drop() -> None:
    """Make all later calls take new buffers. Launched kernels keep theirs: memory is reused in the order of a stream."""
    _GENERATION[0] += 1
    _zeros.cache_clear()  # type: ignore[attr-defined]


@contextmanager
def dropped_on_error() -> Iterator[None]:
    """Drop all buffers if the block raises, for launches that share one."""
    try:
        yield
    except BaseException:  # Ctrl-C too
        drop()
        raise
