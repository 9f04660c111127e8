"""The replayed caching allocator: rounding, segments and what they are split into (exact, by hand), and no byte lost (any order)."""

from __future__ import annotations

import random

import pytest

from narrowgauge.plan import CachingAllocator, OutOfMemory

MIB = 2**20


def reserved(*requests: int, expandable: bool = False) -> int:
    allocator = CachingAllocator(expandable=expandable)
    for number, nbytes in enumerate(requests):
        allocator.allocate(number, nbytes)
    return allocator.reserved


@pytest.mark.parametrize(
    ("requests", "whole", "expanding"),
    [
        ((1,), 2 * MIB, 2 * MIB),  # a small segment
        ((MIB, MIB), 2 * MIB, 2 * MIB),  # two in one
        ((MIB, MIB, 1), 4 * MIB, 4 * MIB),
        ((MIB + 1,), 20 * MIB, 20 * MIB),  # a large one
        ((9 * MIB, 9 * MIB), 20 * MIB, 20 * MIB),
        ((10 * MIB,), 10 * MIB, 20 * MIB),  # one of its own
        ((11 * MIB + 1,), 12 * MIB, 20 * MIB),
        ((30 * MIB, 30 * MIB), 60 * MIB, 60 * MIB),
        ((MIB, 9 * MIB), 22 * MIB, 22 * MIB),  # two pools
        ((0,), 0, 0),
    ],
)
def test_what_is_reserved(requests, whole, expanding):
    assert reserved(*requests) == whole and reserved(*requests, expandable=True) == expanding


def test_a_block_is_split_where_the_rest_is_worth_it():
    """Of 20 MiB with 19.5 in use the rest of 0.5 MiB is not: the whole counts as allocated."""
    allocator = CachingAllocator()
    for number, nbytes in enumerate((30 * MIB, 12 * MIB)):
        allocator.allocate(number, nbytes)
    allocator.free(0)
    allocator.allocate(2, 29 * MIB)
    assert allocator.allocated == 42 * MIB
    allocator.free(2)
    allocator.allocate(3, 28 * MIB)
    assert allocator.allocated == 40 * MIB and allocator.reserved == 42 * MIB


def test_the_smallest_block_that_suffices_is_taken():
    allocator = CachingAllocator()
    for number, nbytes in enumerate((40 * MIB, 20 * MIB)):
        allocator.allocate(number, nbytes)
    allocator.free(0)
    allocator.free(1)
    allocator.allocate(2, 20 * MIB)
    allocator.allocate(3, 40 * MIB)
    assert allocator.reserved == 60 * MIB


def test_what_lies_idle_is_given_back_before_it_does_not_fit():
    """Small parts of a range that can expand serve one large request; without it their segments are given back for it."""
    for expandable in (False, True):
        allocator = CachingAllocator(60 * MIB, expandable)
        for number in range(3):
            allocator.allocate(number, 20 * MIB)
        for number in range(3):
            allocator.free(number)
        allocator.allocate(3, 60 * MIB)
        assert allocator.reserved == 60 * MIB
        with pytest.raises(OutOfMemory):
            allocator.allocate(4, 1)


@pytest.mark.parametrize("capacity", [None, 400 * MIB])
@pytest.mark.parametrize("expandable", [False, True])
def test_every_byte_is_in_use_or_free(expandable, capacity):
    rng, allocator, sizes = (
        random.Random(0),
        CachingAllocator(capacity, expandable),
        dict[int, int](),
    )
    for number in range(2000):
        while sum(sizes.values()) > 200 * MIB or (sizes and rng.random() < 0.4):
            gone = rng.choice(list(sizes))
            allocator.free(gone)
            del sizes[gone]
        nbytes = int(2 ** rng.uniform(5, 25))
        allocator.allocate(number, nbytes)
        sizes[number] = nbytes
        free = sum(key[0] for keys in allocator._free.values() for key in keys)
        assert (
            free + allocator.allocated
            == allocator.reserved
            <= (capacity or allocator.peak_reserved)
        )
        assert sum(sizes.values()) <= allocator.allocated <= allocator.peak_allocated
    for number in sizes:
        allocator.free(number)
    assert allocator.allocated == 0
