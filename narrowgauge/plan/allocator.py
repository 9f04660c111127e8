"""Simulation of torch's caching allocator for GPUs, which predicts reserved memory.

A request is rounded up to 512 bytes. Requests up to 1 MiB are served from segments of 2 MiB, and
requests below 10 MiB from segments of 20 MiB. A larger request gets a segment of its own size,
rounded up to 2 MiB. The allocator takes the smallest free block that suffices. It splits the block
if the remainder is at least 512 bytes in a small segment, or more than 1 MiB in a large one. Freed
neighbours are merged. If the device is full, segments without a used block are released first.
(c10/cuda/CUDACachingAllocator.cpp, torch 2.11 to 2.13; one stream, no limits on splitting.)

With expandable segments, a pool is one range of addresses that grows by pages of 2 or 20 MiB.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from narrowgauge.plan.trace import Trace

ROUNDING = 512
SMALL = 2**20  # largest request in the pool of small segments
SMALL_SEGMENT, LARGE_SEGMENT, SEGMENT_ROUNDING = 2 * 2**20, 20 * 2**20, 2 * 2**20
LARGE = 10 * 2**20  # smallest request with a segment of its own


class _Block:
    """Bytes start ... start + size of a segment, with links to the neighbouring blocks."""

    __slots__ = ("before", "behind", "free", "segment", "size", "start")

    def __init__(self, segment: int, start: int, size: int) -> None:
        self.segment, self.start, self.size, self.free = segment, start, size, True
        self.before: _Block | None = None
        self.behind: _Block | None = None


class OutOfMemory(Exception):
    """A request does not fit, even after all free segments are released."""


class CachingAllocator:
    """Simulated allocator.

    capacity    bytes of the device; None: unlimited
    expandable  True: as with PYTORCH_ALLOC_CONF=expandable_segments:True
    """

    def __init__(self, capacity: int | None = None, expandable: bool = False) -> None:
        self.capacity, self.expandable = capacity, expandable
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = 0
        self._segments = 0
        self._blocks: dict[int, _Block] = {}  # by number of the allocation
        # (size, segment, start) of free blocks
        self._free: dict[bool, list[tuple[int, int, int]]] = {True: [], False: []}
        self._places: dict[tuple[int, int], _Block] = {}
        # Last block of each expandable range.
        self._ends: dict[bool, _Block | None] = {True: None, False: None}

    def allocate(self, number: int, nbytes: int) -> None:
        if nbytes == 0:
            return
        size = -(-nbytes // ROUNDING) * ROUNDING
        small = size <= SMALL
        block = self._find(size, small)
        if block is None:
            block = self._grown(size, small) if self.expandable else self._segment(size, small)
        self._drop(block, small)
        if block.size - size >= (ROUNDING if small else SMALL + 1):
            self._split(block, size, small)
        block.free = False
        self._blocks[number] = block
        self.allocated += block.size
        self.peak_allocated = max(self.peak_allocated, self.allocated)

    def free(self, number: int) -> None:
        block = self._blocks.pop(number, None)
        if block is None:  # the allocation had no bytes
            return
        self.allocated -= block.size
        small = self._is_small(block)
        block.free = True
        for other in (block.before, block.behind):
            if other is not None and other.free:
                self._drop(other, small)
                block = self._joined(block, other)
        self._keep(block, small)

    def _is_small(self, block: _Block) -> bool:
        # Segments of the small pool have negative numbers, so that a block's pool needs no field.
        return block.segment < 0

    def _find(self, size: int, small: bool) -> _Block | None:
        """Return the smallest free block that suffices, or None.

        The block at the end of an expandable range comes last, because it can grow to any size.
        """
        keys, end = self._free[small], self._ends[small]
        found = None
        # Sorted by size and position, like the C++ allocator's set of free blocks.
        for key in keys[bisect_left(keys, (size, -(2**62), 0)) :]:
            found = self._places[key[1], key[2]]
            if found is not end:
                break
        return found

    def _segment(self, size: int, small: bool) -> _Block:
        length = (
            SMALL_SEGMENT
            if small
            else LARGE_SEGMENT
            if size < LARGE
            else -(-size // SEGMENT_ROUNDING) * SEGMENT_ROUNDING
        )
        self._reserve(length)
        self._segments += 1
        block = _Block(-self._segments if small else self._segments, 0, length)
        self._keep(block, small)
        return block

    def _grown(self, size: int, small: bool) -> _Block:
        """Extend the range by the pages that the request needs beyond the free block at its end."""
        page = SMALL_SEGMENT if small else LARGE_SEGMENT

        def missing() -> int:
            end = self._ends[small]
            there = end.size if end is not None and end.free else 0
            return -(-(size - there) // page) * page

        self._make_room(missing())
        # Evaluated again: the end of the range may have been released.
        length, last = missing(), self._ends[small]
        self._reserve(length)
        if last is None:
            block = _Block(-1 if small else 1, 0, length)
        elif last.free:
            self._drop(last, small)
            last.size += length
            block = last
        else:
            block = _Block(last.segment, last.start + last.size, length)
            block.before, last.behind = last, block
        self._ends[small] = block
        self._keep(block, small)
        return block

    def _make_room(self, length: int) -> None:
        if self.capacity is not None and self.reserved + length > self.capacity:
            self._give_back()

    def _reserve(self, length: int) -> None:
        self._make_room(length)
        if self.capacity is not None and self.reserved + length > self.capacity:
            raise OutOfMemory
        self.reserved += length
        self.peak_reserved = max(self.peak_reserved, self.reserved)

    def _give_back(self) -> None:
        """Release unused segments, and the free pages at the end of an expandable range."""
        for small, keys in self._free.items():
            for key in list(keys):
                block = self._places[key[1], key[2]]
                if self.expandable:
                    page = SMALL_SEGMENT if small else LARGE_SEGMENT
                    pages = block.size // page * page if block.behind is None else 0
                    if pages:
                        self._drop(block, small)
                        block.size -= pages
                        self.reserved -= pages
                        if block.size:
                            self._keep(block, small)
                        else:
                            self._ends[small] = block.before
                            if block.before is not None:
                                block.before.behind = None
                elif block.before is block.behind is None:
                    self._drop(block, small)
                    self.reserved -= block.size

    def _split(self, block: _Block, size: int, small: bool) -> None:
        rest = _Block(block.segment, block.start + size, block.size - size)
        rest.before, rest.behind = block, block.behind
        if rest.behind is not None:
            rest.behind.before = rest
        elif self.expandable:
            self._ends[small] = rest
        block.behind, block.size = rest, size
        self._keep(rest, small)

    def _joined(self, a: _Block, b: _Block) -> _Block:
        first, second = (a, b) if a.start < b.start else (b, a)
        first.size += second.size
        first.behind = second.behind
        if second.behind is not None:
            second.behind.before = first
        elif self.expandable:
            self._ends[self._is_small(first)] = first
        return first

    def _keep(self, block: _Block, small: bool) -> None:
        insort(self._free[small], (block.size, block.segment, block.start))
        self._places[block.segment, block.start] = block

    def _drop(self, block: _Block, small: bool) -> None:
        keys = self._free[small]
        del keys[bisect_left(keys, (block.size, block.segment, block.start))]


def replay(trace: Trace, capacity: int | None = None, expandable: bool = False) -> CachingAllocator:
    """Return the allocator after all events of the trace.

    Raises OutOfMemory if they do not fit into `capacity` bytes.
    """
    allocator = CachingAllocator(capacity, expandable)
    run(allocator, trace, trace.events)
    return allocator


def run(allocator: CachingAllocator, trace: Trace, events: Iterable[int]) -> None:
    for event in events:
        if event < 0:
            allocator.free(~event)
        else:
            allocator.allocate(event, trace.allocations[event].nbytes)
